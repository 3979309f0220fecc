"""What a hand-over between two pools asks of a scheduler: blocks for what comes, and loans of what goes.

Held blocks cannot be taken back, so they never leave less than the longest request needs: whoever runs alone gets its
blocks in any case, as the scheduler promises. Where there is no room, the prefix is computed here, or there, as if
there were no hand-over.
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
        prefills: returns the running requests to whom blocks are promised.
    """

    def __init__(self, kv: KVCacheManager, num_for_longest: int, prefills: Callable[[], Iterable[Request]]) -> None:
        self._kv = kv
        self._num_for_longest = num_for_longest
        self._prefills = prefills

    def begin_import(self, import_id: int, block_hashes: Sequence[bytes], num_tokens: int) -> KVImport | None:
        """Takes blocks for a prefix, as far as it is not here.

        Args:
            import_id: a number that was never used.
            block_hashes: names of the prefix's blocks.
            num_tokens: of the prefix; whole blocks.

        Returns:
            Where its parts belong; None when there is no room for it now.
        """
        cached = self._kv.find_cached(block_hashes, num_tokens + 1)  # its last token, too, is one of the prefix
        needed, held = self._kv.holds.num_blocks_for_import(cached, num_tokens)
        promised = sum(self._kv.num_blocks_outstanding(request.request_id) for request in self._prefills())
        if needed + promised > self._kv.num_free_blocks or not self._has_room_beside(held):
            return None
        return self._kv.holds.begin_import(import_id, cached, num_tokens)

    def complete_import(self, import_id: int, block_hashes: Sequence[bytes]) -> None:
        """Let a request with this prefix find it from now on: all of it has come."""
        self._kv.holds.complete_import(import_id, block_hashes)

    def end_hold(self, hold_id: int) -> None:
        """Make blocks ordinary ones: nobody fetches under this number any more. Unknown numbers are ignored."""
        self._kv.holds.end(hold_id)

    def is_on_loan(self, hold_id: int) -> bool:
        """Return whether the request that was to lend its blocks has ended, and has done so."""
        return hold_id in self._kv.holds

    def lend_at_end(self, request: Request, reason: FinishReason) -> bool:
        """Leave the blocks of a running request that ends now on loan, if it is to and may; return whether it did."""
        request_id, number = request.request_id, request.arrival.lend_as
        if number is None or reason not in _BY_ITSELF:
            return False
        if not self._has_room_beside(self._kv.num_blocks_held(request_id)):
            return False
        if not self._kv.can_lend(request_id, request.arrival.lend_block_size):
            return False
        self._kv.lend(request_id, number)
        return True

    def admitted(self, request: Request) -> None:
        """Of what was fetched for a request, it holds itself what it found."""
        self._end_import(request)

    def ended(self, request: Request) -> None:
        """End the import of a request that has ended, and may never have run."""
        self._end_import(request)

    def check_invariants(self) -> None:
        """What is held leaves room for the longest request."""
        assert not self._kv.holds.num_blocks or self._has_room_beside(0), (
            f"{self._kv.holds.num_blocks} blocks are held of {self._kv.num_usable_blocks}, and the longest request "
            f"needs {self._num_for_longest}"
        )

    def _end_import(self, request: Request) -> None:
        if request.arrival.import_id is not None:
            self._kv.holds.end(request.arrival.import_id)

    def _has_room_beside(self, num_blocks: int) -> bool:
        """Whether the longest request still has room when so many more are held."""
        return self._kv.holds.num_blocks + num_blocks + self._num_for_longest <= self._kv.num_usable_blocks
