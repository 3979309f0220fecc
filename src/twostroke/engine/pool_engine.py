"""PoolEngine: the loop of an engine in a pool, which lends the KV of what it computes, or fetches that of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twostroke.batch import Commit, ScheduledBatch
from twostroke.engine.clock import Clock, monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.generation import Generation, GenerationRequest
from twostroke.engine.journal import Journal
from twostroke.engine.kv_fetching import KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.engine.token_update import TokenUpdate
from twostroke.events import KVHoldEnded
from twostroke.kv_transfer.transport import Fetched, KVSource
from twostroke.request import FinishReason
from twostroke.runner.model_runner import Executor
from twostroke.scheduler.scheduler import Scheduler


class KVEnds(NamedTuple):
    """The two ends of hand-overs, as far as an engine has them."""

    lending: KVLending | None = None
    """Where others fetch the KV of what is computed here."""
    fetching: KVFetching | None = None
    """Where KV is fetched that others have computed."""


class PoolEngine(Engine):
    """An engine whose requests begin or go on in another process.

    Args:
        scheduler: decides each step.
        executor: computes it.
        ends: of its hand-overs.
        block_size: tokens per KV block, for hashing.
        hashes_blocks: whether anybody will look blocks up by their hash.
        journal: where every input and outcome is recorded.
        clock: seconds; a test or a simulation brings its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        ends: KVEnds,
        *,
        block_size: int,
        hashes_blocks: bool,
        journal: Journal,
        clock: Clock = monotonic_clock,
    ) -> None:
        super().__init__(
            scheduler, executor, block_size=block_size, hashes_blocks=hashes_blocks, journal=journal, clock=clock
        )
        self._lending, self._fetching = ends

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a sequence, unless its prefix is still to come."""
        assert request.request_id not in self._live, f"request id {request.request_id!r} is in use"
        if self._fetching is not None and self._fetching.holds_back(request):
            self._let_imports_in()
        else:
            self._add(request)

    def _add(self, request: GenerationRequest) -> Generation:
        generation = super()._add(request)
        if self._lending is not None:
            self._lending.arrived(generation.arrival)
        return generation

    def fetch_kv(
        self, import_id: int, request_id: str, token_ids: Sequence[int], cache_salt: str | None, source: KVSource
    ) -> None:
        """Fetches the KV of a prompt from the process that computes it; its request comes with this number."""
        assert self._fetching is not None, "an engine that fetches nothing"
        self._fetching.begin(import_id, request_id, token_ids, cache_salt, source)
        self._let_imports_in()

    def kv_fetched(self, import_id: int, fetched: Fetched) -> None:
        """It has come, or will not: a request that waited for it runs."""
        assert self._fetching is not None, "an engine that fetches nothing"
        for request in self._fetching.fetched(import_id, fetched):
            self.add_request(request)
        self._let_imports_in()

    def drop_kv(self, import_id: int) -> None:
        """No request will come with this number."""
        assert self._fetching is not None, "an engine that fetches nothing"
        self._fetching.drop(import_id)
        self._let_imports_in()

    def end_hold(self, hold_id: int) -> None:
        """Blocks that were on loan are fetched, or nobody came for them."""
        self._end_hold(hold_id)
        self._let_imports_in()

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> bool:
        """End a sequence from outside, also one that waits for its prefix."""
        is_known = super().finish(request_id, reason, num_output_tokens)
        if not is_known:
            is_known = self._fetching is not None and self._fetching.abort(request_id)
        self._let_imports_in()
        return is_known

    def step(self) -> list[TokenUpdate]:
        """Let prefixes in that have room, then decide, compute, account."""
        self._let_imports_in()
        updates = super().step()
        if not self._live:  # there may be no other step
            self._let_imports_in()
        return updates

    def close(self) -> None:
        """Give up what is lent and fetched, too."""
        for end in (self._lending, self._fetching):
            if end is not None:
                end.close()
        super().close()

    def _let_imports_in(self) -> None:
        """Prefixes that wait for room take it, if there is some now."""
        if self._fetching is not None:
            for request in self._fetching.try_again(is_idle=not self._live):
                self.add_request(request)

    def _decided(self, batch: ScheduledBatch) -> None:
        if self._lending is not None:
            self._lending.decided(batch)

    def _computed(self, commits: Sequence[Commit]) -> None:
        if self._lending is not None:
            self._lending.computed()
            for commit in commits:
                if commit.finish_reason is not None:
                    self._ended(commit.request_id)

    def _ended(self, request_id: str) -> None:
        hold_id = None if self._lending is None else self._lending.ended(request_id)
        if hold_id is not None:
            self._end_hold(hold_id)

    def _end_hold(self, hold_id: int) -> None:
        self._scheduler.handover.end_hold(hold_id)
        self._journal.emit(KVHoldEnded(self._clock(), self._journal.process, hold_id))
