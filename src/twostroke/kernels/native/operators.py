"""The native kernels behind the same doors as the reference's; shapes and types are checked here, addresses go below."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.kernels.dispatch import GroupShape
from twostroke.kernels.native import _native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_LARGE_PAGE = 2 << 20


def _large_pages(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] that begins at a large page, where the system has them: fewer addresses to translate."""
    pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % _LARGE_PAGE
    return whole[begin : begin + num_bytes]


class PackedLinear:
    """y = x W^T + b; each element summed in one order, whatever the number of rows (csrc/kernels/linear.hpp)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Packs weight [N, K]; bias [N]."""
        self._n, self._k = weight.shape
        self._type = _TYPES[weight.dtype]
        self._dtype = weight.dtype
        weight = weight.contiguous()
        self._packed = _large_pages(_native.packed_bytes(self._n, self._k, self._type))
        _native.pack_linear(weight.data_ptr(), self._packed.data_ptr(), self._n, self._k, self._type)
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, K]; returns [num_rows, N] in the type of the weights."""
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(len(x), self._n, dtype=self._dtype)
        _native.linear(
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(),
            y.data_ptr(), self._n, len(x), self._n, self._k, self._type, self._type,
        )
        return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    n = x.shape[-1]
    if weight.dim() == 1:
        y = torch.empty(x.shape, dtype=x.dtype)
        x = x.contiguous()
        _native.rms_norm(x.data_ptr(), n, weight.data_ptr(), y.data_ptr(), n, x.numel() // n, n, eps, _TYPES[x.dtype])
        return y
    from twostroke.kernels.reference.elementwise import rms_norm as reference
    return reference(x, weight, eps)


def rotate_heads_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    tokens, heads, head_dim = x.shape
    _native.rotate(x.data_ptr(), x.stride(0), tokens, heads, head_dim, cos.data_ptr(), signed_sin.data_ptr(), _TYPES[x.dtype])


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, twice = gate_up.shape
    y = torch.empty(rows, twice // 2, dtype=gate_up.dtype)
    _native.silu_and_mul(gate_up.data_ptr(), y.data_ptr(), rows, twice // 2, _TYPES[gate_up.dtype])
    return y


@dataclass(frozen=True, slots=True)
class Plan:
    shape: GroupShape
    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]


def plan_attention(shape, query_start_loc, seq_lens, block_table, query_tiles, device) -> Plan:
    del query_tiles, device
    return Plan(shape, np.ascontiguousarray(query_start_loc, np.int32), np.ascontiguousarray(seq_lens, np.int32), np.ascontiguousarray(block_table, np.int32))


def query_tiles(*_: object) -> tuple[int, ...]:
    return (1,)


def paged_attention(qkv: Tensor, storage: Tensor, plan: Plan, layer_in_block: int, softmax_scale: float) -> Tensor:
    shape = plan.shape
    tokens = qkv.shape[0]
    out = torch.empty(tokens, shape.num_heads * shape.head_dim, dtype=qkv.dtype)
    item = storage.element_size()
    layer_bytes = 2 * shape.num_kv_heads * shape.block_size * shape.head_dim * item
    _native.attention(
        qkv.data_ptr(), storage.data_ptr() + layer_in_block * layer_bytes, out.data_ptr(),
        plan.query_start.ctypes.data, plan.seq_lens.ctypes.data, plan.block_table.ctypes.data,
        len(plan.seq_lens), plan.block_table.shape[1], storage.stride(0) * item,
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.window or 0, softmax_scale, _TYPES[qkv.dtype],
    )
    return out
