"""Plan of one step's attention, computed once and used by every layer of a KV group.

A flat batch becomes tiles: a few consecutive queries of one request. A context is walked in partitions of PARTITION
tokens at absolute positions, so a tile meets a fixed series of partitions whatever else is in the batch:

    request with 300 tokens, the last 40 of them queries (q)

    partition   |0 ........... 127|128 .......... 255|256 ..... 299|
                                                      qqqq qqqq         tiles of 32 + 8 queries
    pairs                (tile 0, 0) (tile 0, 1) (tile 0, 2) (tile 1, 0) (tile 1, 1) (tile 1, 2)

Pairs are computed independently, and then combined per tile in the order of the partitions. Tiles are sorted by the
number of their partitions, so the tiles that have an i-th partition are a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.cache import MAX_BLOCK_SIZE
from twostroke.kernels.interface import GroupShape
from twostroke.kernels.memory import send
from twostroke.kernels.tree_mask import TreeMasks, depths, within_window

PARTITION = MAX_BLOCK_SIZE
"""Tokens per partition; no block spans two partitions."""
MAX_GATHERED = 1 << 21
"""Elements of K and V that one pass copies from the storage; bounds memory at any context length."""
MAX_SCORES = 1 << 20
"""Scores that one pass holds."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pass:
    """Consecutive partitions of a run of tiles."""

    slices: tuple[int, ...]
    """Numbers of tiles that reach the first, second, … of these partitions: prefixes of the run, falling."""
    tile_of_pair: Tensor | None
    """int64 [num_pairs]: tile within the run; None when there is one slice."""
    rows: Tensor
    """int64 [2, num_pairs * num_kv_heads * blocks]: rows (`row_stride_bytes`) of K and of V, for a page's layer 0."""
    mask: Tensor | None
    """float32 [num_pairs, 1, queries_per_tile, 1, PARTITION], 0 or -inf; None when every key is visible."""
    query_offsets: Ints
    """[num_pairs, queries_per_tile]: distance from the first key of the partition to the query, in tokens."""


