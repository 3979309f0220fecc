"""Attention over paged KV (csrc/kernels/attention.hpp)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat
from twostroke.kernels.dispatch import GroupShape
from twostroke.kernels.native.extension import KV_FORMAT_CODES, TYPE_CODES, Kernels, native

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of one KV group: the batch as it is; the kernels find their work in it."""

    shape: GroupShape
    arrays: tuple[Ints, Ints, Ints]
    """query_start_loc, seq_lens and block_table, kept alive for their addresses."""
    addresses: tuple[int, int, int]
    """Looked up once: asking numpy costs more than a small layer's attention."""
    num_seqs: int
    max_blocks: int


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

    def kv_order(self, kv_format: KVFormat) -> str:
        """Tokens in lanes of sixteen; see csrc/kernels/kv_format.hpp."""
        return f"lanes16-{kv_format}"

    def plan(self, shape: GroupShape, query_start_loc: Ints, seq_lens: Ints, block_table: Ints) -> StepPlan:
        """Keeps the batch."""
        starts, lens, table = (
            np.ascontiguousarray(array, np.int32) for array in (query_start_loc, seq_lens, block_table)
        )
        addresses = (starts.ctypes.data, lens.ctypes.data, table.ctypes.data)
        return StepPlan(shape, (starts, lens, table), addresses, len(lens), table.shape[1])

    def __call__(
        self, qkv: Tensor, storage: Tensor, plan: StepPlan, layer_in_block: int, softmax_scale: float
    ) -> Tensor:
        """See AttentionOperator."""
        shape = plan.shape
        out = torch.empty(len(qkv), shape.num_heads * shape.head_dim, dtype=qkv.dtype)
        assert qkv.is_contiguous(), qkv.stride()
        self._kernels.attention(
            qkv.data_ptr(),
            storage.data_ptr() + layer_in_block * storage.stride(1),
            out.data_ptr(),
            *plan.addresses,
            plan.num_seqs,
            plan.max_blocks,
            storage.stride(0),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.window or 0,
            softmax_scale,
            self._type,
            KV_FORMAT_CODES[shape.kv_format],
        )
        return out
