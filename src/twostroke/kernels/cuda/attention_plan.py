"""Plan of one step's attention on the card, made on the host and sent in one copy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.kernels.cuda.jit import power_of_two
from twostroke.kernels.interface import FixedSize, GroupShape
from twostroke.kernels.memory import send
from twostroke.kernels.reference.attention_plan import PlannedBatch

MAX_PART_ROWS = 1 << 16
"""Most rows of partial states (a row is one query with all its heads); 256 MiB for 8 heads of 128. Tiles beyond that
are folded by one program each."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes into which products and contexts are cut. The bits of a result depend on them, so they are the same for all
    batches."""

    tile_rows: int = 64
    """Rows of a product's left side, for decodes and prompts alike: another height might be summed by another
    instruction. Reading KV takes longer than the products of such a tile on any card with bfloat16."""
    chunk: int = 64
    """Keys of one product."""
    segment: int = 256
    """Keys whose softmax is computed separately, at absolute positions: the smallest part of a context. How many
    programs share a context depends on the batch, but no bit depends on that."""

    def queries_of(self, shape: GroupShape) -> int:
        """Return the queries of a tile."""
        return self.tile_rows // shape.heads_per_kv_head

    def for_group_size(self, group: int) -> TileSizes:
        """Return the sizes for `group` query heads per KV head; a tile has a row for each of them."""
        return replace(self, tile_rows=max(self.tile_rows, power_of_two(group)))


@dataclass(frozen=True, slots=True, eq=False)
class CudaStepPlan:
    """Plan of one step of one KV group. All tensors are int32, on the device."""

    shape: GroupShape
    num_tokens: int
    items: Tensor
    """[num_items, 8], see attention_programs.attend."""
    splits: Tensor
    """[n, 4]: tokens whose segments are computed separately, see attention_programs.fold_parts."""
    num_part_rows: int
    tokens: Tensor
    """[5, num_tokens]: position, oldest key, tree_row, own_first, and the number of unused slots after the token's to
    zero."""
    slots: Tensor
    """[2, num_tokens]: block and place in it."""
    table: Tensor
    """[num_seqs, max_blocks]."""
    trees: Tensor
    """[words]: bits of draft trees; one word if there are none."""
    has_trees: bool


@dataclass(frozen=True, slots=True, eq=False)
class CudaHostPlan:
    """Arrays of a CudaStepPlan before they are sent, int64."""

    shape: GroupShape
    items: Ints
    splits: Ints
    num_part_rows: int
    tokens: Ints
    slots: Ints
    table: Ints
    trees: Ints
    has_trees: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Tiles of queries; all arrays int64 [num_tiles]."""

    seq: Ints
    first_token: Ints
    num_queries: Ints
    first_segment: Ints
    num_segments: Ints


def plan_step(shape: GroupShape, batch: PlannedBatch, sizes: TileSizes, num_processors: int | None) -> CudaHostPlan:
    """Plan one step of one KV group.

    Args:
        shape: the group.
        batch: the step.
        sizes: sizes of the operator.
        num_processors: processors of the card; contexts are split until each has work. None: no context is split.
    """
    tiles = _tiles(batch, sizes.queries_of(shape), sizes.segment)
    items, splits, num_part_rows = _items(tiles, shape, num_processors)
    words, tree_rows = _tree_words(batch)
    tokens, slots = _tokens(shape, batch, tree_rows)
    return CudaHostPlan(shape, items, splits, num_part_rows, tokens, slots, batch.table, words, bool(batch.trees))


def send_plan(host: CudaHostPlan, device: torch.device) -> CudaStepPlan:
    """Send a plan to the device."""
    arrays = [host.items, host.splits, host.tokens, host.slots, host.table, host.trees]
    tensors = _send([array.astype(np.int32) for array in arrays], device)
    items, splits, tokens, slots, table, trees = tensors
    num_tokens = host.tokens.shape[1]
    return CudaStepPlan(
        host.shape, num_tokens, items, splits, host.num_part_rows, tokens, slots, table, trees, host.has_trees
    )


