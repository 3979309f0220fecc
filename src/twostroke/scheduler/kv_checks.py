"""The scheduler's part of the KV self-check: the choice of hits and blocks, and the requests that read a bad block.

The choice depends only on the number of hits, not on randomness, so a replay makes the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_check import KVCheck
from twostroke.request import Request
from twostroke.scheduler.step_plan import SchedulerPart, StepPlan

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class HitSampler:
    """Sampler of an even share of the hits, at positions that cover all parts of long prefixes.

    The n-th hit is checked when n x rate passes a whole number. The k-th check takes the block at the fractional part
    of k x golden ratio of its prefix: these fractions are spread about as evenly over the unit interval as possible at
    every length (Knuth, The Art of Computer Programming 3, 6.4, on Fibonacci hashing).

    >>> sampler = HitSampler(0.5)
    >>> [sampler.choose(num_blocks=10) for _ in range(10)]
    [None, 6, None, 2, None, 8, None, 4, None, 0]
    """

    def __init__(self, rate: float) -> None:
        """Set the share of hits to check, 0 to 1."""
        self._rate = rate
        self._num_hits = 0
        self._num_checks = 0

    def choose(self, num_blocks: int) -> int | None:
        """Count a hit of `num_blocks` blocks; return the entry to check, or None."""
        self._num_hits += 1
        if math.floor(self._num_hits * self._rate) == math.floor((self._num_hits - 1) * self._rate):
            return None
        self._num_checks += 1
        return int(self._num_checks * _GOLDEN % 1.0 * num_blocks)


class KVChecks(SchedulerPart):
    """Choice of the checks of a step, and search for the requests that a bad block affects.

    Args:
        kv: the KV cache's accounts.
        requests: those that have not ended, by id.
    """

    def __init__(self, kv: KVCacheManager, requests: Mapping[str, Request]) -> None:
        self._kv = kv
        self._requests = requests
        self._sampler = HitSampler(kv.check_rate)

    def on_plan_closing(self, plan: StepPlan) -> None:
        """Add checks for requests that were just admitted with a cached prefix.

        Checks run before the step; blocks that are loaded with the step are not there yet.
        """
        if plan.kv_moves is None or not plan.kv_moves.loads:
            checks = (self._of_hit(self._requests[hit.request_id], hit.num_cached_tokens) for hit in plan.admitted)
            plan.kv_checks = tuple(check for check in checks if check is not None)

    def before(self, check: KVCheck) -> list[KVCheck]:
        """Return the checks of all earlier blocks of the prefix that `check` belongs to, in their order."""
        request = self._requests[check.request_id]
        found = (self._kv.find_check(request.request_id, request.block_hashes, entry) for entry in range(check.entry))
        return [earlier for earlier in found if earlier is not None]

    def suspects(
        self, running: Iterable[Request], found_for: Request, entry: int, block_ids: Sequence[int | None]
    ) -> list[Request]:
        """Return the requests that may have read these blocks, which hold page `entry` of the prefix of `found_for`."""
        return [
            request
            for request in running
            if self._kv.may_have_read(
                request.request_id,
                entry,
                block_ids,
                block_hashes=request.block_hashes,
                content=found_for.block_hashes,
            )
        ]

    def _of_hit(self, request: Request, num_cached_tokens: int) -> KVCheck | None:
        """Return a check for a hit; if the context of the chosen block is gone (sliding window), take the next
        block."""
        num_blocks = num_cached_tokens // self._kv.layout.block_size
        chosen = self._sampler.choose(num_blocks) if num_blocks else None
        if chosen is None:
            return None
        for entry in (*range(chosen, num_blocks), *range(chosen)):
            check = self._kv.find_check(request.request_id, request.block_hashes, entry)
            if check is not None:
                return check
        return None
