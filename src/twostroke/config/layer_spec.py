"""LayerSpec: the shape of one decoder layer. It is built once, from config.json or GGUF metadata; all code that needs
the shape of a layer reads it there.

    ModelConfig.layers[i]   LayerSpec   attention and MLP: maths, weights, memory of a step, cost
                     .kv    KVSpec      the layer's KV per token: KV layout, storage, hand-over
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from twostroke.config.experts import ExpertsSpec
from twostroke.config.kv_format import KVFormat, slot_bytes
from twostroke.config.rope import RopeConfig

QKNorm = Literal["none", "heads", "rotated_heads", "own_heads", "rows"]
"""Norm of q and k before the rotation:

- none;
- heads: over each head, one weight for all heads;
- rotated_heads: as heads, but after the rotation;
- own_heads: over each head, with a weight for each head (layer norms; the others are RMS norms);
- rows: over all heads of q, and of k, at once.
"""
NormKind = Literal["rms", "layer", "layer_bias"]
"""RMS norm, or layer norm (Ba et al. 2016, arXiv:1607.06450) without or with a bias."""
NormPlace = Literal["before", "after", "around", "shared"]
"""Position of the norms of attention and MLP: at the input, at the output, at both, or one shared at the input of
both."""
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""Function of a gated MLP's gate g and up projection u: silu(g) u; or gelu(g) u by GELU's tanh formula
(Hendrycks and Gimpel 2016, arXiv:1606.08415); or gpt-oss's min(g, 7) sigmoid(1.702 min(g, 7)) (1 + u), u within ±7
(arXiv:2508.10925)."""
PlainActivation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]
"""Function between the two linear layers of an MLP without a gate. `gelu` is exact, by the error function; `relu2` is
the square of ReLU (So et al. 2021, arXiv:2109.08668); `xielu` has learned parameters (model/apertus.py)."""
MLPActivation = Literal[Activation, PlainActivation]
CLAMPED_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Parameters of `clamped_swiglu`, by their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The KV cache of one layer: a vector of K and one of V for each token and KV head."""

    num_kv_heads: int
    head_dim: int
    """Numbers in a vector of K, and in one of V."""
    window: int | None = None
    """Tokens that a query attends to, itself included; None: all."""
    num_holders: int = 1
    """Ranks that keep the same heads, if there are fewer heads than ranks."""

    def can_split_heads(self, num_ranks: int) -> bool:
        """Return whether every rank can have equally many KV heads, or several ranks the same one.

        >>> [n for n in range(1, 13) if KVSpec(num_kv_heads=3, head_dim=64).can_split_heads(n)]
        [1, 3, 6, 9, 12]
        """
        return self.num_kv_heads % num_ranks == 0 or num_ranks % self.num_kv_heads == 0

    def for_rank(self, num_ranks: int) -> KVSpec:
        """Return the share of each of several ranks.

        All ranks have equally many KV heads. If there are fewer heads than ranks, each rank has one, and neighbouring
        ranks share it.

        >>> KVSpec(num_kv_heads=8, head_dim=64).for_rank(4).num_kv_heads
        2
        >>> shared = KVSpec(num_kv_heads=2, head_dim=64).for_rank(4)
        >>> shared.num_kv_heads, [shared.heads_of_rank(rank).start for rank in range(4)]
        (1, [0, 0, 1, 1])
        """
        assert self.num_holders == 1, self
        num_holders = max(1, num_ranks // self.num_kv_heads)
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // num_ranks), num_holders=num_holders)

    def for_all_ranks(self, num_ranks: int) -> KVSpec:
        """Return the whole of which this is the share of each rank.

        >>> spec = KVSpec(num_kv_heads=2, head_dim=64)
        >>> [spec.for_rank(num_ranks).for_all_ranks(num_ranks) == spec for num_ranks in (1, 2, 4)]
        [True, True, True]
        """
        return replace(self, num_kv_heads=self.num_kv_heads * num_ranks // self.num_holders, num_holders=1)

    def heads_of_rank(self, rank: int) -> range:
        """Return the indices of the model's KV heads that a rank has, if this is its share."""
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
    """Number of query heads."""
    kv: KVSpec
    rope: RopeConfig | None
    """Rotary embedding; None: q and k are not rotated (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)."""
    intermediate_size: int
    """Rows of the MLP's up projection, and of its gate; 0: no MLP in addition to the experts."""
    experts: ExpertsSpec | None = None
    """Experts of the layer; None: every token goes through the MLP."""
    has_gate: bool = True
    """Whether the MLP is gated (Shazeer 2020, arXiv:2002.05202)."""
    is_parallel: bool = False
    """Whether the MLP reads the residual stream before attention's output is added to it."""
    qkv_bias: bool = False
    """Biases on the q, k and v projections."""
    output_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    norms: NormPlace = "before"
    activation: MLPActivation = "silu"
    """An Activation if the MLP has a gate, otherwise a PlainActivation."""
    score_scale: float | None = None
    """Factor on q · k; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Soft cap: scores become cap * tanh(score / cap) before the softmax (Gemma 2, arXiv:2408.00118); None: no cap."""
    has_sinks: bool = False
    """Whether each head has a learned score for an additional key without a value that every query sees (gpt-oss)."""
    has_alibi: bool = False
    """Whether scores lose `slopes` for each token between query and key (ALiBi, Press et al. 2022,
    arXiv:2108.12409)."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP before they are added to the residual stream."""
    residual_from_norm: bool = False
    """Whether attention and MLP add to the output of their norm instead of its input."""
    kv_source: int | None = None
    """Earlier layer whose K and V this one reads; None: it has its own."""
    has_value_projection: bool = True
    """Whether v has a projection; otherwise v is k before its norm and rotation."""
    has_value_norm: bool = False
    """Whether an RMS norm without a weight is applied to each head of v."""
    token_input_size: int = 0
    """Numbers per token that this layer reads from its own embedding table (Gemma 3n's per-layer embeddings)."""

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

        Subtracting the mean shifts all scores of a query alike, so the scores must go into a plain softmax.
        """
        return self.kv_source is None and self.attention_softcap is None and not self.has_sinks

    @property
    def has_plain_attention(self) -> bool:
        """Whether the layer projects its own q, k and v, and norms at most each head of q and k."""
        has_own_kv = self.kv_source is None and self.has_value_projection and not self.has_value_norm
        return has_own_kv and self.qk_norm in ("none", "heads")

    @property
    def projected_kv_size(self) -> int:
        """Number of projected k and v values, all heads together."""
        if self.kv_source is not None:
            return 0
        return (2 if self.has_value_projection else 1) * self.kv_size

    @property
    def q_size(self) -> int:
        """Number of q values, all heads together."""
        return self.num_heads * self.kv.head_dim

    @property
    def kv_size(self) -> int:
        """Number of k values, and of v values, all heads together."""
        return self.kv.num_kv_heads * self.kv.head_dim


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope of each head, by the rule of Press et al. 2022.

    For a power of two the slopes are a geometric sequence that ends at 2**-8. Further heads take every second slope of
    the sequence for twice as many heads.

    >>> alibi_slopes(4), alibi_slopes(6)
    ((0.25, 0.0625, 0.015625, 0.00390625), (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125))
    """
    num_first = 1 << (num_heads.bit_length() - 1)
    first = (2.0 ** (-8 * head / num_first) for head in range(1, num_first + 1))
    rest = (2.0 ** (-4 * head / num_first) for head in range(1, 2 * (num_heads - num_first), 2))
    return (*first, *rest)
