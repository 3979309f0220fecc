"""Pages of one size filled from pages of another: the same tokens of the same heads, each where they belong.

Both sizes are multiples of the smaller one, the step; so is where a token range begins and ends, and a move is a step's
tokens of some layers and heads from one page to another:

```
theirs, 16 tokens    | 0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63 |
                          │          │          │         │
ours, 32 tokens      | 0 ......... 31     | 32 ........ 63      |      of a tile whose lanes are more tokens than a
                                                                       step, a step is some lanes of each unit
```

Where one side has more ranks, each of them has fewer heads: a move is between two ranks that have heads in common. Of
their ranks that have the same head, the first gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twostroke.config.layer_spec import KVSpec
from twostroke.kernels.head_order import HeadOrder, Section
from twostroke.kv_transfer.memory import KVMemory, Piece, copy_pieces, layers_of_group

OrderOf = Callable[[KVSpec, int], HeadOrder]
"""Where a token is in a head of a layer's page of so many tokens."""
_Bytes = NDArray[np.uint8]


class Conversion:
    """From one pool's blocks to another's, of the same groups and format, and in all ranks the same heads.

    Args:
        ours: the pool that is filled.
        theirs: where its tokens are now.
        order: of both.
    """

    def __init__(self, ours: KVMemory, theirs: KVMemory, order: OrderOf) -> None:
        self._ours, self._theirs = ours, theirs
        self._our_size, self._their_size = ours.layout.block_size, theirs.layout.block_size
        self._step = min(self._our_size, self._their_size)
        assert max(self._our_size, self._their_size) % self._step == 0, (self._our_size, self._their_size)
        self._parts = [list(self._parts_of(group_id, order)) for group_id in range(len(ours.layout.groups))]
        """Per KV group, sections of both that move together."""

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
        """Each section of the K, or the V, by steps, of some of the model's heads that a rank has."""
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
        """Fills our pages, as far as they are missing, with the tokens of some of theirs.

        Args:
            first: which entry of their tables their rows begin with.
            their_rows: per KV group, ids of their pages.
            rows: per KV group, our whole table.
            first_missing: per KV group, our first entry that is to be filled.
            layers: ids in a row.

        Returns:
            Bytes that were copied.
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
        """The tokens of a step, from `start` on, in some layers of one of our pages and one of theirs."""
        moved: list[Piece] = []
        for ours, theirs in self._parts[group_id]:
            tile, part = divmod(start % self._our_size // self._step, ours.shape[3])
            their_tile, their_part = divmod(start % self._their_size // self._step, theirs.shape[3])
            moved.append((ours[page_id, layers, tile, part], theirs[their_id, layers, their_tile, their_part]))
        return moved


def _heads_in_common(ours: KVMemory, theirs: KVMemory, group_id: int) -> Iterator[tuple[int, int, range]]:
    """Which of our ranks has which of the model's heads from which of theirs: each of its heads once."""
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
    """A section of some heads of all pages of a group, cut into steps; a view.

    Args:
        heads: [ids, layers, heads, bytes of a run].
        at: where the section begins in a run.
        section: which.
        block_size: tokens of a page.
        step: tokens.

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
