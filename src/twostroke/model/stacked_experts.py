"""UnstackedExperts: the matrices of a layer's experts one by one, of a checkpoint that stores them as stacks.

model.layers.0.mlp.experts.gate_up_proj [8, 2 I, H]  ─►  model.layers.0.mlp.experts.0.gate_proj.weight [I, H]
                                                         model.layers.0.mlp.experts.0.up_proj.weight [I, H] …
model.layers.0.mlp.experts.down_proj [8, H, I]       ─►  model.layers.0.mlp.experts.0.down_proj.weight [H, I] …

Granite's are `block_sparse_moe.input_linear.weight` and `block_sparse_moe.output_linear.weight`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twostroke.errors import UnsupportedModel
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource, WrappedSource

_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "output_linear": ("down_proj",),
}
"""What the rows of each expert's matrix in a stack are, in equal parts."""


class UnstackedExperts(WrappedSource):
    """Gives each part of a stored stack [num_experts, N, K] a name of its own."""

    def __init__(self, source: WeightSource) -> None:
        """Takes the weights as they are stored."""
        self._places: dict[str, tuple[str, int, slice]] = {}
        """Stack, expert and rows, by the name of a matrix."""
        found: dict[str, StoredWeight] = {}
        for name, weight in source.weights.items():
            block, _, last = name.removesuffix(".weight").rpartition(".")
            parts = _PARTS.get(last, ())
            if len(weight.shape) != 3 or not parts or weight.shape[1] % len(parts):
                found[name] = weight
                continue
            block, num_rows = block.removesuffix(".experts"), weight.shape[1] // len(parts)
            for expert in range(weight.shape[0]):
                for place, part in enumerate(parts):
                    own = f"{block}.experts.{expert}.{part}.weight"
                    self._places[own] = name, expert, slice(place * num_rows, (place + 1) * num_rows)
                    found[own] = replace(
                        weight, shape=(num_rows, weight.shape[2]), stored_name=f"{part} of {name}[{expert}]"
                    )
        super().__init__(source, found)

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        if name not in self._places:
            return super().read(name, dtype, rows)
        stack, expert, of_part = self._places[name]
        found = self._source.read(stack, dtype, slice(expert, expert + 1))
        if not isinstance(found, Tensor):
            raise UnsupportedModel(f"{self.path}: {stack} is a stack of quantized experts, which is not implemented.")
        return found[0, of_part][rows]
