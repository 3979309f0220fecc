"""The products of a model at its real shapes: qkv, output, gate and up with their activation, down, head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.kernels import reference
from twostroke.kernels.dispatch import Operators, Weight
from twostroke.kernels.quantized_weight import QuantizedWeight, quantize_in_groups, quantize_per_channel
from twostroke.measure.operators.subject import Point, Subject, against_reference

KINDS = ("bf16", "f32", "int8", "int4")
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
_PRODUCTS = {"bf16": "bfloat16", "f32": "float32", "int8": "int8", "int4": "int8"}
_LINEAR_TOLERANCES = {"bf16": 0.01, "f32": 1e-5, "int8": 0.02, "int4": 0.02}
"""bfloat16 keeps 8 bits; inputs of quantized products are rounded to 8 bits, 128 of them together."""


def linear_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """One for each kind of weight and each matrix.

    Args:
        config: the model whose shapes are taken.
        quick: one matrix, and few numbers of rows.
    """
    layer, hidden = config.layers[0], config.hidden_size
    q, kv, inner = layer.q_size, layer.kv_size, layer.intermediate_size
    matrices = {
        "gate_up": (2 * inner, hidden),
        "qkv": (q + 2 * kv, hidden),
        "output": (hidden, q),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
    }
    rows = (1, 8, 64) if quick else ROWS
    for kind in KINDS:
        for name, (n, k) in matrices.items():
            if name == "gate_up" or not quick:
                yield _linear_subject(kind, name, n, k, rows)


def _linear_subject(kind: str, name: str, n: int, k: int, rows: Sequence[int]) -> Subject:
    generator = torch.Generator().manual_seed(n + k)
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    made: list[Tensor | QuantizedWeight] = []

    def weight() -> Weight:
        """Made when first asked for; each copy is one of its own."""
        if not made:
            plain = (torch.randn(n, k, generator=generator) / math.sqrt(k)).to(dtype)
            made.append(_QUANTIZE[kind](plain) if kind in _QUANTIZE else plain)
        return made[0] if isinstance(made[0], QuantizedWeight) else made[0].clone()

    inputs = [torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype) for m in rows]
    is_gated = name == "gate_up"

    def build(operators: Operators) -> Callable[[int], Tensor]:
        packed = operators.pack_gated(weight(), None, "silu") if is_gated else operators.pack_linear(weight(), None)
        return lambda point: packed(inputs[point])

    num_bytes = int(n * k * _BYTES_PER_WEIGHT[kind])
    width = n // 2 if is_gated else n
    points = tuple(
        Point(f"{name} {n} x {k}, {m} rows", num_bytes + m * (k + width) * dtype.itemsize, 2.0 * m * n * k)
        for m in rows
    )
    return Subject(
        operator="linear",
        kind=kind,
        points=points,
        constant_bytes=num_bytes,
        product=_PRODUCTS[kind],
        build=build,
        error=against_reference(build, reference.operators()),
        tolerance=_LINEAR_TOLERANCES[kind],
    )


_QUANTIZE: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int8": quantize_per_channel, "int4": quantize_in_groups}
_BYTES_PER_WEIGHT = {"bf16": 2.0, "f32": 4.0, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 32}
"""With a group's share of its float16 scale."""
