"""Paged attention over a flat, mixed batch: softmax in float32, partitions combined in a fixed order.

A row's result depends only on its query, its keys and its values. Every product has a proven shape (row_tiles), each
partition is reduced separately, and partitions are folded in from the oldest on with the running maximum m, sum l and
weighted values acc of Milakov and Gimelshein 2018 (arXiv:1805.02867):

    m' = max(m, m_p)      l' = l e^(m - m') + l_p e^(m_p - m')      acc' = acc e^(m - m') + o_p e^(m_p - m')

Products are rounded to the type of the queries before the softmax (torch's bmm has no wider result on a CPU), as
transformers' eager attention does: in bfloat16 a score keeps 8 bits.

A partition that a row does not see adds exactly nothing (l_p = o_p = 0), so it does not matter that the row's tile
reaches further. Prefill and decode are the same code: a decode is a tile with one query.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat, slot_bytes
from twostroke.kernels.head_order import HeadOrder, plain_order
from twostroke.kernels.interface import GroupShape, QKNormRope, Scoring
from twostroke.kernels.reference.attention_plan import (
    PARTITION,
    AttentionPlan,
    Pass,
    PlannedBatch,
    TileRun,
    plan_attention,
    row_stride_bytes,
    slot_stride_bytes,
)
from twostroke.kernels.reference.kv_codec import decode, decode_stored, encode, inverse_hadamard
from twostroke.kernels.reference.row_tiles import BASE_HEIGHT, ROW_BY_ROW, fingerprint, prove_once
from twostroke.kernels.soft_cap import soft_cap
from twostroke.kernels.tree_mask import TreeMasks

QUERY_TILES = (1, 2, 4, 8, 64)
"""Heights tried, in queries; a tile has a row for each query and each query head of a KV head."""
_LOWEST = -1e30  # maximum of an empty set; finite, so that differences of two of them are 0 and not NaN
_BATCHES = (1, 2, 5)  # numbers of products per call, which must not matter either


def query_tiles(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Return the queries per tile at which both products of attention give each row the same bits at every position.

    Returns:
        Up to three heights, rising: the lowest one admitted (for decodes), 8, and 64. If nothing can be proved, it is
        (1,): every tile then has one query, so a product's shape and a row's position in it never change.
    """
    group = num_heads // num_kv_heads
    key = ("attention", group, head_dim, dtype, device, torch.get_num_threads())

    def prove() -> tuple[int, ...]:
        like = torch.empty(0, dtype=dtype, device=device)
        sound: list[int] = []
        for queries in QUERY_TILES:
            rows = queries * group
            if _is_sound(rows, head_dim, PARTITION, like, transposed=True) and _is_sound(
                rows, PARTITION, head_dim, like, transposed=False
            ):
                sound.append(queries)
        if not sound:
            return ROW_BY_ROW
        return tuple(sorted({sound[0], *(queries for queries in sound if queries >= 8)}))

    return prove_once(
        key, prove, f"attention {group} x {head_dim} {str(dtype).removeprefix('torch.')}, queries per tile"
    )


def _is_sound(rows: int, num_inputs: int, num_outputs: int, like: Tensor, *, transposed: bool) -> bool:
    """Return whether tiles of `rows` rows agree with the base height in a batched product with one matrix per tile."""
    span = rows + 2 * BASE_HEIGHT
    x, w = fingerprint(span - span % BASE_HEIGHT, num_outputs, num_inputs, like)
    matrix = w if transposed else w.t().contiguous()

    def products(tile: Tensor, batch: int) -> Tensor:
        right = matrix.expand(batch, *matrix.shape).contiguous()
        left = tile.expand(batch, *tile.shape).contiguous()
        return torch.bmm(left, right.transpose(1, 2) if transposed else right)

    expected = torch.cat([products(part, 8)[0] for part in x.split(BASE_HEIGHT)])
    for start in (0, 7):  # every position of a tile, twice, with different rows in it
        right = expected[start : start + rows]
        for batch in _BATCHES:
            found = products(x[start : start + rows], batch)
            if not all(torch.equal(one, right) for one in found):
                return False
    return True


