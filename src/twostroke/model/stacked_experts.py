"""UnstackedExperts: the matrices of a layer's experts one by one, from a checkpoint that stores them as stacks.

model.layers.0.mlp.experts.gate_up_proj [8, 2 I, H]  ─►  model.layers.0.mlp.experts.0.gate_proj.weight [I, H]
                                                         model.layers.0.mlp.experts.0.up_proj.weight [I, H] …
model.layers.0.mlp.experts.down_proj [8, H, I]       ─►  model.layers.0.mlp.experts.0.down_proj.weight [H, I] …

Granite names them `block_sparse_moe.input_linear.weight` and `block_sparse_moe.output_linear.weight`. Published
checkpoints of Qwen3-VL store matrices transposed, [8, H, 2 I] and [8, I, H]. Those written by transformers do not;
the shape decides, as in transformers. gpt-oss has biases, `gate_up_proj_bias` [8, 2 I] and `down_proj_bias` [8, H],
transposed matrices, and gate and up interleaved.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twostroke.config.experts import MAX_EXPERTS, ExpertsSpec
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, show_name
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.registry import ExpertStacks
from twostroke.model.weight_source import ALL_ROWS, StoredStack, StoredWeight, WeightSource, WrappedSource

PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "output_linear": ("down_proj",),
}
"""Projections in the rows of each expert's matrix in a stack, in equal parts."""
_BIAS = "_bias"

_CORRECTION = "e_score_correction_bias"
"""Suffix of a vector that ERNIE stores as a matrix of one row."""


class UnstackedExperts(WrappedSource):
    """A WeightSource that names each part of a stored stack [num_experts, N, K], or of biases [num_experts, N]."""

    def __init__(self, source: WeightSource, stacks: ExpertStacks, hidden_size: int, experts: ExpertsSpec) -> None:
        """Name the parts of all stacks.

        Args:
            source: weights as they are stored.
            stacks: layout of matrices in stacks.
            hidden_size: hidden size of the model.
            experts: experts of a layer.

        Raises:
            CorruptCheckpoint: an expert's matrix is also stored separately, or a stack has another number of
            dimensions, or
                a number of rows that cannot hold both gate and up.
        """
        self._stacks: ExpertStacks = stacks
        self._num_experts = experts.num_experts
        size = experts.intermediate_size
        shapes = {2: (2 * size, hidden_size), 1: (hidden_size, size)}
        self._transposed: set[str] = set()
        """Names of stacks whose matrices are transposed, [inputs, outputs]."""
        self._places: dict[str, tuple[str, int, slice]] = {}
        """Stack, expert and rows, by the name of a matrix or a bias."""
        self._last: tuple[str, int, Tensor] | None = None
        """Stack, index and matrix of the last expert read.

        Rows of a transposed matrix require reading it whole, and they are requested a few at a time.
        """
        found: dict[str, StoredWeight] = {}
        for name, weight in source.weights.items():
            if name.endswith(_CORRECTION) and weight.shape[:-1] == (1,):
                found[name] = replace(weight, shape=weight.shape[1:])
                continue
            block, _, last = name.removesuffix(".weight").rpartition(".")
            kind = "bias" if last.endswith(_BIAS) else "weight"
            parts, shape = PARTS.get(last.removesuffix(_BIAS), ()), weight.shape[1:]
            if len(shape) == 2 and parts and self._is_transposed(shape, shapes[len(parts)]):
                self._transposed.add(name)
                shape = shape[::-1]
            num_dims = 3 if kind == "weight" else 2
            if not parts or not (block.endswith(".experts") or len(weight.shape) == num_dims):
                found[name] = weight
                continue
            if len(weight.shape) != num_dims or weight.shape[0] > MAX_EXPERTS or shape[0] % len(parts):
                raise self._refusal(source, name, shapes[len(parts)] if kind == "weight" else shapes[len(parts)][:1])
            block, num_rows = block.removesuffix(".experts"), shape[0] // len(parts)
            stack = StoredStack(name, weight.shape)
            for expert in range(weight.shape[0]):
                for place, part in enumerate(parts):
                    own = f"{block}.experts.{expert}.{part}.{kind}"
                    if own in source.weights or own in self._places:
                        raise CorruptCheckpoint(
                            f"{source.path}: {own} is stored twice: by itself and within {name}. Remove one."
                        )
                    self._places[own] = name, expert, self._rows_of_part(place, len(parts), num_rows)
                    told = f"{part} of {name}[{expert}]"
                    found[own] = replace(weight, shape=(num_rows, *shape[1:]), stored_name=told, stack=stack)
        super().__init__(source, found)

    def _refusal(self, source: WeightSource, name: str, expected: tuple[int, ...]) -> CorruptCheckpoint:
        """Return the error for a stack that cannot be split; `expected` is the shape of one expert's matrix in it."""
        expected = expected[::-1] if self._stacks == "interleaved_columns" else expected
        return CorruptCheckpoint(
            f"{source.path}: {show_name(name)} is {list(source.weights[name].shape)} instead of "
            f"{[self._num_experts, *expected]}, as config.json requires. Download the model again."
        )

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        if name not in self._places:
            found = super().read(name, dtype, rows)
            return found.flatten() if isinstance(found, Tensor) and name.endswith(_CORRECTION) else found
        stack, expert, of_part = self._places[name]
        return self._matrix(stack, expert, dtype)[of_part][rows]

    def _matrix(self, stack: str, expert: int, dtype: torch.dtype) -> Tensor:
        """Return an expert's matrix or bias in a stack, [outputs, inputs] or [outputs]."""
        if self._last is not None and self._last[:2] == (stack, expert):
            return self._last[2]
        found = self._source.read(stack, dtype, slice(expert, expert + 1))
        if not isinstance(found, Tensor):
            raise UnsupportedModel(f"{self.path}: {stack} is a stack of quantized experts, which is not implemented.")
        if stack not in self._transposed:
            return found[0]
        self._last = stack, expert, found[0].t()
        return self._last[2]

    def _is_transposed(self, shape: tuple[int, ...], expected: tuple[int, int]) -> bool:
        return self._stacks == "interleaved_columns" or (shape == expected[::-1] and shape != expected)

    def _rows_of_part(self, place: int, num_parts: int, num_rows: int) -> slice:
        if self._stacks == "interleaved_columns":
            return slice(place, num_parts * num_rows, num_parts)
        return slice(place * num_rows, (place + 1) * num_rows)
