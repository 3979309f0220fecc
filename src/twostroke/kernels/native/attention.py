"""Attention over paged KV (csrc/kernels/attention.hpp), and a decoder layer as one call (csrc/layer.hpp).

A layer in one call spends less time between operators than Python does, which shortens a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat
from twostroke.kernels.feed_forward_parts import MLPParts
from twostroke.kernels.head_order import HeadOrder
from twostroke.kernels.interface import (
    AttentionOperator,
    GroupShape,
    LayerParts,
    Linear,
    NormWeight,
    QKNormRope,
    Scoring,
)
from twostroke.kernels.memory import empty
from twostroke.kernels.native.extension import KV_FORMAT_CODES, TYPE_CODES, Kernels, address, native
from twostroke.kernels.native.feed_forward import bound_experts, bound_mlp
from twostroke.kernels.native.kv_order import head_order, read_heads
from twostroke.kernels.native.linear import NativeLinear, Panels
from twostroke.kernels.reference.attention import PagedAttention
from twostroke.kernels.reference.split_linear import SplitLinear
from twostroke.kernels.tree_mask import TreeMasks, within_window
from twostroke.log import get_logger

log = get_logger(__name__)

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class NativeStepPlan:
    """Plan of one step of one KV group; the arguments common to all its layers are computed and bound once."""

    shape: GroupShape
    width: int
    """Numbers of one token's result: num_heads * head_dim."""
    has_trees: bool
    arrays: tuple[npt.NDArray[Any], ...]
    """Arrays that `attention` reads, kept alive here."""
    step: native.StepAttention


def pack_tree_masks(tree_masks: TreeMasks, window: int | None) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return bits in whole words per query, and the start of each sequence's (-1: it has no mask); see AttentionArgs in
    csrc."""
    words: list[npt.NDArray[np.uint64]] = []
    starts = np.full(len(tree_masks), -1, np.int64)
    done = 0
    for seq, mask in enumerate(tree_masks):
        if mask is None:
            continue
        num_bytes = -(-len(mask) // 64) * 8
        bits = np.zeros((len(mask), num_bytes), np.uint8)
        packed = np.packbits(within_window(mask, window), axis=1, bitorder="little")
        bits[:, : packed.shape[1]] = packed
        words.append(bits.view("<u8").astype(np.uint64).reshape(-1))
        starts[seq], done = done, done + len(words[-1])
    return np.concatenate(words), starts


class NativeAttention:
    """Attention operator of the native kernels. Prefill chunks and decodes are computed in the same call."""

    applies_qk_norm_rope = True

    def __init__(
        self,
        kernels: Kernels,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take heads of up to MAX_HEAD_DIM dimensions; attention_operator handles larger ones."""
        assert head_dim <= native.MAX_HEAD_DIM, f"head_dim {head_dim}, at most {native.MAX_HEAD_DIM}"
        del num_heads, num_kv_heads, device
        self._kernels, self._dtype, self._type = kernels, dtype, TYPE_CODES[dtype]

    def kv_order(self, kv_format: KVFormat) -> str:
        """Return the name of the order with tokens in lanes of sixteen (csrc/kernels/kv_format.hpp)."""
        return f"lanes16-{kv_format}"

    def head_order(self, kv_format: KVFormat, head_dim: int, block_size: int) -> HeadOrder:
        return head_order(kv_format, head_dim, block_size)

    def read_heads(self, heads: Tensor, kv_format: KVFormat, head_dim: int, *, values: bool) -> Tensor:
        return read_heads(heads, kv_format, head_dim, values=values)

    def plan(
        self,
        shape: GroupShape,
        query_start_loc: Ints,
        seq_lens: Ints,
        block_table: Ints,
        tree_masks: TreeMasks | None = None,
    ) -> NativeStepPlan:
        starts, lens, table = (
            np.ascontiguousarray(array, np.int32) for array in (query_start_loc, seq_lens, block_table)
        )
        arrays: tuple[npt.NDArray[Any], ...] = (starts, lens, table)
        tree = tree_start = 0
        if tree_masks is not None and any(mask is not None for mask in tree_masks):
            words, word_starts = pack_tree_masks(tree_masks, shape.window)
            arrays, tree, tree_start = (*arrays, words, word_starts), words.ctypes.data, word_starts.ctypes.data
        step = self._kernels.step_attention(
            starts.ctypes.data,
            lens.ctypes.data,
            table.ctypes.data,
            tree,
            tree_start,
            len(lens),
            table.shape[1],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.window or 0,
            self._type,
            KV_FORMAT_CODES[shape.kv_format],
        )
        return NativeStepPlan(shape, shape.num_heads * shape.head_dim, tree != 0, arrays, step)

    def __call__(
        self,
        qkv: Tensor,
        storage: Tensor,
        plan: NativeStepPlan,
        layer_in_block: int,
        scoring: Scoring,
        qk_norm_rope: QKNormRope | None = None,
    ) -> Tensor:
        assert qkv.is_contiguous(), qkv.stride()
        assert scoring.slopes is None or not plan.has_trees, "draft trees have no slopes"
        num_tokens, token_heads, _ = qkv.shape
        block_bytes, layer_bytes, *_ = storage.stride()
        out = torch.empty(num_tokens, plan.width, dtype=self._dtype)
        plan.step.attention(
            qkv.data_ptr(),
            token_heads,
            storage.data_ptr() + layer_in_block * layer_bytes,
            block_bytes,
            out.data_ptr(),
            scoring.scale,
            scoring.cap or 0.0,
            address(scoring.sinks),
            address(scoring.slopes),
            *(_NO_QK_NORM_ROPE if qk_norm_rope is None else _addresses(qk_norm_rope)),
        )
        return out


