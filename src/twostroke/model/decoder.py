"""DecoderModel: what every architecture offers to the runner, and what it is built from."""

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
    """The shape of one tensor of a model."""

    rows: tuple[int, ...]
    """Rows of each part that is laid under the others; a checkpoint may keep the parts apart or together."""
    columns: int | None = None
    """None for a vector."""
    is_split: bool = False
    """Whether each rank has only its share of the rows of each part (layers/row_split.py)."""
    rows_together: int = 1
    """Rows of a part that a rank has all or none of: those of a head."""
    is_gated: bool = False
    """Whether it is packed for a gated product (`pack_gated`)."""
    is_wide: bool = False
    """Whether it is kept in float32, whatever the type of the model."""
    is_table: bool = False
    """Whether its rows are only looked up."""
    is_router: bool = False
    """Whether it belongs to a router or to the gate of a shared expert. It stays in float32, whole on every rank."""
    num_copies: int = 1
    """How often it is kept, of all ranks together: for each head, say."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape(sum(self.rows)))

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Of `num_rows` of its rows."""
        return (num_rows,) if self.columns is None else (num_rows, self.columns)

    def own_rows(self, num_rows: int, own: Callable[[int], range]) -> range:
        """The rows that a rank has of a part with `num_rows`.

        >>> Parameter((32, 8, 8), 64, is_split=True, rows_together=8).own_rows(32, lambda num: range(num // 2))
        range(0, 16)
        """
        if not self.is_split:
            return range(num_rows)
        heads, size = own(num_rows // self.rows_together), self.rows_together
        return range(heads.start * size, heads.stop * size)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and with what a model runs."""

    operators: Operators
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    """Positions the rotary tables are made for."""
    split: RowSplit = field(default_factory=RowSplit)
    """Of the rows of matrices over ranks."""


class DecoderModel(ABC):
    """A decoder over paged KV. Rows are independent: a token's result has the same bits in every batch."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], placement: Placement) -> None:
        """Subclasses build their layers, and keep of the weights what they do not pack.

        Vectors and tables are tensors; a matrix of a product is what `pack_linear` takes (kernels.interface.Weight).
        """
        del weights
        self.config = config
        split, kv = placement.split, [spec.of_rank(placement.split.size) for spec in config.kv_specs]
        self.num_heads = split.share(config.layers[0].num_heads)
        """Query heads that this rank computes in each layer."""
        self.attention = AttentionOperators.of(
            placement.operators, self.num_heads, kv, placement.dtype, placement.device
        )
        """The operators that steps are planned for."""
        self.reads_counts = False
        """Whether the host reads in a pass how many rows each expert has; then it cannot be recorded."""
        self.key_means: Mapping[int, Tensor] = {}
        """Mean keys by layer, [num_kv_heads of all ranks, head_dim]; empty until `center_keys` is called."""

    @classmethod
    @abstractmethod
    def parameters(cls, config: ModelConfig) -> dict[str, Parameter]:
        """Every tensor the model is built from, by our name, `.weight` or `.bias` last."""

    @abstractmethod
    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token ids and positions [num_tokens] int64 to hidden states [num_tokens, hidden_size].

        Without positions, their embeddings are left out where a model has some.
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
        """Runs some consecutive layers over hidden states [num_tokens, hidden_size], which may be changed.

        The inputs of layers that `features` names are copied to the tensors there, of the same shape.
        """

    @abstractmethod
    def center_keys(self, means: Mapping[int, Tensor]) -> None:
        """Store quantized keys of these layers less their means from now on; see Attention.

        Args:
            means: by layer, [num_kv_heads, head_dim], the heads of all ranks.
        """

    @abstractmethod
    def final_norm(self, hidden: Tensor) -> Tensor:
        """What stands between the last layer that runs and the logits. [num_tokens, hidden_size]"""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Final-normed hidden states [num_rows, hidden_size] to logits [num_rows, vocab_size], float32."""

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """One pass over a flat batch.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64, absolute.
            attention: the step.
            kv: the KV storage; receives the step's K and V.

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
        """The same pass, which also hands out what it gives some layers to read.

        Args:
            input_ids: as for `forward`; so are positions, attention and kv.
            positions: see there.
            attention: see there.
            kv: see there.
            feature_layers: which layers, rising.

        Returns:
            Final-normed hidden states [num_tokens, hidden_size], and side by side the inputs of `feature_layers`,
            [num_tokens, len(feature_layers) x hidden_size].
        """
        hidden = self.embed(input_ids, positions)
        size = self.config.hidden_size
        features = hidden.new_empty((len(hidden), len(feature_layers) * size))
        parts = dict(zip(feature_layers, features.split(size, dim=1), strict=True))
        hidden = self.forward_layers(hidden, range(self.config.num_layers), positions, attention, kv, parts)
        return self.final_norm(hidden), features
