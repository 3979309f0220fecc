"""Conversion between page sizes: copies the same tokens of the same heads to their places in the other pool.

Both sizes are multiples of the smaller one, called the step. Token ranges begin and end at multiples of it. A move
copies one step's tokens, of some layers and heads, from one page to another:

```
theirs, 16 tokens    | 0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63 |
                          │          │          │         │
ours, 32 tokens      | 0 ......... 31     | 32 ........ 63      |      if the lanes of a tile hold more tokens than
                                                                       a step, a step is some lanes of each unit
```

Where one side has more ranks, each of them has fewer heads, and a move is between two ranks with heads in common. If
several of their ranks have the same head, the first one provides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twostroke.config.layer_spec import KVSpec
from twostroke.kernels.head_order import HeadOrder, Section
from twostroke.kv_transfer.memory import KVMemory, Piece, copy_pieces, layers_of_group

OrderOf = Callable[[KVSpec, int], HeadOrder]
"""Function from a layer's KV spec and a page size in tokens to the places of tokens in a head."""
_Bytes = NDArray[np.uint8]


class Conversion:
    """Conversion from one pool's blocks to another's, with the same groups, format and heads over all ranks.

    Args:
        ours: the pool that is filled.
        theirs: the pool that has the tokens.
        order: places of tokens in both pools.
    """

    def __init__(self, ours: KVMemory, theirs: KVMemory, order: OrderOf) -> None:
        self._ours, self._theirs = ours, theirs
        self._our_size, self._their_size = ours.layout.block_size, theirs.layout.block_size
        self._step = min(self._our_size, self._their_size)
        assert max(self._our_size, self._their_size) % self._step == 0, (self._our_size, self._their_size)
        self._parts = [list(self._parts_of(group_id, order)) for group_id in range(len(ours.layout.groups))]
        """Pairs of sections that are copied together, per KV group."""

    def _parts_of(self, group_id: int, order: OrderOf) -> Iterator[tuple[_Bytes, _Bytes]]:
        ours, theirs, spec = self._ours, self._theirs, self._ours.layout.groups[group_id].spec
        mine, others = order(spec, self._our_size), order(spec, self._their_size)
        for rank, their_rank, heads in _heads_in_common(ours, theirs, group_id):
            for kind, (sections, their_sections) in enumerate(((mine.keys, others.keys), (mine.values, others.values))):
                of_ours = self._cut(ours, rank, group_id, kind, sections, heads)
                of_theirs = self._cut(theirs, their_rank, group_id, kind, their_sections, heads)
                for part in zip(of_ours, of_theirs, strict=True):
                    assert part[0].shape[4:] == part[1].shape[4:], (part[0].shape, part[1].shape)
                    yield part

    def _cut(
        self, memory: KVMemory, rank: int, group_id: int, kind: int, sections: Sequence[Section], wanted: range
    ) -> list[_Bytes]:
        """Return each section of K (or V), cut into steps, for some of the heads of a rank."""
        layout, first = memory.layout, _heads_of(memory, rank, group_id).start
        heads = memory.pages(rank, group_id)[:, :, kind, wanted.start - first : wanted.stop - first]
        found: list[_Bytes] = []
        at = 0
        for section in sections:
            found.append(_steps(heads, at, section, layout.block_size, self._step))
            at += layout.block_size * section.bytes_per_token
        assert at == layout.bytes_per_head(layout.groups[group_id]), (at, layout)
        return found

    def copy(
        self,
        first: int,
        their_rows: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        first_missing: Sequence[int],
        layers: range,
    ) -> int:
        """Copy the tokens of some of their pages into our pages, as far as they are missing there.

        Args:
            first: entry of their tables with which `their_rows` begin.
            their_rows: per KV group, ids of their pages.
            rows: per KV group, our whole table.
            first_missing: per KV group, our first entry to fill.
            layers: range of layer ids.

        Returns:
            Number of bytes copied.
        """
        pieces: list[Piece] = []
        for group_id, (group, their_row, row, missing) in enumerate(
            zip(self._ours.layout.groups, their_rows, rows, first_missing, strict=True)
        ):
            begin, end = layers_of_group(group, layers)
            if begin < end:
                for entry, their_id in enumerate(their_row, first):
                    for start in range(entry * self._their_size, (entry + 1) * self._their_size, self._step):
                        ours = start // self._our_size
                        if missing <= ours < len(row):
                            pieces += self._move(group_id, row[ours], their_id, slice(begin, end), start)
        return copy_pieces(pieces)

    def _move(self, group_id: int, page_id: int, their_id: int, layers: slice, start: int) -> list[Piece]:
        """Return the copies of one step's tokens, from `start` on, from one of their pages to one of ours."""
        moved: list[Piece] = []
        for ours, theirs in self._parts[group_id]:
            tile, part = divmod(start % self._our_size // self._step, ours.shape[3])
            their_tile, their_part = divmod(start % self._their_size // self._step, theirs.shape[3])
            moved.append((ours[page_id, layers, tile, part], theirs[their_id, layers, their_tile, their_part]))
        return moved


def _heads_in_common(ours: KVMemory, theirs: KVMemory, group_id: int) -> Iterator[tuple[int, int, range]]:
    """Yield (our rank, their rank, heads in common), such that each of our heads has one source."""
    for rank in range(ours.num_ranks):
        heads = _heads_of(ours, rank, group_id)
        for their_rank in range(theirs.num_ranks):
            there = _heads_of(theirs, their_rank, group_id)
            common = range(max(heads.start, there.start), min(heads.stop, there.stop))
            if common:
                yield rank, their_rank, common
                heads = range(common.stop, heads.stop)


def _heads_of(memory: KVMemory, rank: int, group_id: int) -> range:
    return memory.layout.groups[group_id].spec.heads_of_rank(rank)


def _steps(heads: _Bytes, at: int, section: Section, block_size: int, step: int) -> _Bytes:
    """Return a section of some heads of all pages of a group, cut into steps; a view.

    Args:
        heads: [ids, layers, heads, bytes of a run].
        at: offset of the section in a run.
        section: the section.
        block_size: tokens of a page.
        step: tokens of a step.

    Returns:
        [ids, layers, runs of tiles, steps in each, heads, tiles in a step, units, bytes of a unit's lanes].
    """
    lanes, units, unit_bytes = section.lanes, section.units, section.unit_bytes
    runs = heads[..., at : at + block_size * section.bytes_per_token]
    if step >= lanes:
        whole = runs.reshape(*runs.shape[:3], block_size // step, 1, step // lanes, units, lanes * unit_bytes)
        return whole.transpose(0, 1, 3, 4, 2, 5, 6, 7)
    cut = runs.reshape(*runs.shape[:3], block_size // lanes, 1, units, lanes // step, step * unit_bytes)
    return cut.transpose(0, 1, 3, 6, 2, 4, 5, 7)