_NO_QK_NORM_ROPE = (0, 0, 0, 0.0, 0, 0)


def _addresses(qk_norm_rope: QKNormRope) -> tuple[int, int, int, float, int, int]:
    """Return addresses of cos, signed sin and the norm's weight, its eps and type, and the key mean's address."""
    cos, signed_sin, weight, eps, key_mean = qk_norm_rope
    assert cos.is_contiguous(), cos.stride()
    assert signed_sin.is_contiguous(), signed_sin.stride()
    if weight is None:
        return cos.data_ptr(), signed_sin.data_ptr(), 0, 0.0, 0, address(key_mean)
    return cos.data_ptr(), signed_sin.data_ptr(), weight.data_ptr(), eps, TYPE_CODES[weight.dtype], address(key_mean)


def attention_operator(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> AttentionOperator:
    """Return the native operator, or torch's where a head is too large for it; their kv_order differs."""
    if head_dim > native.MAX_HEAD_DIM:
        limit = native.MAX_HEAD_DIM
        log.info("head_dim %d: native attention supports up to %d; using torch's, which is slower", head_dim, limit)
        return PagedAttention(num_heads, num_kv_heads, head_dim, dtype, device)
    return NativeAttention(kernels, num_heads, num_kv_heads, head_dim, dtype, device)


# ------------------------------------------------------------------ a whole layer in one call


class NativeLayer:
    """Decoder layer computed in one native call."""

    def __init__(
        self,
        kernels: Kernels,
        parts: LayerParts,
        qkv: Sequence[NativeLinear],
        output: Panels,
        feed_forward: native.FeedForward,
    ) -> None:
        """Bind the parts with their weights: q, k and v side by side, attention's output, and the feed-forward half."""
        self._parts = parts  # kept alive: its tensors are bound by address
        self._feed_forward = feed_forward
        hidden_size, q_size = output.shape
        scoring = parts.scoring
        norms = (parts.attention_norm, parts.attention_out_norm, parts.mlp_norm, parts.mlp_out_norm, parts.head_norm)
        self._layer = native.DecoderLayer(
            kernels,
            [native.Norm(0, 0.0, 0) if norm is None else _bound(norm) for norm in norms],
            [part.panels.bound for part in qkv],
            output.bound,
            feed_forward,
            scoring.scale,
            scoring.cap or 0.0,
            address(scoring.sinks),
            address(scoring.slopes),
            hidden_size,
            q_size,
            TYPE_CODES[output.dtype],
        )
        self._scratch_bytes_per_row = self._layer.room_bytes

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        storage: Tensor,
        plan: NativeStepPlan,
        layer_in_block: int,
        key_mean: Tensor | None = None,
    ) -> Tensor:
        assert x.is_contiguous(), x.stride()
        assert self._parts.scoring.slopes is None or not plan.has_trees, "draft trees have no slopes"
        num_tokens = x.shape[0]
        block_bytes, layer_bytes, *_ = storage.stride()
        num_bytes = num_tokens * self._scratch_bytes_per_row
        room = None if num_bytes <= native.ROOM_KEPT else empty((num_bytes,), torch.uint8)
        cos = signed_sin = None
        if rotation is not None:
            cos, signed_sin = rotation
            assert cos.is_contiguous(), cos.stride()
            assert signed_sin.is_contiguous(), signed_sin.stride()
        self._layer.run(
            plan.step,
            x.data_ptr(),
            address(room),
            num_tokens,
            storage.data_ptr() + layer_in_block * layer_bytes,
            block_bytes,
            address(cos),
            address(signed_sin),
            address(key_mean),
        )
        return x


def _bound(norm: NormWeight) -> native.Norm:
    return native.Norm(norm.weight.data_ptr(), norm.eps, TYPE_CODES[norm.weight.dtype])


def fused_layer(kernels: Kernels, parts: LayerParts) -> NativeLayer | None:
    """Bind a layer; None if a part is of another backend, or a weight other than qkv's has several formats."""
    qkv, output, feed_forward = _native_linears(parts.qkv), parts.output, parts.feed_forward
    if parts.head_dim > native.MAX_HEAD_DIM or not qkv or not isinstance(output, NativeLinear):
        return None
    if any(part.panels.pads_inputs for part in (*qkv, output)):
        return None
    bound = bound_mlp(feed_forward) if isinstance(feed_forward, MLPParts) else bound_experts(feed_forward)
    return None if bound is None else NativeLayer(kernels, parts, qkv, output.panels, bound)


def _native_linears(linear: Linear) -> Sequence[NativeLinear]:
    """Return the native maps that form a linear map, side by side; none if one is of another backend."""
    parts = linear.parts if isinstance(linear, SplitLinear) else [linear]
    found = [part for part in parts if isinstance(part, NativeLinear)]
    return found if len(found) == len(parts) else []