@dataclass(frozen=True, slots=True)
class TileRun:
    """Tiles whose running softmax is held at once."""

    num_tiles: int
    queries_per_tile: int
    token_ids: Tensor
    """int64 [num_tiles * queries_per_tile]: rows of the flat batch; a tile repeats its last query to be full."""
    passes: tuple[Pass, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Plan of one step for one KV group."""

    shape: GroupShape
    runs: tuple[TileRun, ...]
    output_rows: Tensor
    """int64 [num_tokens]: row of each token's result in the concatenated results of all runs."""
    slot_rows: Tensor
    """int64 [num_tokens * 2 * num_kv_heads]: single slots (`slot_stride_bytes`) of layer 0 for the new K and V."""
    has_trees: bool
    unused_slot_rows: Tensor | None
    """int64 [n]: slots after the last token in blocks that this step opens. They are zeroed, so that values of another
    request (a NaN at worst) are never multiplied, not even by a weight of zero."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """Step of one KV group, and the keys that its queries see."""

    starts: Ints
    """[num_seqs + 1]: where each request's queries start in the flat batch."""
    lens: Ints
    """[num_seqs]: context lengths after this step."""
    table: Ints
    """[num_seqs, max_blocks]; entries outside a request's window or length are never read."""
    oldest: Ints
    """[num_tokens]: the first key that each query sees."""
    trees: dict[int, npt.NDArray[np.bool_]]
    """Masks by sequence, [query_len, query_len]: which of the step's own tokens each query sees."""

    @classmethod
    def of(
        cls,
        window: int | None,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        tree_masks: TreeMasks | None,
    ) -> PlannedBatch:
        """Make the batch from the arguments of an operator's plan."""
        starts, lens = query_start_loc.astype(np.int64), seq_lens.astype(np.int64)
        prefix_lens = lens - np.diff(starts)
        trees = {seq: within_window(mask, window) for seq, mask in enumerate(tree_masks or ()) if mask is not None}
        oldest = np.zeros(int(starts[-1]), np.int64)
        if window is not None:
            offsets = np.arange(len(oldest)) - np.repeat(starts[:-1], np.diff(starts))
            for seq, mask in trees.items():
                offsets[starts[seq] : starts[seq + 1]] = depths(mask)
            oldest = np.maximum(0, np.repeat(prefix_lens, np.diff(starts)) + offsets - window + 1)
        return cls(starts, lens, block_table.astype(np.int64), oldest, trees)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one height; all arrays int64 [num_tiles]."""

    queries: int
    seq: Ints
    first_token: Ints
    first_position: Ints
    num_queries: Ints

    @property
    def last_position(self) -> Ints:
        return self.first_position + self.num_queries - 1

    def take(self, order: Ints) -> _Tiles:
        return _Tiles(
            self.queries,
            self.seq[order],
            self.first_token[order],
            self.first_position[order],
            self.num_queries[order],
        )

    def queries_of(self, first: Ints) -> Ints:
        """Return first + 0, 1, 2, … per tile; a tile that is not full repeats its last query. [num_tiles, queries]"""
        steps = np.minimum(np.arange(self.queries)[None, :], self.num_queries[:, None] - 1)
        return first[:, None] + steps


def plan_attention(
    shape: GroupShape, batch: PlannedBatch, query_tiles: tuple[int, ...], device: torch.device
) -> AttentionPlan:
    """Plan one step of one KV group.

    Args:
        shape: the group.
        batch: the step.
        query_tiles: admitted queries per tile, rising (see attention.query_tiles).
        device: device of the indexes.
    """
    starts, lens = batch.starts, batch.lens
    runs: list[TileRun] = []
    output_rows = np.zeros(int(starts[-1]), np.int64)
    done = 0
    for unsorted in _cut_into_tiles(starts, lens, query_tiles):
        first, count = _partitions(unsorted, batch.oldest)
        order = np.argsort(-count, kind="stable")
        tiles, first, count = unsorted.take(order), first[order], count[order]
        tokens = tiles.queries_of(tiles.first_token)
        # a padded tile repeats its last token, with equal results
        output_rows[tokens.reshape(-1)] = done + np.arange(tokens.size)
        done += tokens.size
        per_run = _max_pairs(shape, tiles.queries)
        for begin in range(0, len(order), per_run):
            part = np.arange(begin, min(begin + per_run, len(order)))
            passes = tuple(_passes(shape, tiles.take(part), first[part], count[part], batch, device))
            token_ids = send(tokens[part].reshape(-1), device)
            runs.append(TileRun(len(part), tiles.queries, token_ids, passes))
    slot_rows, unused = _slots(shape, starts, lens, batch.table)
    return AttentionPlan(
        shape,
        tuple(runs),
        send(output_rows, device),
        send(slot_rows, device),
        bool(batch.trees),
        send(unused, device) if unused.size else None,
    )


def row_stride_bytes(shape: GroupShape) -> int:
    """Return the bytes from one storage row to the next.

    A row is one head of a page. Rows overlap where ids are not a whole number of rows apart, which happens only when
    layers of different width share the pool.
    """
    return math.gcd(shape.id_bytes, shape.head_bytes)


def slot_stride_bytes(shape: GroupShape) -> int:
    """Return the bytes from one slot to the next; slots may overlap as in `row_stride_bytes`."""
    return math.gcd(shape.id_bytes, shape.slot_bytes)


def _max_pairs(shape: GroupShape, queries_per_tile: int) -> int:
    """Return the (tile, partition) pairs that one pass may hold."""
    gathered = 2 * shape.num_kv_heads * PARTITION * shape.head_dim
    scores = shape.num_heads * queries_per_tile * PARTITION
    return max(1, min(MAX_GATHERED // gathered, MAX_SCORES // scores))


def _cut_into_tiles(starts: Ints, lens: Ints, heights: tuple[int, ...]) -> Iterator[_Tiles]:
    """Cut queries into tiles, the highest first; the rest of a request goes to the lowest height that needs few
    tiles."""
    query_lens = np.diff(starts)
    left, done = query_lens.copy(), np.zeros_like(query_lens)
    for index in range(len(heights) - 1, -1, -1):
        height = heights[index]
        num_tiles = left // height
        if index == 0:
            num_tiles = -(-left // height)
        else:
            # one half-empty tile is cheaper than gathering the same context for several lower ones
            enough = heights[0] if index == 1 else height // 2
            num_tiles = num_tiles + (left - num_tiles * height > enough)
        if not num_tiles.any():
            continue
        seq = np.repeat(np.arange(len(lens)), num_tiles)
        nth = np.arange(len(seq)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        offset = done[seq] + nth * height
        num_queries = np.minimum(height, query_lens[seq] - offset)
        first_position = (lens - query_lens)[seq] + offset
        yield _Tiles(height, seq, starts[:-1][seq] + offset, first_position, num_queries)
        taken = np.minimum(num_tiles * height, left)
        done, left = done + taken, left - taken


def _partitions(tiles: _Tiles, oldest: Ints) -> tuple[Ints, Ints]:
    """Return the first partition that a query of each tile sees, and the number up to that of its last query."""
    first = oldest[tiles.queries_of(tiles.first_token)].min(1) // PARTITION
    return first, tiles.last_position // PARTITION - first + 1


def _passes(
    shape: GroupShape, tiles: _Tiles, first: Ints, count: Ints, batch: PlannedBatch, device: torch.device
) -> Iterator[Pass]:
    sizes = (count[None, :] > np.arange(int(count[0]))[:, None]).sum(1)  # tiles that have an i-th partition
    limit = max(_max_pairs(shape, tiles.queries), len(count))
    begin = 0
    while begin < len(sizes):
        fitting = int(np.searchsorted(np.cumsum(sizes[begin:]), limit, side="right"))
        end = begin + max(1, fitting)
        slices = tuple(int(n) for n in sizes[begin:end])
        tile = np.concatenate([np.arange(n) for n in slices])
        partition = first[tile] + np.repeat(np.arange(begin, end), slices)
        pairs = tiles.take(tile)
        rows = _block_rows(shape, pairs, partition, batch)
        mask = _mask(pairs, partition, batch)
        yield Pass(
            slices,
            send(tile, device) if len(slices) > 1 else None,
            send(rows, device),
            None if mask is None else send(mask, device),
            pairs.queries_of(pairs.first_position) - partition[:, None] * PARTITION,
        )
        begin = end


def _block_rows(shape: GroupShape, pairs: _Tiles, partition: Ints, batch: PlannedBatch) -> Ints:
    """Return storage rows of the blocks of each pair's partition. [2, num_pairs * num_kv_heads * blocks]"""
    blocks = PARTITION // shape.block_size
    oldest = batch.oldest[pairs.queries_of(pairs.first_token)].min(1) // shape.block_size
    newest = pairs.last_position // shape.block_size
    # entries outside are masked; one of the tile's own blocks is read instead, so that no other request's values are
    entries = np.clip(
        partition[:, None] * blocks + np.arange(blocks)[None, :], oldest[:, None], newest[:, None]
    )  # [num_pairs, blocks]
    block_ids = batch.table[pairs.seq[:, None], entries]
    heads = np.arange(shape.num_kv_heads)
    per_head = shape.head_bytes // row_stride_bytes(shape)
    k_rows = block_ids[:, None, :] * (shape.id_bytes // row_stride_bytes(shape)) + heads[None, :, None] * per_head
    return np.stack([k_rows.reshape(-1), k_rows.reshape(-1) + shape.num_kv_heads * per_head])


def _mask(pairs: _Tiles, partition: Ints, batch: PlannedBatch) -> npt.NDArray[np.float32] | None:
    start = partition * PARTITION
    oldest = batch.oldest[pairs.queries_of(pairs.first_token)]  # [num_pairs, queries]
    whole = (start + PARTITION - 1 <= pairs.first_position) & (start >= oldest.max(1))
    in_tree = np.isin(pairs.seq, list(batch.trees))
    if whole.all() and not in_tree.any():
        return None
    keys = start[:, None, None] + np.arange(PARTITION)[None, None, :]  # [num_pairs, 1, PARTITION]
    queries = pairs.queries_of(pairs.first_position)[:, :, None]  # [num_pairs, queries, 1]
    visible = (keys <= queries) & (keys >= oldest[:, :, None])
    for pair in np.flatnonzero(in_tree):
        seq = int(pairs.seq[pair])
        tree, first_own = batch.trees[seq], int(batch.lens[seq]) - len(batch.trees[seq])
        own = keys[pair, 0] - first_own  # [PARTITION]
        inside = (own >= 0) & (own < len(tree))
        visible[pair][:, inside] &= tree[queries[pair] - first_own, own[inside]]
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    return mask[:, None, :, None, :]


def _slots(shape: GroupShape, starts: Ints, lens: Ints, table: Ints) -> tuple[Ints, Ints]:
    """Return rows of single slots: those of the new tokens, and the unused ones of blocks that this step opens."""
    query_lens = np.diff(starts)
    size = shape.block_size

    def rows(seq: Ints, positions: Ints) -> Ints:
        kv_heads = np.arange(2 * shape.num_kv_heads)  # K of every head, then V of every head
        first = table[seq, positions // size] * (shape.id_bytes // slot_stride_bytes(shape))
        in_page = kv_heads[None, :] * size + (positions % size)[:, None]
        return (first[:, None] + in_page * (shape.slot_bytes // slot_stride_bytes(shape))).reshape(-1)

    seq = np.repeat(np.arange(len(lens)), query_lens)
    positions = np.arange(len(seq)) - starts[:-1][seq] + (lens - query_lens)[seq]
    block_start = (lens - 1) // size * size
    num_unused = np.where(lens - query_lens <= block_start, block_start + size - lens, 0)
    unused_seq = np.repeat(np.arange(len(lens)), num_unused)
    nth = np.arange(len(unused_seq)) - np.repeat(np.cumsum(num_unused) - num_unused, num_unused)
    return rows(seq, positions), rows(unused_seq, lens[unused_seq] + nth)
