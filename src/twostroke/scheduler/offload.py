"""The scheduler's part of the host memory tier: when offloaded KV returns, and which copies go with a step."""

from __future__ import annotations

from dataclasses import replace

from twostroke.batch import Limit
from twostroke.kv_cache.host_tier import TwoTierPrefixCache
from twostroke.request import Request
from twostroke.scheduler.step_plan import AdmissionPlan, AdmissionRefusal, SchedulerPart, StepPlan


class Offload(SchedulerPart):
    """Loads of prefixes from host memory.

    Args:
        prefixes: the prefix cache, in both places.
    """

    def __init__(self, prefixes: TwoTierPrefixCache) -> None:
        self._prefixes = prefixes

    def on_step_start(self) -> None:
        """Make blocks findable that were prefetched during earlier passes: later passes begin when they are there."""
        self._prefixes.finish_prefetches()

    def on_plan_closing(self, plan: StepPlan) -> None:
        """Attach the copies to a step."""
        plan.kv_moves = self._prefixes.take_moves(runs=bool(plan.shares))

    def load_offloaded(
        self, plan: StepPlan, request: Request, verdict: AdmissionPlan
    ) -> AdmissionPlan | AdmissionRefusal:
        """Load the part of the head's prefix that is in host memory, and return how to proceed.

        If other requests compute, it is prefetched during their passes, so that no token waits for a copy, and with at
        most as many tokens as a step may compute. If nothing else runs, it is loaded at once.
        """
        if not verdict.cached.offloaded:
            return verdict
        if plan.shares:
            num_blocks = self._prefixes.prefetch(verdict.cached, request.block_hashes, plan.budget.limit)
            where = f"{num_blocks} of {len(verdict.cached.offloaded)} blocks in host memory"
            return AdmissionRefusal(Limit.TOKENS, f"tokens: {where} of its prefix are fetched beside this step")
        self._prefixes.load(verdict.cached, request.block_hashes)
        cached = self._prefixes.longest_prefix(request.block_hashes, request.num_tokens + request.num_pending_tokens)
        assert (cached.num_tokens, cached.offloaded) == (verdict.cached.num_tokens, []), f"{cached}, {verdict}"
        return replace(verdict, cached=cached)
