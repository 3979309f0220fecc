"""Attention over paged KV (csrc/kernels/attention.hpp)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.kernels.dispatch import GroupShape
from twostroke.kernels.native._native import Kernels
from twostroke.kernels.native.extension import TYPE_CODES, native

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of one KV group: the batch as it is; the kernels find their work in it."""

    shape: GroupShape
    query_start_loc: Ints
    seq_lens: Ints
    block_table: Ints


class NativeAttention:
    """See AttentionOperator. Decodes, chunks of prompts and everything between are the same call."""

    def __init__(
        self,
        kernels: Kernels,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Nothing has to be proved or prepared."""
        assert head_dim <= native.MAX_HEAD_DIM, f"head_dim {head_dim}, at most {native.MAX_HEAD_DIM}"
        del num_heads, num_kv_heads, device
        self._kernels, self._type = kernels, TYPE_CODES[dtype]

    def plan(self, shape: GroupShape, query_start_loc: Ints, seq_lens: Ints, block_table: Ints) -> StepPlan:
        """Keeps the batch."""
        of_kernels = (np.ascontiguousarray(array, np.int32) for array in (query_start_loc, seq_lens, block_table))
        return StepPlan(shape, *of_kernels)

    def __call__(
        self, qkv: Tensor, storage: Tensor, plan: StepPlan, layer_in_block: int, softmax_scale: float
    ) -> Tensor:
        """See AttentionOperator."""
        shape = plan.shape
        out = torch.empty(len(qkv), shape.num_heads * shape.head_dim, dtype=qkv.dtype)
        assert qkv.is_contiguous(), qkv.stride()
        element_bytes = storage.element_size()
        self._kernels.attention(
            qkv.data_ptr(),
            storage.data_ptr() + layer_in_block * storage.stride(1) * element_bytes,
            out.data_ptr(),
            plan.query_start_loc.ctypes.data,
            plan.seq_lens.ctypes.data,
            plan.block_table.ctypes.data,
            len(plan.seq_lens),
            plan.block_table.shape[1],
            storage.stride(0) * element_bytes,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.window or 0,
            softmax_scale,
            self._type,
        )
        return out
