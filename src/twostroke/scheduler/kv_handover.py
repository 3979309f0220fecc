"""What a hand-over between two pools asks of a scheduler: blocks for what comes, and loans of what goes.

Held blocks cannot be taken back, so they never leave less than the longest request needs: whoever runs alone gets its
blocks in any case, as the scheduler promises. Where there is no room, the prefix is computed here, or there, as if
there were no hand-over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.request import FinishReason, Request
from twostroke.scheduler.budget import ChunkRule

_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class KVHandover:
    """Loans and imports of one scheduler's requests.

    Args:
        kv: the KV cache's accounts.
        chunk_rule: how much of a prompt a step computes.
        max_model_len: tokens of the longest request.
    """

    def __init__(self, kv: KVCacheManager, chunk_rule: ChunkRule, max_model_len: int) -> None:
        self._kv = kv
        self._num_for_longest = kv.num_blocks_to_compute(max_model_len, chunk_rule.max_tokens_per_step(max_model_len))

    def begin_import(
        self, import_id: int, block_hashes: Sequence[bytes], num_tokens: int, prefills: Iterable[Request]
    ) -> KVImport | None:
        """Takes blocks for a prefix, as far as it is not here.

        Args:
            import_id: a number that was never used.
            block_hashes: names of the prefix's blocks.
            num_tokens: of the prefix; whole blocks.
            prefills: running requests to whom blocks are promised.

        Returns:
            Where its parts belong; None when there is no room for it now.
        """
        cached = self._kv.find_cached(block_hashes, num_tokens + 1)  # its last token, too, is one of the prefix
        needed, held = self._kv.holds.num_blocks_for_import(cached, num_tokens)
        promised = sum(self._kv.num_blocks_outstanding(request.request_id) for request in prefills)
        if needed + promised > self._kv.num_free_blocks or not self._has_room_beside(held):
            return None
        return self._kv.holds.begin_import(import_id, cached, num_tokens)

    def may_lend(self, request: Request, reason: FinishReason) -> bool:
        """Whether a running request that ends now leaves its blocks on loan."""
        if request.arrival.lend_as is None or reason not in _BY_ITSELF:
            return False
        room = self._has_room_beside(self._kv.num_blocks_held(request.request_id))
        return room and self._kv.can_lend(request.request_id, request.arrival.lend_block_size)

    def lend(self, request: Request) -> None:
        """It does."""
        assert request.arrival.lend_as is not None, f"{request.request_id} lends nothing"
        self._kv.lend(request.request_id, request.arrival.lend_as)

    def runs(self, request: Request) -> None:
        """A request was admitted: of what was fetched for it, it holds itself what it found."""
        self._end_import(request)

    def ended(self, request: Request) -> None:
        """A request has ended, which may never have run."""
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
