"""Blocks go to host memory and come back as they were."""

from __future__ import annotations

import torch

from factories import make_layout
from twostroke.batch import KVLoad, KVMoves, KVStore
from twostroke.runner.kv_moves import KVMover
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
