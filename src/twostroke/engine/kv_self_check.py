"""The KV self-check of the engine: has blocks computed again, judges, and takes what has gone bad out of use."""

from __future__ import annotations

from typing import Protocol

from twostroke.kv_check import Finding, KVCheck, KVDifference, Verdict, largest_of, verdict_of
from twostroke.log import get_logger
from twostroke.runner.model_runner import Executor
from twostroke.scheduler.scheduler import Scheduler

log = get_logger(__name__)


class TokensOf(Protocol):
    """A sequence's token ids, prompt and output."""

    def token_ids(self, begin: int, end: int) -> tuple[int, ...]:
        """From position `begin` to before `end`."""
        ...


class KVSelfCheck:
    """Between a decision and its step: the blocks are as that step will find them, and it has read none of them.

    Args:
        scheduler: knows where blocks are, and who has read them.
        executor: computes.
        block_size: tokens per block.
        tolerance: the largest difference that is a matter of numerics (kv_check.tolerance).
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, block_size: int, tolerance: float) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._block_size = block_size
        self._tolerance = tolerance

    def run(self, check: KVCheck, tokens: TokensOf) -> Finding | None:
        """Checks a block; None when it could not be computed.

        Raises:
            EngineError: so much of the pool has gone bad that requests would no longer fit.
        """
        differences = self._differences(check, tokens)
        if differences is None:
            return None
        verdict = verdict_of(differences, self._tolerance)
        if verdict is Verdict.CORRUPTION:
            return self._quarantine(*self._first_bad(check, differences, tokens))
        return Finding(check.request_id, check.entry, verdict, differences)

    def _differences(self, check: KVCheck, tokens: TokensOf) -> tuple[KVDifference, ...] | None:
        begin = check.entry * self._block_size
        return self._executor.check_kv(check, tokens.token_ids(begin, begin + self._block_size))

    def _first_bad(
        self, check: KVCheck, differences: tuple[KVDifference, ...], tokens: TokensOf
    ) -> tuple[KVCheck, tuple[KVDifference, ...]]:
        """The first block of the prefix that is not as it is computed.

        A block also differs when one before it has gone bad, since it was computed from that one while it was good. K
        and V of the first layer do not look at any other block: a difference there is the block's own. Else what
        follows a bad block is not exact, so the bad one is found by bisection.
        """
        found = check, differences
        if any(difference.layer_id == 0 for difference in differences):
            return found
        earlier = self._scheduler.kv_checks.before(check)
        low, high = 0, len(earlier)  # those before `low` are sound; the one at `high`, or `check`, is not
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
            "cached block %d of the prefix of %s has gone bad: %d numbers of it, from layer %d on, are off by up to "
            "%.2g times the largest of their vectors. KV blocks %s are out of use, the prefix cache is forgotten; of "
            "those who may have read them %d start over, %d end with an error. If this happens again, test the memory.",
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
