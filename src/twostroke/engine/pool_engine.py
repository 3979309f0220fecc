"""PoolEngine: an engine's loop in a pool; it lends the KV that it computes, or fetches KV from other processes."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.batch import Commit, ScheduledBatch
from twostroke.engine.clock import Clock, monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import DropKV, EndHold, FetchKV, KVFetched
from twostroke.engine.journal import Journal
from twostroke.engine.kv_endpoints import KVEndpoints
from twostroke.engine.token_update import TokenUpdate
from twostroke.request import FinishReason
from twostroke.runner.model_runner import Executor
from twostroke.scheduler.scheduler import Scheduler


class PoolEngine(Engine):
    """An engine whose requests begin or continue in another process.

    Args:
        scheduler: decides each step.
        executor: computes it.
        ends: both ends of its hand-overs.
        block_size: tokens per KV block, for hashing.
        hashes_blocks: whether blocks are looked up by their hash.
        journal: records every input and outcome.
        clock: in seconds; tests and simulations pass their own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        ends: KVEndpoints,
        *,
        block_size: int,
        hashes_blocks: bool,
        journal: Journal,
        clock: Clock = monotonic_clock,
    ) -> None:
        super().__init__(
            scheduler, executor, block_size=block_size, hashes_blocks=hashes_blocks, journal=journal, clock=clock
        )
        self._endpoints = ends
        ends.bind(lambda request: self._add(request).arrival, lambda: not self._live)

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a sequence, unless it has to wait for its prefix."""
        assert request.request_id not in self._live, f"request id {request.request_id!r} is in use"
        self._endpoints.add(request)

    def hand_over(self, message: FetchKV | DropKV | KVFetched | EndHold) -> None:
        """Handle a message about KV that is fetched or on loan."""
        self._endpoints.handle(message)

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> bool:
        """End a sequence from outside, including one that waits for its prefix."""
        is_known = super().finish(request_id, reason, num_output_tokens) or self._endpoints.abort(request_id)
        self._endpoints.start_waiting_imports()
        return is_known

    def step(self) -> list[TokenUpdate]:
        """Start imports that now have room, then run a step."""
        self._endpoints.start_waiting_imports()
        updates = super().step()
        if not self._live:  # there may be no next step
            self._endpoints.start_waiting_imports()
        return updates

    def close(self) -> None:
        self._endpoints.close()
        super().close()

    def _on_scheduled(self, batch: ScheduledBatch) -> None:
        self._endpoints.decided(batch)

    def _on_computed(self, commits: Sequence[Commit]) -> None:
        self._endpoints.computed(commits)

    def _on_finished(self, request_id: str) -> None:
        self._endpoints.ended(request_id)
