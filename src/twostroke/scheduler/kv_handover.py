"""The scheduler's part of a KV hand-over between two pools: blocks for incoming KV, and loans of outgoing KV.

Held blocks cannot be preempted, so they always leave as many as the longest request needs: a request that runs alone
gets its blocks in any case, as the scheduler guarantees. Without room, the prefix is recomputed on the receiving side,
as if there were no hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.request import FinishReason, Request
from twostroke.scheduler.step_plan import SchedulerPart

_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class KVHandover(SchedulerPart):
    """Loans and imports of one scheduler's requests.

    Args:
        kv: the KV cache's accounts.
        num_for_longest: blocks that the longest request needs.
        prefills: returns the running requests that blocks are promised to.
    """

    def __init__(self, kv: KVCacheManager, num_for_longest: int, prefills: Callable[[], Iterable[Request]]) -> None:
        self._kv = kv
        self._num_for_longest = num_for_longest
        self._prefills = prefills

    def begin_import(self, import_id: int, block_hashes: Sequence[bytes], num_tokens: int) -> KVImport | None:
        """Allocate blocks for the part of a prefix that is not cached here.

        Args:
            import_id: a number that was never used.
            block_hashes: hashes of the prefix's blocks.
            num_tokens: of the prefix; whole blocks.

        Returns:
            The places of its parts; None if there is no room for it now.
        """
        cached = self._kv.find_cached(block_hashes, num_tokens + 1)  # + 1: the prefix includes its last token
        needed, held = self._kv.holds.num_blocks_for_import(cached, num_tokens)
        promised = sum(self._kv.num_blocks_outstanding(request.request_id) for request in self._prefills())
        if needed + promised > self._kv.num_free_blocks or not self._has_room_beside(held):
            return None
        return self._kv.holds.begin_import(import_id, cached, num_tokens)

    def complete_import(self, import_id: int, block_hashes: Sequence[bytes]) -> None:
        """Make an imported prefix findable: all of it has arrived."""
        self._kv.holds.complete_import(import_id, block_hashes)

    def end_hold(self, hold_id: int) -> None:
        """Turn held blocks into ordinary ones: the fetch under this number is over. Unknown numbers are ignored."""
        self._kv.holds.end(hold_id)

    def is_on_loan(self, hold_id: int) -> bool:
        """Return whether the blocks of an ended request are on loan under this number."""
        return hold_id in self._kv.holds

    def lend_at_end(self, request: Request, reason: FinishReason) -> bool:
        """Lend the blocks of a running request that ends now, if it should and may; return whether they are on loan."""
        request_id, number = request.request_id, request.arrival.lend_as
        if number is None or reason not in _BY_ITSELF:
            return False
        if not self._has_room_beside(self._kv.num_blocks_held(request_id)):
            return False
        if not self._kv.can_lend(request_id, request.arrival.lend_block_size):
            return False
        self._kv.lend(request_id, number)
        return True

    def on_admission(self, request: Request) -> None:
        """End the import of an admitted request, which now refers to the blocks itself."""
        self._end_import(request)

    def on_request_end(self, request: Request) -> None:
        """End the import of a request that has ended, perhaps without having run."""
        self._end_import(request)

    def check_invariants(self) -> None:
        """Check that the held blocks leave room for the longest request."""
        assert not self._kv.holds.num_blocks or self._has_room_beside(0), (
            f"{self._kv.holds.num_blocks} blocks are held of {self._kv.num_usable_blocks}, and the longest request "
            f"needs {self._num_for_longest}"
        )

    def _end_import(self, request: Request) -> None:
        if request.arrival.import_id is not None:
            self._kv.holds.end(request.arrival.import_id)

    def _has_room_beside(self, num_blocks: int) -> bool:
        """Return whether the longest request still has room if so many more blocks are held."""
        return self._kv.holds.num_blocks + num_blocks + self._num_for_longest <= self._kv.num_usable_blocks
