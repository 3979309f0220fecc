"""The scheduler's part of the tier in host memory: when what is there comes back, and which copies go with a step."""

from __future__ import annotations

from dataclasses import replace

from twostroke.batch import Limit
from twostroke.kv_cache.host_tier import TwoTierPrefixCache
from twostroke.request import Request
from twostroke.scheduler.step_plan import Admittance, HeadRefusal, SchedulerPart, StepPlan


class Offload(SchedulerPart):
    """Brings prefixes back from host memory.

    Args:
        prefixes: the prefix cache, in both places.
    """

    def __init__(self, prefixes: TwoTierPrefixCache) -> None:
        self._prefixes = prefixes

    def between_steps(self) -> None:
        """Let what was to be fetched beside passes decided so far be found: later passes begin when it is there."""
        self._prefixes.take_in_prefetched()

    def closing(self, plan: StepPlan) -> None:
        """Hand out the copies of a step."""
        plan.kv_moves = self._prefixes.take_moves(runs=bool(plan.shares))

    def brought_back(self, plan: StepPlan, request: Request, verdict: Admittance) -> Admittance | HeadRefusal:
        """What of its prefix is in host memory comes back: beside the passes of others, so that no token waits for a
        copy, and in a step no more tokens than it may compute; at once where nobody else computes anything."""
        if not verdict.cached.offloaded:
            return verdict
        if plan.shares:
            num_blocks = self._prefixes.prefetch(verdict.cached, request.block_hashes, plan.budget.limit)
            where = f"{num_blocks} of {len(verdict.cached.offloaded)} blocks in host memory"
            return HeadRefusal(Limit.TOKENS, f"tokens: {where} of its prefix are fetched beside this step")
        self._prefixes.load(verdict.cached, request.block_hashes)
        cached = self._prefixes.longest_prefix(request.block_hashes, request.num_tokens + request.num_pending_tokens)
        assert (cached.num_tokens, cached.offloaded) == (verdict.cached.num_tokens, []), f"{cached}, {verdict}"
        return replace(verdict, cached=cached)
