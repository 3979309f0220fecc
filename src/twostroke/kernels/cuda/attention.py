"""Attention over paged KV on the card."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat, hadamard_block, is_quantized, levels_of, slot_bytes
from twostroke.kernels.cuda import attention_programs as programs
from twostroke.kernels.cuda import kv_programs
from twostroke.kernels.cuda.attention_plan import (
    CudaHostPlan,
    CudaStepPlan,
    FixedStepPlan,
    TileSizes,
    plan_step,
    send_plan,
)
from twostroke.kernels.cuda.card import num_multiprocessors, shared_memory_bytes
from twostroke.kernels.cuda.jit import launch_options, power_of_two
from twostroke.kernels.head_order import HeadOrder, Section, plain_order
from twostroke.kernels.interface import AttentionOperator, FixedSize, GroupShape, QKNormRope, Scoring
from twostroke.kernels.reference.attention import PagedAttention
from twostroke.kernels.reference.attention_plan import PlannedBatch
from twostroke.kernels.reference.kv_codec import decode
from twostroke.kernels.tree_mask import TreeMasks
from twostroke.log import get_logger

log = get_logger(__name__)

TILE_SIZES = TileSizes()
MAX_HEAD_DIM = 256
"""Largest head whose tile's two states fit into registers; states of larger heads would spill to memory."""
_STORED: dict[KVFormat, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}
_SCALE_AND_ZERO_BYTES = 4
_BARRIER_BYTES = 1024
"""Upper bound of the shared memory needed besides matrices."""
_VECTORS = 16
"""Vectors of K and V that one program writes."""