class PagedAttention:
    """Attention operator of torch's own operations."""

    applies_qk_norm_rope = False

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Prove the heights of query tiles."""
        self._tiles = query_tiles(num_heads, num_kv_heads, head_dim, dtype, device)
        self._device = device

    def kv_order(self, kv_format: KVFormat) -> str:
        return f"plain-{kv_format}"

    def head_order(self, kv_format: KVFormat, head_dim: int, block_size: int) -> HeadOrder:
        del block_size
        return plain_order(kv_format, head_dim)

    def read_heads(self, heads: Tensor, kv_format: KVFormat, head_dim: int, *, values: bool) -> Tensor:
        del values
        slots = heads.reshape(-1, slot_bytes(kv_format, head_dim))
        return decode(slots, kv_format, torch.float32).view(len(heads), -1, head_dim)

    def plan(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        tree_masks: TreeMasks | None = None,
    ) -> AttentionPlan:
        batch = PlannedBatch.of(shape.window, query_start_loc, seq_lens, block_table, tree_masks)
        return plan_attention(shape, batch, self._tiles, self._device)

    def __call__(
        self,
        qkv: Tensor,
        storage: Tensor,
        plan: AttentionPlan,
        layer_in_block: int,
        scoring: Scoring,
        qk_norm_rope: QKNormRope | None = None,
    ) -> Tensor:
        assert qk_norm_rope is None, "q and k come turned"
        assert scoring.slopes is None or not plan.has_trees, "draft trees have no slopes"
        shape = plan.shape
        if qkv.shape[1] > shape.num_heads:
            write_kv(qkv[:, shape.num_heads :], storage, plan, layer_in_block)
        # a power of two scales q, which rounds nothing; the rest (1 for many head sizes) scales the float32 scores
        q_scale = 2.0 ** math.floor(math.log2(scoring.scale))
        q = qkv[:, : shape.num_heads] * q_scale
        if shape.kv_format == "int4":
            q = inverse_hadamard(q.float()).to(q.dtype)
        block_rows = _rows(storage, shape.head_bytes, row_stride_bytes(shape))
        scoring = replace(scoring, scale=scoring.scale / q_scale)
        results = [_attend(run, q, block_rows, shape, layer_in_block, scoring) for run in plan.runs]
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return joined.index_select(0, plan.output_rows)


def write_kv(kv: Tensor, storage: Tensor, plan: AttentionPlan, layer_in_block: int) -> None:
    """Store K and V [num_tokens, 2 * num_kv_heads, head_dim], and zero the unused slots of new blocks."""
    shape = plan.shape
    slots = _rows(storage, shape.slot_bytes, slot_stride_bytes(shape))
    offset = layer_in_block * shape.layer_bytes // slot_stride_bytes(shape)
    slots.index_copy_(0, plan.slot_rows + offset, encode(kv.reshape(-1, shape.head_dim), shape.kv_format))
    if plan.unused_slot_rows is not None:
        slots.index_fill_(0, plan.unused_slot_rows + offset, 0)


def _rows(storage: Tensor, size: int, step: int) -> Tensor:
    """View a group's storage as rows of `size` bytes, one every `step` bytes: [rows, size]."""
    num_ids, num_layers = storage.shape[:2]
    num_bytes = (num_ids - 1) * storage.stride(0) + num_layers * storage.stride(1)
    return storage.as_strided(((num_bytes - size) // step + 1, size), (step, 1))


def _attend(
    run: TileRun, q: Tensor, block_rows: Tensor, shape: GroupShape, layer_in_block: int, scoring: Scoring
) -> Tensor:
    """Attend for one run of tiles: [num_tiles * queries_per_tile, num_heads * head_dim]."""
    kv_heads, group, head_dim = shape.num_kv_heads, shape.heads_per_kv_head, shape.head_dim
    tile = (run.num_tiles, run.queries_per_tile, kv_heads, group, head_dim)
    tiles = q.index_select(0, run.token_ids).view(tile).transpose(1, 2)
    tiles = tiles.reshape(run.num_tiles, kv_heads, run.queries_per_tile * group, head_dim)
    state: tuple[Tensor, Tensor, Tensor] | None = None
    for part in run.passes:
        stored = block_rows.index_select(
            0, (part.rows + layer_in_block * shape.layer_bytes // row_stride_bytes(shape)).view(-1)
        )
        kv = decode_stored(stored.view(-1, shape.slot_bytes), shape.kv_format, tiles.dtype)
        m, total, values = _partials(part, tiles, kv.view(2, -1, PARTITION, head_dim), scoring)
        begin = 0
        for size in part.slices:
            end = begin + size * kv_heads
            piece = (m[begin:end], total[begin:end], values[begin:end])
            if state is None:
                state = piece  # equals folding into an empty state: e^(_LOWEST - m) is 0 and e^0 is 1
            else:
                _fold_(state, piece)
            begin = end
    assert state is not None
    if scoring.sinks is not None:  # like a last partition of one key without a value
        m, total, values = state
        sinks = scoring.sinks.view(kv_heads, 1, group).expand(run.num_tiles, kv_heads, run.queries_per_tile, group)
        _fold_(state, (sinks.reshape(m.shape), torch.ones_like(total), torch.zeros_like(values)))
    _, total, acc = state
    out = acc / total
    if shape.kv_format == "int4":
        out = inverse_hadamard(out)
    out = out.to(q.dtype).view(run.num_tiles, kv_heads, run.queries_per_tile, group, head_dim)
    return out.transpose(1, 2).reshape(run.num_tiles * run.queries_per_tile, -1)


def _partials(part: Pass, tiles: Tensor, kv: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    """Reduce each pair separately: maximum [n, rows, 1], sum [n, rows, 1], weighted values [n, rows, head_dim];
    float32."""
    num_pairs = sum(part.slices)
    of_pairs = tiles[:num_pairs] if part.tile_of_pair is None else tiles.index_select(0, part.tile_of_pair)
    scores = torch.bmm(of_pairs.flatten(0, 1), kv[0].transpose(1, 2)).float()
    if scoring.scale != 1.0:
        scores.mul_(scoring.scale)
    if scoring.cap is not None:
        scores = soft_cap(scores, scoring.cap)
    by_query = scores.view(num_pairs, tiles.shape[1], part.query_offsets.shape[1], -1, PARTITION)
    if scoring.slopes is not None:
        behind = np.arange(PARTITION) - part.query_offsets[:, None, :, None, None]
        slopes = scoring.slopes.view(tiles.shape[1], 1, -1, 1)
        by_query.add_(torch.from_numpy(behind).to(scores) * slopes)
    if part.mask is not None:
        by_query.add_(part.mask)
    m = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    weights = scores.sub_(m).exp_()
    total = weights.sum(-1, keepdim=True)
    return m, total, torch.bmm(weights.to(kv.dtype), kv[1]).float()


def _fold_(state: tuple[Tensor, Tensor, Tensor], piece: tuple[Tensor, Tensor, Tensor]) -> None:
    """Fold the next partition into the first rows of the running state."""
    size = len(piece[0])
    m, total, acc = (t[:size] for t in state)
    m_p, total_p, values_p = piece
    highest = torch.maximum(m, m_p)
    keep, add = (m - highest).exp_(), (m_p - highest).exp_()
    total.mul_(keep).add_(total_p * add)
    acc.mul_(keep).add_(values_p * add)
    m.copy_(highest)
