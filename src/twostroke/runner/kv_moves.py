"""KVMover: copies KV blocks to and from host memory as a step says (see batch.KVMoves)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from twostroke.batch import KVLoad, KVMoves
from twostroke.kernels.memory import large_pages
from twostroke.runner.kv_storage import KVStorage

_PIECE_BYTES = 1 << 30
"""Bytes of host memory pinned in one call. torch rounds pinned sizes up to a power of two: 40 GB would become 64, and
the machine may have only the 40."""


class KVMover:
    """Slots in host memory for KV blocks, and the copies between both.

    ```
    stream of passes    … pass n-1 | stores | loads | pass n ........... |wait| pass n+1
    stream of copies                        |wait| prefetches ........ ──┘
    ```

    On a GPU the slots are pinned, so that only work that needs a copy waits for it. Prefetches run beside the pass, on
    a separate stream, after everything that may still read their blocks. On a CPU every copy is made synchronously.

    Args:
        kv: the blocks.
        num_slots: slots, each for one block.
    """

    def __init__(self, kv: KVStorage, num_slots: int) -> None:
        self._blocks = kv.tensor
        self._is_on_gpu = kv.tensor.device.type == "cuda"
        block_bytes = self._blocks.shape[1]
        self._slots = (
            allocate_slots(num_slots, block_bytes, _pinned)
            if self._is_on_gpu
            else list(large_pages(num_slots * block_bytes).view(num_slots, -1))
        )
        self._copying = torch.cuda.Stream(kv.tensor.device) if self._is_on_gpu else None

    def begin(self, moves: KVMoves | None) -> None:
        """Enqueue the moves before a pass is launched, in the pass's stream."""
        self.wait_for_prefetches()
        if moves is None:
            return
        for store in moves.stores:
            self._slots[store.slot].copy_(self._blocks[store.block_id], non_blocking=self._is_on_gpu)
        self._load(moves.loads)
        if self._copying is None:
            self._load(moves.prefetches)
        elif moves.prefetches:
            self._copying.wait_stream(torch.cuda.current_stream(self._blocks.device))
            with torch.cuda.stream(self._copying):
                self._load(moves.prefetches)

    def wait_for_prefetches(self) -> None:
        """Make all work enqueued after this wait for the prefetches."""
        if self._copying is not None:
            torch.cuda.current_stream(self._blocks.device).wait_stream(self._copying)

    def _load(self, loads: Iterable[KVLoad]) -> None:
        for load in loads:
            self._blocks[load.block_id].copy_(self._slots[load.slot], non_blocking=self._is_on_gpu)


def allocate_slots(num_slots: int, slot_bytes: int, allocate: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Return slots, uint8 [slot_bytes] each, in as many pieces of memory as needed.

    Whole pieces have the size of a power of two, so that only the last one is rounded up.

    Args:
        num_slots: number of slots.
        slot_bytes: bytes of each.
        allocate: returns memory of a number of bytes.
    """
    piece_bytes = max(_PIECE_BYTES, 1 << (slot_bytes - 1).bit_length())
    most = piece_bytes // slot_bytes
    slots: list[torch.Tensor] = []
    while len(slots) < num_slots:
        count = min(most, num_slots - len(slots))
        slots += allocate(piece_bytes if count == most else count * slot_bytes)[: count * slot_bytes].view(count, -1)
    return slots


def _pinned(num_bytes: int) -> torch.Tensor:
    """Return pinned memory, which a GPU can read and write directly."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
