"""Blocks go to host memory and come back as they were."""

from __future__ import annotations

import pytest
import torch

from factories import make_layout
from twostroke.batch import KVLoad, KVMoves, KVStore
from twostroke.runner import kv_moves
from twostroke.runner.kv_moves import KVMover, allocate_slots
from twostroke.runner.kv_storage import KVStorage


def test_copies_are_made_in_their_order() -> None:
    kv = KVStorage(make_layout([None, 6], 4), 5, torch.device("cpu"))
    kv.tensor.copy_(torch.randint(0, 256, kv.tensor.shape, dtype=torch.uint8))
    before = kv.tensor.clone()
    mover = KVMover(kv, 3)
    mover.begin(None)
    assert torch.equal(kv.tensor, before)
    mover.begin(KVMoves(stores=(KVStore(4, 2), KVStore(1, 0), KVStore(3, 2))))
    kv.tensor.zero_()
    moves = KVMoves(stores=(KVStore(0, 1),), loads=(KVLoad(2, 0, 0, b"a"),), prefetches=(KVLoad(0, 4, 1, b"b"),))
    mover.begin(moves)
    mover.wait_for_prefetches()
    assert torch.equal(kv.tensor[0], before[3]), "what was stored last in the slot"
    assert torch.equal(kv.tensor[4], before[1])
    assert not kv.tensor[1:4].any()
    mover.begin(KVMoves(loads=(KVLoad(1, 2, 0, b"c"),)))
    assert not kv.tensor[2].any(), "block 0 was stored before it was filled"


@pytest.mark.parametrize(("slot_bytes", "sizes"), [(300, [1024, 1024, 300]), (256, [1024, 768]), (1500, [2048] * 7)])
def test_pinned_memory_comes_in_powers_of_two(
    slot_bytes: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_moves, "_PIECE_BYTES", 1024)
    asked: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    slots = allocate_slots(7, slot_bytes, allocate)
    assert asked == sizes
    assert [len(slot) for slot in slots] == [slot_bytes] * 7
    assert all(slot.is_contiguous() for slot in slots)
    for number, slot in enumerate(slots):
        slot.fill_(number)
    assert [int(slot.sum()) for slot in slots] == [number * slot_bytes for number in range(7)]