class FixedStepPlan:
    """FixedPlan with padding after a step's own entries, for which no program does anything.

    ```
    items    of the step | no queries, no segments        splits   of the step | no segments
    tokens   of the step | zeros                          slots    of the step | block -1
    ```
    """

    def __init__(self, shape: GroupShape, size: FixedSize, sizes: TileSizes, device: torch.device) -> None:
        """Make an empty plan."""
        self._size = size
        num_tiles = min(size.num_tokens, size.num_seqs + size.num_tokens // sizes.queries_of(shape))
        self._num_items = num_tiles + size.num_part_rows  # a split tile has at most one item per row
        arrays = [_no_items(self._num_items), *_no_tokens(size)]
        self._sizes = [array.size for array in arrays]
        self._all = _join(arrays).to(device)
        parts = zip(self._all.split(self._sizes), arrays, strict=True)
        items, splits, tokens, slots = [part.view(array.shape) for part, array in parts]
        table = torch.zeros(size.num_seqs, size.max_blocks, dtype=torch.int32, device=device)
        trees = torch.zeros(1, dtype=torch.int32, device=device)
        self.plan = CudaStepPlan(
            shape, size.num_tokens, items, splits, size.num_part_rows, tokens, slots, table, trees, has_trees=False
        )

    def fill(self, step: CudaHostPlan) -> None:
        size, num_tokens = self._size, step.tokens.shape[1]
        assert num_tokens <= size.num_tokens, f"{num_tokens} tokens in a plan for {size.num_tokens}"
        assert step.num_part_rows <= size.num_part_rows, f"{step.num_part_rows} of {size.num_part_rows} partial rows"
        assert len(step.items) <= self._num_items, f"{len(step.items)} of {self._num_items} items"
        assert not step.has_trees, "a tree in a recorded pass"
        items = _no_items(self._num_items)
        splits, tokens, slots = _no_tokens(size)
        items[: len(step.items)] = step.items
        splits[: len(step.splits)] = step.splits
        tokens[:, :num_tokens] = step.tokens
        slots[:, :num_tokens] = step.slots
        self._all.copy_(send(_join([items, splits, tokens, slots]).numpy(), self._all.device), non_blocking=True)
        table = step.table.astype(np.int32)
        self.plan.table[: len(table), : table.shape[1]].copy_(send(table, self._all.device), non_blocking=True)


def _no_items(count: int) -> Ints:
    items = np.zeros((count, 8), np.int64)
    items[:, 1] = 1  # an item without queries looks at the token before its first one
    items[:, 5] = -1
    return items


def _no_tokens(size: FixedSize) -> tuple[Ints, Ints, Ints]:
    """Return splits, tokens and slots of padding."""
    tokens = np.zeros((5, size.num_tokens), np.int64)
    tokens[2] = -1
    slots = np.zeros((2, size.num_tokens), np.int64)
    slots[0] = -1
    return np.zeros((min(size.num_tokens, size.num_part_rows), 4), np.int64), tokens, slots


def _tiles(batch: PlannedBatch, queries_per_tile: int, segment: int) -> _Tiles:
    query_lens = np.diff(batch.starts)
    num_tiles = -(-query_lens // queries_per_tile)
    seq = np.repeat(np.arange(len(query_lens)), num_tiles)
    nth = np.arange(len(seq)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first_token = batch.starts[:-1][seq] + nth * queries_per_tile
    num_queries = np.minimum(queries_per_tile, batch.starts[1:][seq] - first_token)
    last_key = batch.lens[seq] - (batch.starts[1:][seq] - first_token - num_queries) - 1
    oldest = np.minimum.reduceat(batch.oldest, first_token) if len(seq) else seq
    first_segment = oldest // segment
    return _Tiles(seq, first_token, num_queries, first_segment, last_key // segment - first_segment + 1)


def _items(tiles: _Tiles, shape: GroupShape, num_processors: int | None) -> tuple[Ints, Ints, int]:
    """Return items, split tokens, and the number of rows of partial states."""
    order = np.argsort(-tiles.num_segments, kind="stable")  # the longest first, so that the last to end are short
    segments, queries = tiles.num_segments[order], tiles.num_queries[order]
    # split a tile that alone is more than half of a processor's share
    share = math.inf if num_processors is None else segments.sum() * shape.num_kv_heads / num_processors
    rows = np.where((segments > 1) & (segments > share / 2), segments * queries, 0)
    rows[np.cumsum(rows) > MAX_PART_ROWS] = 0
    is_split = rows > 0
    num_items = np.where(is_split, segments, 1)
    of_item = np.repeat(np.arange(len(order)), num_items)
    nth = np.arange(len(of_item)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    first_row = np.cumsum(rows) - rows
    items = np.zeros((len(of_item), 8), np.int64)
    items[:, 0], items[:, 1] = tiles.seq[order][of_item], tiles.first_token[order][of_item]
    items[:, 2], items[:, 3] = queries[of_item], tiles.first_segment[order][of_item] + nth
    items[:, 4] = np.where(is_split, 1, segments)[of_item]
    items[:, 5] = np.where(is_split[of_item], first_row[of_item] + nth * queries[of_item], -1)

    of_token = np.repeat(np.flatnonzero(is_split), queries[is_split])
    num_before = np.cumsum(np.where(is_split, queries, 0)) - np.where(is_split, queries, 0)
    query = np.arange(len(of_token)) - num_before[of_token]
    splits = np.stack(
        [
            tiles.first_token[order][of_token] + query,
            first_row[of_token] + query,
            queries[of_token],
            segments[of_token],
        ],
        axis=1,
    )
    return items, splits, int(rows.sum())


def _tree_words(batch: PlannedBatch) -> tuple[Ints, Ints]:
    """Return the bits of all trees, 32 to a word, and where each token's start (-1: it sees all tokens before it)."""
    rows = np.full(int(batch.starts[-1]), -1, np.int64)
    words: list[npt.NDArray[np.int32]] = [np.zeros(1, np.int32)]
    done = 1
    for seq, mask in batch.trees.items():
        width = -(-len(mask) // 32)
        bits = np.zeros((len(mask), width * 4), np.uint8)
        packed = np.packbits(mask, axis=1, bitorder="little")
        bits[:, : packed.shape[1]] = packed
        rows[batch.starts[seq] : batch.starts[seq + 1]] = done + np.arange(len(mask)) * width
        words.append(bits.view("<i4").astype(np.int32).reshape(-1))
        done += len(words[-1])
    return np.concatenate(words).astype(np.int64), rows


def _tokens(shape: GroupShape, batch: PlannedBatch, tree_rows: Ints) -> tuple[Ints, Ints]:
    """Return tokens [5, num_tokens] and slots [2, num_tokens] of a CudaStepPlan."""
    query_lens = np.diff(batch.starts)
    seq = np.repeat(np.arange(len(query_lens)), query_lens)
    own_first = (batch.lens - query_lens)[seq]
    position = np.arange(len(seq)) - batch.starts[:-1][seq] + own_first
    # the last token of a step that opens a block zeroes the unused slots there, so that code that reads whole blocks
    # (another backend after a handover) never finds another request's values
    size = shape.block_size
    is_last = position == batch.lens[seq] - 1
    opens_block = own_first <= (batch.lens[seq] - 1) // size * size
    unused = np.where(is_last & opens_block, -batch.lens[seq] % size, 0)
    blocks = batch.table[seq, position // size]
    return np.stack([position, batch.oldest, tree_rows, own_first, unused]), np.stack([blocks, position % size])


def _send(arrays: list[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Send arrays in one copy; a copy for each would cost as much as a small kernel."""
    joined = send(np.concatenate([array.reshape(-1) for array in arrays]), device)
    parts = joined.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _join(arrays: list[Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.int32))
