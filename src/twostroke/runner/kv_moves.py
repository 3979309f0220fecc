"""KVMover: carries out what a step says of host memory, see batch.KVMoves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from twostroke.batch import KVLoad, KVMoves
from twostroke.kernels.large_pages import large_pages
from twostroke.runner.kv_storage import KVStorage


class KVMover:
    """Slots in host memory for KV blocks, and the copies between both.

    ```
    stream of passes    … pass n-1 | stores | loads | pass n ........... |wait| pass n+1
    stream of copies                        |wait| prefetches ........ ──┘
    ```

    On a GPU the slots are pinned, so that nobody waits for a copy but who needs it: prefetches run beside the pass, on
    a stream of their own, behind everything that may still read their blocks. On a CPU all of them are done at once.

    Args:
        kv: the blocks.
        num_slots: each holds one of them.
    """

    def __init__(self, kv: KVStorage, num_slots: int) -> None:
        self._blocks = kv.tensor.flatten(1)
        num_bytes = num_slots * self._blocks.shape[1]
        self._is_on_gpu = kv.tensor.device.type == "cuda"
        memory = _pinned(num_bytes) if self._is_on_gpu else large_pages(num_bytes)
        self._slots = memory.view(num_slots, -1)
        self._copying = torch.cuda.Stream(kv.tensor.device) if self._is_on_gpu else None

    def begin(self, moves: KVMoves | None) -> None:
        """Before a pass is launched, in the stream in which it will be."""
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
        """Whatever is enqueued next finds what was fetched."""
        if self._copying is not None:
            torch.cuda.current_stream(self._blocks.device).wait_stream(self._copying)

    def _load(self, loads: Iterable[KVLoad]) -> None:
        for load in loads:
            self._blocks[load.block_id].copy_(self._slots[load.slot], non_blocking=self._is_on_gpu)


def _pinned(num_bytes: int) -> torch.Tensor:
    """Memory that a GPU reads and writes by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
