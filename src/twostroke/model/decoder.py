"""DecoderModel: the interface of every architecture to the runner, and the types that a model is built from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.kernels.interface import AttentionOperators, Operators
from twostroke.layers.attention import AttentionMetadata, KVTensors
from twostroke.layers.row_split import RowSplit


@dataclass(frozen=True, slots=True)
class Parameter:
    """The shape and kind of one tensor of a model."""

    rows: tuple[int, ...]
    """Rows of each part; parts are stacked, and a checkpoint may store them separately or together."""
    columns: int | None = None
    """Columns of a matrix; None for a vector."""
    is_split: bool = False
    """Whether each rank has only some of the rows of each part (layers/row_split.py)."""
    row_granularity: int = 1
    """Rows of a part that stay on one rank, for example those of a head."""
    is_gated: bool = False
    """Whether it is packed for a gated product (`pack_gated`)."""
    is_wide: bool = False
    """Whether it is kept in float32, whatever the type of the model."""
    is_table: bool = False
    """Whether its rows are only looked up."""
    is_router: bool = False
    """Whether it routes (a router, the gate of a shared expert); it stays in float32, whole on every rank."""
    num_copies: int = 1
    """Number of copies kept on all ranks together, for example one per head."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape(sum(self.rows)))

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Return the shape of `num_rows` of its rows."""
        return (num_rows,) if self.columns is None else (num_rows, self.columns)

    def own_rows(self, num_rows: int, own: Callable[[int], range]) -> range:
        """Return the rows that a rank has of a part with `num_rows` rows.

        >>> Parameter((32, 8, 8), 64, is_split=True, row_granularity=8).own_rows(32, lambda num: range(num // 2))
        range(0, 16)
        """
        if not self.is_split:
            return range(num_rows)
        heads, size = own(num_rows // self.row_granularity), self.row_granularity
        return range(heads.start * size, heads.stop * size)


@dataclass(frozen=True, slots=True)
class Placement:
    """Operators, dtype, device and ranks that a model runs with."""

    operators: Operators
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    """Number of positions in the rotary tables."""
    split: RowSplit = field(default_factory=RowSplit)
    """Split of matrix rows over ranks."""


class DecoderModel(ABC):
    """A decoder over paged KV. Rows are independent: a token's result has the same bits in every batch."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], placement: Placement) -> None:
        """Build the common parts. Subclasses build their layers and keep weights that are not packed.

        Vectors and tables are tensors; a matrix of a product has a type that `pack_linear` takes
        (kernels.interface.Weight).
        """
        del weights
        self.config = config
        split, kv = placement.split, [spec.for_rank(placement.split.size) for spec in config.kv_specs]
        self.num_heads = split.share(config.layers[0].num_heads)
        """Query heads that this rank computes in each layer."""
        self.attention = AttentionOperators.of(
            placement.operators, self.num_heads, kv, placement.dtype, placement.device
        )
        """The attention operators that plan steps."""
        self.syncs_expert_counts = False
        """Whether the host reads the rows per expert during a pass, which then cannot be recorded as a CUDA graph."""
        self.expert_counts: tuple[Tensor, ...] = ()
        """Tokens of each expert since the start, int64 [num_experts] for each layer with experts; empty where they are
        not counted."""
        self.key_means: Mapping[int, Tensor] = {}
        """Mean keys by layer, [num_kv_heads of all ranks, head_dim]; empty until `center_keys` is called."""

    @classmethod
    @abstractmethod
    def parameters(cls, config: ModelConfig) -> dict[str, Parameter]:
        """Return every tensor the model is built from, by our name, which ends in `.weight` or `.bias`."""

    @abstractmethod
    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return hidden states [num_tokens, hidden_size] for token ids and positions [num_tokens] int64.

        Without positions, a model that has position embeddings does not add them.
        """

    @abstractmethod
    def forward_layers(
        self,
        hidden: Tensor,
        layers: range,
        positions: Tensor,
        attention: AttentionMetadata,
        kv: KVTensors,
        features: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run some consecutive layers over hidden states [num_tokens, hidden_size], which may be modified in place.

        The inputs of the layers in `features` are copied to the tensors given there, which have the same shape.
        """

    @abstractmethod
    def center_keys(self, means: Mapping[int, Tensor]) -> None:
        """Store quantized keys of these layers minus their means from now on (layers.attention.Attention).

        Args:
            means: [num_kv_heads of all ranks, head_dim], by layer.
        """

    @abstractmethod
    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the operations between the last layer and the logits. [num_tokens, hidden_size]"""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] for final-normed hidden states [num_rows, hidden_size]."""

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """Run one pass over a flat batch.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64, absolute.
            attention: metadata of the step.
            kv: the KV storage, which receives the step's K and V.

        Returns:
            Final-normed hidden states [num_tokens, hidden_size].
        """
        hidden = self.embed(input_ids, positions)
        hidden = self.forward_layers(hidden, range(self.config.num_layers), positions, attention, kv)
        return self.final_norm(hidden)

    @torch.inference_mode()
    def forward_with_features(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionMetadata,
        kv: KVTensors,
        feature_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Run the pass of `forward`, and also return the inputs of some layers.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64, absolute.
            attention: metadata of the step.
            kv: the KV storage, which receives the step's K and V.
            feature_layers: ascending indices of the layers whose inputs are returned.

        Returns:
            Final-normed hidden states [num_tokens, hidden_size], and the concatenated inputs of `feature_layers`,
            [num_tokens, len(feature_layers) x hidden_size].
        """
        hidden = self.embed(input_ids, positions)
        size = self.config.hidden_size
        features = hidden.new_empty((len(hidden), len(feature_layers) * size))
        parts = dict(zip(feature_layers, features.split(size, dim=1), strict=True))
        hidden = self.forward_layers(hidden, range(self.config.num_layers), positions, attention, kv, parts)
        return self.final_norm(hidden), features
