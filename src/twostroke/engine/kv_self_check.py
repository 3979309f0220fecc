"""The engine's KV self-check: computes blocks again, judges the differences, and takes corrupt blocks out of use."""

from __future__ import annotations

from typing import Protocol

from twostroke.kv_check import Finding, KVCheck, KVDifference, Verdict, largest_of, verdict_of
from twostroke.log import get_logger
from twostroke.runner.model_runner import Executor
from twostroke.scheduler.scheduler import Scheduler

log = get_logger(__name__)


class TokenSource(Protocol):
    """A source of a sequence's token ids, prompt and output."""

    def token_ids(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the ids from position `begin` up to but not including `end`."""
        ...


class KVSelfCheck:
    """A check of cached blocks that runs between a decision and its step, before the step reads the blocks.

    Args:
        scheduler: knows where blocks are and which requests have read them.
        executor: computes the blocks again.
        block_size: tokens per block.
        tolerance: the largest difference that rounding explains (kv_check.tolerance).
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, block_size: int, tolerance: float) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._block_size = block_size
        self._tolerance = tolerance

    def run(self, check: KVCheck, tokens: TokenSource) -> Finding | None:
        """Check a block; return None if it could not be computed.

        Raises:
            EngineError: so much of the pool is corrupt that requests would no longer fit.
        """
        differences = self._differences(check, tokens)
        if differences is None:
            return None
        verdict = verdict_of(differences, self._tolerance)
        if verdict is Verdict.CORRUPTION:
            return self._quarantine(*self._find_corrupt_block(check, differences, tokens))
        return Finding(check.request_id, check.entry, verdict, differences)

    def _differences(self, check: KVCheck, tokens: TokenSource) -> tuple[KVDifference, ...] | None:
        begin = check.entry * self._block_size
        return self._executor.check_kv(check, tokens.token_ids(begin, begin + self._block_size))

    def _find_corrupt_block(
        self, check: KVCheck, differences: tuple[KVDifference, ...], tokens: TokenSource
    ) -> tuple[KVCheck, tuple[KVDifference, ...]]:
        """Return the first block of the prefix that differs from what is computed.

        A block also differs when an earlier one is corrupt, because it was computed while that one was sound. K and V
        of the first layer depend on no other block, so a difference there belongs to the block itself. Otherwise all
        blocks behind the corrupt one differ, so bisection finds it.
        """
        found = check, differences
        if any(difference.layer_id == 0 for difference in differences):
            return found
        earlier = self._scheduler.kv_checks.before(check)
        low, high = 0, len(earlier)  # blocks before `low` are sound; the one at `high`, or `check`, is not
        while low < high:
            middle = (low + high) // 2
            there = self._differences(earlier[middle], tokens)
            if not there:
                low = middle + 1
                continue
            high = middle
            if verdict_of(there, self._tolerance) is Verdict.CORRUPTION:
                found = earlier[middle], there
        return found

    def _quarantine(self, check: KVCheck, differences: tuple[KVDifference, ...]) -> Finding:
        groups = {difference.group_id for difference in differences if difference.largest > self._tolerance}
        quarantined = tuple(b if group_id in groups else None for group_id, b in enumerate(check.block_ids))
        suspects = self._scheduler.quarantine(check.request_id, check.entry, quarantined)
        log.error(
            "cached block %d of the prefix of %s is corrupt: %d of its numbers, from layer %d on, are off by up to "
            "%.2g times the largest of their vectors. KV blocks %s are out of use; the prefix cache was reset. Of the "
            "requests that may have read them %d start over and %d end with an error. If this happens again, test the "
            "memory.",
            check.entry,
            check.request_id,
            sum(difference.num_numbers for difference in differences),
            min(difference.layer_id for difference in differences),
            largest_of(differences),
            ", ".join(str(block_id) for block_id in quarantined if block_id is not None),
            len(suspects.started_over),
            len(suspects.ended),
        )
        return Finding(check.request_id, check.entry, Verdict.CORRUPTION, differences, quarantined, suspects)
