"""LayerSpec: one decoder layer in numbers. It is made once, from config.json or GGUF metadata; whoever needs the shape
of a layer reads it there, and nobody keeps a copy.

    ModelConfig.layers[i]   LayerSpec   attention and MLP: maths, weights, memory of a step, cost
                     .kv    KVSpec      what the layer keeps of each token: KV layout, storage, hand-over
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from twostroke.config.experts import ExpertsSpec
from twostroke.config.kv_format import KVFormat, slot_bytes
from twostroke.config.rope import RopeConfig

QKNorm = Literal["none", "heads", "rotated_heads", "own_heads", "rows"]
"""Norm of q and k before the rotation: none, over each head by one weight for all (`rotated_heads`: behind the
rotation), over each head by a weight of its own, or over all heads of q, and of k, at once. Those with a weight for
each head are layer norms, the others RMS norms."""
NormKind = Literal["rms", "layer", "layer_bias"]
"""RMS norm, or layer norm (Ba et al. 2016, arXiv:1607.06450) without or with a bias."""
NormPlace = Literal["before", "after", "around", "shared"]
"""Where the norms of attention and MLP stand: at their input, at their output, at both, or one at the input of both."""
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""What a gated MLP makes of its gate g and of its up projection u: silu(g) u, or gelu(g) u by GELU's tanh formula
(Hendrycks and Gimpel 2016, arXiv:1606.08415), or gpt-oss's min(g, 7) sigmoid(1.702 min(g, 7)) (1 + u), u within ±7
(arXiv:2508.10925)."""
PlainActivation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]
"""The function between the two products of an MLP without a gate. `gelu` is exact, by the error function; `relu2` is
the square of ReLU (So et al. 2021, arXiv:2109.08668); `xielu` has learned parameters (model/apertus.py)."""
MLPActivation = Literal[Activation, PlainActivation]
CLAMPED_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""The numbers of `clamped_swiglu`, by their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The KV cache of one layer: a vector of K and one of V for each token and KV head."""

    num_kv_heads: int
    head_dim: int
    """Numbers in a vector of K, and in one of V."""
    window: int | None = None
    """Tokens that a query sees, itself included; None: all."""
    num_holders: int = 1
    """Ranks that keep the same heads, where there are fewer heads than ranks."""

    def can_deal(self, num_ranks: int) -> bool:
        """Return whether every rank can have equally many KV heads, or several the same one.

        >>> [n for n in range(1, 13) if KVSpec(num_kv_heads=3, head_dim=64).can_deal(n)]
        [1, 3, 6, 9, 12]
        """
        return self.num_kv_heads % num_ranks == 0 or num_ranks % self.num_kv_heads == 0

    def of_rank(self, num_ranks: int) -> KVSpec:
        """Return the share of each of several ranks. All have equally many KV heads; where there are fewer than ranks,
        each has one, and neighbours have the same.

        >>> KVSpec(num_kv_heads=8, head_dim=64).of_rank(4).num_kv_heads
        2
        >>> shared = KVSpec(num_kv_heads=2, head_dim=64).of_rank(4)
        >>> shared.num_kv_heads, [shared.heads_of_rank(rank).start for rank in range(4)]
        (1, [0, 0, 1, 1])
        """
        assert self.num_holders == 1, self
        num_holders = max(1, num_ranks // self.num_kv_heads)
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // num_ranks), num_holders=num_holders)

    def of_all(self, num_ranks: int) -> KVSpec:
        """Return what the ranks have together, where this is the share of each of them.

        >>> spec = KVSpec(num_kv_heads=2, head_dim=64)
        >>> [spec.of_rank(num_ranks).of_all(num_ranks) == spec for num_ranks in (1, 2, 4)]
        [True, True, True]
        """
        return replace(self, num_kv_heads=self.num_kv_heads * num_ranks // self.num_holders, num_holders=1)

    def heads_of_rank(self, rank: int) -> range:
        """Return which of the model's KV heads a rank has, where this is its share."""
        first = rank // self.num_holders * self.num_kv_heads
        return range(first, first + self.num_kv_heads)

    def bytes_per_token(self, kv_format: KVFormat) -> int:
        """Return the bytes of K and V of one token.

        >>> KVSpec(num_kv_heads=8, head_dim=64).bytes_per_token("bf16")
        2048
        """
        return 2 * self.num_kv_heads * slot_bytes(kv_format, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A decoder layer: attention, then an MLP or experts."""

    num_heads: int
    """Query heads."""
    kv: KVSpec
    rope: RopeConfig | None
    """None: q and k are not rotated (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)."""
    intermediate_size: int
    """Rows of the MLP's up projection, and of its gate; 0: there is no MLP beside the experts."""
    experts: ExpertsSpec | None = None
    """None: every token goes through the MLP."""
    has_gate: bool = True
    """Whether the MLP is gated (Shazeer 2020, arXiv:2002.05202)."""
    is_parallel: bool = False
    """Whether the MLP reads the residual stream before attention is added to it."""
    qkv_bias: bool = False
    """Biases on the q, k and v projections."""
    output_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    norms: NormPlace = "before"
    activation: MLPActivation = "silu"
    """With a gate an Activation, else a PlainActivation."""
    score_scale: float | None = None
    """Factor on q · k; None: 1 / sqrt(head_dim)."""
    score_cap: float | None = None
    """Scores are cap * tanh(score / cap) before the softmax (Gemma 2, arXiv:2408.00118); None: as they are."""
    has_sinks: bool = False
    """Each head has a score of its own, learned, for a key without a value that every query sees (gpt-oss)."""
    has_alibi: bool = False
    """Scores lose `slopes` for each token between query and key (ALiBi, Press et al. 2022, arXiv:2108.12409)."""
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    adds_to_normed: bool = False
    """Attention and MLP add to the output of their norm; else to its input."""
    kv_source: int | None = None
    """The layer before whose K and V this one reads; None: it has its own."""
    has_value_projection: bool = True
    """Whether v has a projection; else it is k as projected."""
    has_value_norm: bool = False
    """An RMS norm without a weight over each head of v."""
    token_input_size: int = 0
    """Numbers that each token brings to this layer by a table of its own (Gemma 3n's per-layer embeddings)."""

    @property
    def softmax_scale(self) -> float:
        """Factor on q · k."""
        return self.kv.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def slopes(self) -> tuple[float, ...]:
        """ALiBi's slope of each query head; empty without ALiBi."""
        return alibi_slopes(self.num_heads) if self.has_alibi else ()

    @property
    def centers_keys(self) -> bool:
        """Whether quantized KV stores the layer's keys less their mean.

        All scores of a query fall alike then, so it has to be a softmax of these scores as they are that follows.
        """
        return self.kv_source is None and self.score_cap is None and not self.has_sinks

    @property
    def has_plain_attention(self) -> bool:
        """Whether the layer projects q, k and v of its own, and norms at most each head of q and k."""
        has_own_kv = self.kv_source is None and self.has_value_projection and not self.has_value_norm
        return has_own_kv and self.qk_norm in ("none", "heads")

    @property
    def projected_kv_size(self) -> int:
        """Numbers of k and v that are projected, all heads together."""
        if self.kv_source is not None:
            return 0
        return (2 if self.has_value_projection else 1) * self.kv_size

    @property
    def q_size(self) -> int:
        """Numbers of q, all heads together."""
        return self.num_heads * self.kv.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of k, and of v, all heads together."""
        return self.kv.num_kv_heads * self.kv.head_dim


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope of each head, by the rule of Press et al. 2022.

    Of a power of two the slopes are a geometric sequence that ends at 2**-8. More heads take every second slope of the
    sequence for twice as many.

    >>> alibi_slopes(4), alibi_slopes(6)
    ((0.25, 0.0625, 0.015625, 0.00390625), (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125))
    """
    num_first = 1 << (num_heads.bit_length() - 1)
    first = (2.0 ** (-8 * head / num_first) for head in range(1, num_first + 1))
    rest = (2.0 ** (-4 * head / num_first) for head in range(1, 2 * (num_heads - num_first), 2))
    return (*first, *rest)
