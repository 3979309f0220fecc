"""Bytes of a sparse model's weights in memory, counted from the shapes of transformers' tensors.

torch     every number as it is: 2 bytes in bfloat16, 4 for routers and wide norms
native    matrices in panels of 64 rows, gate and up each in vectors of 16 rows; biases in float32, for all rows of
          their panels; q, k and v are one matrix, and so are gate and up
mxfp4     experts in 4 bits and a float16 for each 32 of them, 4.5 bits a number; files have 8 bits for each 32
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

_FUSED = re.compile(r"\.(q|k|v|gate|up)_proj\.(weight|bias)\Z")
_STACK = re.compile(r"experts\.(gate_up|down)_proj(_bias)?\Z")
_ROUTER = re.compile(r"(mlp\.gate|router|router\.proj)\.(weight|bias)\Z")
_OF_ROUTER = re.compile(r"(e_score_correction_bias|router\.scale|per_expert_scale)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBytes:
    """The rules of a backend for one model in bfloat16."""

    config: Any
    """Config of transformers."""
    is_native: bool
    is_mxfp4: bool = False
    has_wide_norms: bool = False
    """Whether norms are kept in float32, as families are whose norms transformers computes in float32 to the end."""
    has_copied_norms: bool = False
    """Whether norms of heads are kept once for each head."""

    def total(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the bytes of all tensors; a tied head is left out of `shapes`."""
        return sum(self._each(shapes))

    def _each(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[int]:
        fused: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for name, shape in shapes.items():
            if _FUSED.search(name):
                part = "qkv" if name.rpartition("_proj")[0][-1] in "qkv" else "gate_up"
                fused[f"{name.rpartition('.')[0].rpartition('.')[0]}.{part}.{name.rpartition('.')[2]}"].append(shape)
            elif stack := _STACK.search(name):
                yield self._stack(shape, is_gated=stack[1] == "gate_up", is_bias=stack[2] is not None)
            else:
                yield self._alone(name, shape, shapes)
        for name, parts in fused.items():
            rows, is_gated = sum(shape[0] for shape in parts), ".gate_up." in name
            if name.endswith("bias"):
                yield self._bias(rows, is_gated=is_gated)
            else:
                yield self._matrix(rows, parts[0][1], is_gated=is_gated)

    def _alone(self, name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> int:
        if _ROUTER.search(name):
            return self._bias(shape[0], size=4) if name.endswith("bias") else self._matrix(*shape, size=4)
        if _OF_ROUTER.search(name) or name.endswith("sinks"):
            return 4 * prod(shape)
        if "norm" in name:
            of_heads = shapes.get(name.replace("_norm", "_proj"), shape) if self.has_copied_norms else shape
            return of_heads[0] * (4 if self.has_wide_norms else 2)
        if name.endswith("bias"):
            return self._bias(shape[0])
        is_table = "embed_tokens" in name and not self.config.tie_word_embeddings
        return 2 * prod(shape) if is_table or len(shape) == 1 else self._matrix(*shape)

    def _stack(self, shape: tuple[int, ...], *, is_gated: bool, is_bias: bool) -> int:
        if is_bias:
            return shape[0] * self._bias(shape[1], is_gated=is_gated)
        hidden = self.config.hidden_size
        inner = getattr(self.config, "moe_intermediate_size", self.config.intermediate_size)
        rows, columns = (2 * inner, hidden) if is_gated else (hidden, inner)
        assert sorted(shape[1:]) == sorted((rows, columns)), shape
        return shape[0] * self._matrix(rows, columns, is_gated=is_gated, size=0.5 + 2 / 32 if self.is_mxfp4 else 2)

    def _matrix(self, rows: int, columns: int, *, is_gated: bool = False, size: float = 2) -> int:
        num_bytes = self._rows(rows, is_gated=is_gated) * columns * size
        assert num_bytes == int(num_bytes)
        return int(num_bytes)

    def _bias(self, rows: int, *, is_gated: bool = False, size: int = 2) -> int:
        return self._rows(rows, is_gated=is_gated) * (4 if self.is_native else size)

    def _rows(self, rows: int, *, is_gated: bool) -> int:
        if not self.is_native:
            return rows
        return _up(2 * _up(rows // 2, 16) if is_gated else rows, 64)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