class TritonAttention:
    """Attention operator of Triton's kernels. Prefill chunks and decodes run the same program."""

    applies_qk_norm_rope = True

    def __init__(self, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        """Take the model's heads; every tile has the same height, so nothing has to be proved."""
        self._cut = TILE_SIZES.for_group_size(num_heads // num_kv_heads)
        self._device = device
        self._num_processors = num_multiprocessors(device)
        self._shared_memory = shared_memory_bytes(device)

    def kv_order(self, kv_format: KVFormat) -> str:
        """Return the name of the order: floats as in kernels/reference; codes of all tokens before their scales and
        zeros (kv_programs)."""
        return f"codes-first-{kv_format}" if is_quantized(kv_format) else f"plain-{kv_format}"

    def head_order(self, kv_format: KVFormat, head_dim: int, block_size: int) -> HeadOrder:
        del block_size
        if not is_quantized(kv_format):
            return plain_order(kv_format, head_dim)
        code_bytes = slot_bytes(kv_format, head_dim) - _SCALE_AND_ZERO_BYTES
        sections = (Section(1, 1, code_bytes), Section(1, 1, _SCALE_AND_ZERO_BYTES))
        return HeadOrder(sections, sections)

    def read_heads(self, heads: Tensor, kv_format: KVFormat, head_dim: int, *, values: bool) -> Tensor:
        del values
        num_heads, num_bytes = heads.shape
        size = slot_bytes(kv_format, head_dim)
        if is_quantized(kv_format):
            block_size, code_bytes = num_bytes // size, size - _SCALE_AND_ZERO_BYTES
            codes, params = heads.split([block_size * code_bytes, block_size * _SCALE_AND_ZERO_BYTES], dim=1)
            slots = (codes.reshape(-1, code_bytes), params.reshape(-1, _SCALE_AND_ZERO_BYTES))
            heads = torch.cat(slots, dim=1)
        return decode(heads.reshape(-1, size), kv_format, torch.float32).view(num_heads, -1, head_dim)

    def plan(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        tree_masks: TreeMasks | None = None,
    ) -> CudaStepPlan:
        batch = PlannedBatch.of(shape.window, query_start_loc, seq_lens, block_table, tree_masks)
        return send_plan(plan_step(shape, batch, self._cut, self._num_processors), self._device)

    def plan_on_host(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        *,
        splits: bool,
    ) -> CudaHostPlan:
        batch = PlannedBatch.of(shape.window, query_start_loc, seq_lens, block_table, None)
        return plan_step(shape, batch, self._cut, self._num_processors if splits else None)

    def fixed_plan(self, shape: GroupShape, size: FixedSize) -> FixedStepPlan:
        return FixedStepPlan(shape, size, self._cut, self._device)

    def __call__(
        self,
        qkv: Tensor,
        storage: Tensor,
        plan: CudaStepPlan,
        layer_in_block: int,
        scoring: Scoring,
        qk_norm_rope: QKNormRope | None = None,
    ) -> Tensor:
        shape = plan.shape
        assert qkv.is_contiguous(), qkv.stride()
        assert scoring.slopes is None or not plan.has_trees, "draft trees have no slopes"
        out = torch.empty(plan.num_tokens, shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        if not plan.num_tokens:
            return out
        memory = _Memory(shape, storage, layer_in_block)
        if qk_norm_rope is not None or qkv.shape[1] > shape.num_heads:
            memory.write(qkv, plan, qk_norm_rope)
        parts = [
            torch.empty(size, dtype=torch.float32, device=qkv.device)
            for size in (plan.num_part_rows * shape.num_heads,) * 2
            + (plan.num_part_rows * shape.num_heads * shape.head_dim,)
        ]
        width = _width(shape.head_dim)
        sinks, slopes = (parts[0] if of_heads is None else of_heads for of_heads in (scoring.sinks, scoring.slopes))
        programs.attend[(len(plan.items), shape.num_kv_heads)](
            plan.items,
            plan.tokens,
            plan.table,
            plan.trees,
            qkv,
            memory.values,
            memory.halves,
            out,
            *parts,
            sinks,
            slopes,
            plan.num_tokens,
            plan.table.shape[1],
            qkv.stride(0),
            *memory.strides,
            shape.num_heads,
            scoring.scale,
            scoring.cap or 0.0,
            GROUP=shape.heads_per_kv_head,
            ROWS=self._cut.tile_rows,
            HEAD_DIM=shape.head_dim,
            WIDTH=width,
            BLOCK_SIZE=shape.block_size,
            CHUNK=self._cut.chunk,
            SEGMENT=self._cut.segment,
            LEVELS=memory.levels,
            STAGES=memory.stages,
            HAS_TREES=plan.has_trees,
            HAS_CAP=scoring.cap is not None,
            HAS_SINKS=scoring.sinks is not None,
            HAS_SLOPES=scoring.slopes is not None,
            FLAT=not plan.num_part_rows,
            num_stages=num_stages(self._cut, shape.head_dim, qkv.dtype, self._shared_memory) or 1,
            **launch_options(qkv.device),
        )
        if len(plan.splits):
            heads = power_of_two(shape.heads_per_kv_head)
            programs.fold_parts[(len(plan.splits), -(-shape.num_heads // heads))](
                plan.splits,
                *parts,
                sinks,
                out,
                shape.num_heads,
                HEADS=heads,
                HEAD_DIM=shape.head_dim,
                WIDTH=width,
                LEVELS=memory.levels,
                STAGES=memory.stages,
                HAS_SINKS=scoring.sinks is not None,
                **launch_options(qkv.device),
            )
        return out


class _Memory:
    """Storage with the strides that one layer's programs use."""

    def __init__(self, shape: GroupShape, storage: Tensor, layer_in_block: int) -> None:
        assert storage[0].is_contiguous(), storage.stride()
        self._shape = shape
        self.levels = levels_of(shape.kv_format) if is_quantized(shape.kv_format) else 0
        self.stages = hadamard_block(shape.head_dim).bit_length() - 1
        stored = torch.uint8 if self.levels else _STORED[shape.kv_format]
        num_bytes = (storage.shape[0] - 1) * storage.stride(0) + storage.shape[1] * storage.stride(1)
        flat = storage.as_strided((num_bytes,), (1,))
        self.values = flat.view(stored)
        self.halves = flat.view(torch.float16) if self.levels else self.values
        head_stride = storage.shape[-1] // stored.itemsize
        self.strides = (
            storage.stride(0) // stored.itemsize,
            layer_in_block * 2 * shape.num_kv_heads * head_stride,
            head_stride,
        )
        """Stride of blocks, offset of the layer within a block, and stride of heads, in elements."""

    def write(self, qkv: Tensor, plan: CudaStepPlan, qk_norm_rope: QKNormRope | None) -> None:
        """Apply norm and rotary embedding to q and k if `qk_norm_rope` is given, and store K and V."""
        shape = self._shape
        first_head = 0 if qk_norm_rope is not None else shape.num_heads
        num_vectors = plan.num_tokens * (qkv.shape[1] - first_head)
        # any tensor takes the place of a missing one
        cos, signed_sin, weight, eps, mean = QKNormRope(qkv, qkv, None, 0.0) if qk_norm_rope is None else qk_norm_rope
        assert cos.is_contiguous(), cos.stride()
        assert signed_sin.is_contiguous(), signed_sin.stride()
        kv_programs.write_slots[(-(-num_vectors // _VECTORS),)](
            qkv,
            self.values,
            self.halves,
            plan.slots[0],
            plan.slots[1],
            plan.tokens[4],
            qkv if weight is None else weight,
            cos,
            signed_sin,
            qkv if mean is None else mean,
            eps,
            qkv.stride(0),
            *self.strides,
            num_vectors,
            first_head,
            qkv.shape[1],
            shape.num_heads,
            shape.num_kv_heads,
            ROWS=_VECTORS,
            HEAD_DIM=shape.head_dim,
            HALF_WIDTH=_width(shape.head_dim) // 2,
            BLOCK_SIZE=shape.block_size,
            LEVELS=self.levels,
            STAGES=self.stages,
            HAS_QK_NORM_ROPE=qk_norm_rope is not None,
            HAS_NORM=weight is not None,
            HAS_MEAN=mean is not None,
            **launch_options(qkv.device),
        )


def attention_operator(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> AttentionOperator:
    """Return Triton's operator, or torch's for heads it cannot hold; their kv_order differs."""
    if head_dim > MAX_HEAD_DIM or head_dim % 4:
        limit = MAX_HEAD_DIM
        log.info(
            "head_dim %d: Triton's attention takes multiples of 4 up to %d; using torch's, which is slower",
            head_dim,
            limit,
        )
        return PagedAttention(num_heads, num_kv_heads, head_dim, dtype, device)
    if (
        num_stages(TILE_SIZES.for_group_size(num_heads // num_kv_heads), head_dim, dtype, shared_memory_bytes(device))
        is None
    ):
        log.info("head_dim %d in %s: more shared memory than this card has; using torch's attention", head_dim, dtype)
        return PagedAttention(num_heads, num_kv_heads, head_dim, dtype, device)
    return TritonAttention(num_heads, num_kv_heads, device)


def num_stages(sizes: TileSizes, head_dim: int, dtype: torch.dtype, shared_memory: int) -> int | None:
    """Return the chunks that `attend` loads ahead, as many as shared memory holds; None if it cannot hold one.

    No bit of a result depends on it. The sizes are at least what Triton 3.9 compiles for 8.6 and 9.0.

    >>> [num_stages(TileSizes(), head_dim, torch.bfloat16, 101_376) for head_dim in (128, 256)]  # a card of 8.6
    [3, 1]
    >>> [num_stages(TileSizes(), 256, dtype, 101_376) for dtype in (torch.float16, torch.float32)]
    [1, None]
    >>> num_stages(TileSizes(), 256, torch.bfloat16, 232_448)  # of 9.0
    3
    """
    row_bytes = _width(head_dim) * dtype.itemsize
    least = (
        (sizes.tile_rows + sizes.chunk) * row_bytes + sizes.tile_rows * sizes.chunk * dtype.itemsize + _BARRIER_BYTES
    )
    if least + 3 * sizes.chunk * row_bytes <= shared_memory:
        return 3
    return 1 if least <= shared_memory else None


def _width(head_dim: int) -> int:
    """Return the columns of a product, at least 16."""
    return max(16, power_of_two(head_dim))
