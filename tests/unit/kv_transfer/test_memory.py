"""Blocks of one pool into those of another: exactly the pieces that were asked for, however many threads copy them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from factories import make_layout
from twostroke.kv_transfer import memory
from twostroke.kv_transfer.memory import KVMemory, SharedMemory

NUM_BLOCKS = 12


@pytest.mark.parametrize("shared_from_bytes", [0, 1 << 40])
@pytest.mark.parametrize("layers", [range(4), range(1, 2)])
def test_pieces_arrive_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, shared_from_bytes: int, layers: range
) -> None:
    monkeypatch.setattr(memory, "SHARED_FROM_BYTES", shared_from_bytes)
    layout = make_layout([None, 6, None, 6], 4)
    theirs, ours = (
        np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, layout.bytes_per_block), np.uint8) for seed in (0, 1)
    )
    before = ours.copy()
    their_rows, rows = [[7, 3, 11], [2, 5, 9]], [[1, 0, 4], [8, 10, 6]]
    source, target = KVMemory(layout, memoryview(theirs).cast("B")), KVMemory(layout, memoryview(ours).cast("B"))
    starts = [0, 1]
    num_bytes = target.copy_from(source, their_rows, rows, layers, starts)
    wanted = [bytes(piece) for piece in source.pieces(their_rows, layers, starts)]
    assert [bytes(piece) for piece in target.pieces(rows, layers, starts)] == wanted
    assert num_bytes == sum(map(len, wanted)) > 0
    for piece, old in zip(
        target.pieces(rows, layers, starts),
        KVMemory(layout, memoryview(before).cast("B")).pieces(rows, layers, starts),
        strict=True,
    ):
        piece[:] = old
    assert (ours == before).all()


def test_shared_memory_is_given_back_when_nobody_has_it() -> None:
    shared = SharedMemory(3, 4096)
    descriptors = shared.descriptors
    assert [os.fstat(descriptor).st_size for descriptor in descriptors] == [4096] * 3
    del shared
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_what_was_made_before_the_system_had_no_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    create = os.memfd_create

    def two_at_most(*given: int) -> int:
        if len(made) == 2:
            raise OSError(24, "Too many open files")
        made.append(create(*given))  # pyright: ignore[reportArgumentType]
        return made[-1]

    monkeypatch.setattr(os, "memfd_create", two_at_most)
    with pytest.raises(OSError, match="Too many open files"):
        SharedMemory(3, 4096)
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
