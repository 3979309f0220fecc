"""The step-time model of a machine that was not calibrated: bytes at its bandwidth, operations at its matrix rate.

    layers(n) = max(bytes of the layers / bandwidth, 2 P n / rate)        head(r) = the same of the LM head
                of experts, those that n tokens are expected to hit; P counts those that a token chooses
    pair_s    = 4 x heads x head_dim / rate                               seen_s  = K and V of a token / bandwidth

Pairs and seen tokens are counted over all layers, so the last two are means over the layers.

All times are floors: a real step takes longer. They bound what a kernel can reach, and serve as predictions before
anything has run.
"""

from __future__ import annotations

from statistics import mean

from twostroke.cost.step_cost import MachineLimits, ModelShape
from twostroke.cost.step_model import Curve, StepTimeModel, knots


def roofline(shape: ModelShape, machine: MachineLimits, *, most_tokens: int = 512) -> StepTimeModel:
    """Return the floors of all steps as a step-time model.

    Args:
        shape: of the model, with the bytes in which its weights and its KV are stored.
        machine: best rates of the machine.
        most_tokens: query tokens of the largest step; beyond it the curves continue as lines.

    >>> from twostroke.config.layer_spec import KVSpec, LayerSpec
    >>> from twostroke.config.rope import RopeConfig
    >>> layer = LayerSpec(num_heads=2, kv=KVSpec(num_kv_heads=1, head_dim=2), rope=RopeConfig(1e4), intermediate_size=8)
    >>> shape = ModelShape(hidden_size=4, vocab_size=10, layers=(layer,), bytes_per_weight=2, kv_format="bf16")
    >>> model = roofline(shape, MachineLimits(flops_per_s=100.0, bytes_per_s=100.0), most_tokens=2)
    >>> model.layers.seconds      # 144 parameters: 288 bytes, or 288 operations a token
    (2.88, 5.76)
    """
    q_size = mean(layer.q_size for layer in shape.layers)
    kv_bytes = mean(layer.kv.bytes_per_token(shape.kv_format) for layer in shape.layers)
    counts = knots(most_tokens)
    num_head = shape.num_head_parameters

    def seconds(num_bytes: float, num_multiplied: int) -> float:
        return max(num_bytes / machine.bytes_per_s, 2 * num_multiplied / machine.flops_per_s)

    of_layers = (seconds(shape.layer_bytes_read(n), shape.num_parameters_per_token * n) for n in counts)
    return StepTimeModel(
        layers=Curve(counts, tuple(of_layers)),
        head=Curve(counts, tuple(seconds(shape.head_bytes, num_head * n) for n in counts)),
        pair_s=4 * q_size / machine.flops_per_s,
        seen_s=kv_bytes / machine.bytes_per_s,
    )
