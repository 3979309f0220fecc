"""The engine's loop: decide, compute, account. It works on token ids; text is handled outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from twostroke.batch import Commit, RequestResult, ScheduledBatch, StepResult, StepTimer
from twostroke.engine.clock import Clock, monotonic_clock
from twostroke.engine.generation import Generation, GenerationRequest
from twostroke.engine.journal import Journal
from twostroke.engine.kv_self_check import KVSelfCheck
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.events import Event
from twostroke.kv_cache.manager import KVUsage
from twostroke.kv_check import KVCheck
from twostroke.request import FinishReason
from twostroke.runner.model_runner import Executor
from twostroke.scheduler.scheduler import Scheduler


class Engine:
    """The loop that runs sequences to their ends, one step at a time.

    Args:
        scheduler: decides each step.
        executor: computes it.
        block_size: tokens per KV block, for hashing.
        hashes_blocks: whether blocks are looked up by their hash.
        journal: records every input and outcome.
        self_check: computes cached blocks again where the scheduler asks for it; None: the scheduler never asks.
        clock: in seconds; tests and simulations pass their own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        block_size: int,
        hashes_blocks: bool,
        journal: Journal,
        self_check: KVSelfCheck | None = None,
        clock: Clock = monotonic_clock,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._block_size = block_size
        self._hashes_blocks = hashes_blocks
        self._journal = journal
        self._self_check = self_check
        self._clock = clock
        self._live: dict[str, Generation] = {}
        self._in_flight: deque[tuple[ScheduledBatch, tuple[Generation, ...]]] = deque()
        """Batches without a result yet, each with its sequences in the batch's order."""
        self._timer = StepTimer()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live or self._in_flight)

    @property
    def num_live(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._live)

    @property
    def kv_usage(self) -> KVUsage:
        """Number of KV blocks that are free, in use, or cached."""
        return self._scheduler.kv_usage

    @property
    def recent_events(self) -> Iterable[Event]:
        """The last events, oldest first."""
        return self._journal.recent

    def begin_measurement(self) -> None:
        """Record in the event log that a benchmark begins, so that the log alone gives its figures."""
        self._journal.measurement_began(self._clock())

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a sequence; its id must not be in use."""
        assert request.request_id not in self._live, f"request id {request.request_id!r} is in use"
        self._add(request)

    def _add(self, request: GenerationRequest) -> Generation:
        generation = Generation(request, self._block_size, self._hashes_blocks)
        arrival = generation.arrival
        self._live[request.request_id] = generation
        self._scheduler.add_request(arrival)
        self._journal.arrived(request, arrival, self._clock())
        return generation

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> bool:
        """End a sequence from outside (abort, stop string) and free its blocks at once.

        Args:
            request_id: id of the sequence.
            reason: finish reason of its output.
            num_output_tokens: tokens that count as output where a stop string cut off others; None: all.

        Returns:
            False if no live sequence has this id.
        """
        if self._live.pop(request_id, None) is None:
            return False
        self._scheduler.finish(request_id, reason)
        self._journal.finished_by_caller(request_id, reason, num_output_tokens, self._clock())
        self._on_finished(request_id)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. Return False if nothing was cached."""
        self._journal.prefix_cache_reset(self._clock())
        return self._scheduler.reset_prefix_cache() > 0

    def step(self) -> list[TokenUpdate]:
        """Decide, compute and account for one step; return the new tokens."""
        updates = self._submit_ahead()
        if self._in_flight:
            batch, generations = self._in_flight.popleft()
            updates += self._account(batch, generations, self._executor.collect())
        return updates

    def close(self) -> None:
        """Free the executor's memory and close the journal."""
        self._executor.close()
        self._journal.close()

    def _submit_ahead(self) -> list[TokenUpdate]:
        """Decide batches until the executor has `max_in_flight` of them, or nothing is left to decide.

        Returns:
            Updates for sequences that ended because they had read a corrupt block.
        """
        updates: list[TokenUpdate] = []
        while len(self._in_flight) < self._executor.max_in_flight:
            now_s = self._clock()
            batch = self._scheduler.schedule(now_s)
            self._journal.scheduled(batch, now_s)
            if batch.is_empty:
                assert self._in_flight or not self._live, f"{len(self._live)} requests and no progress: {batch}"
                return updates
            for request_id in batch.preempted_request_ids:  # the next update reports the preemption
                if request_id in self._live:
                    self._live[request_id].has_reported = False
            generations = tuple(self._live[scheduled.request_id] for scheduled in batch.requests)
            for generation in generations:
                self._add_to_executor(generation, now_s)
            self._on_scheduled(batch)
            for check in batch.kv_checks:
                updates += self._check_kv(check)
            self._timer.decided(batch.step, now_s)
            self._in_flight.append((batch, generations))  # before submit, which may be interrupted
            self._executor.submit(batch)
        return updates

    def _on_scheduled(self, batch: ScheduledBatch) -> None:
        """Prepare for a step that is about to be computed; overridden for hand-overs."""

    def _on_computed(self, commits: Sequence[Commit]) -> None:
        """React to a step that is accounted for and in the journal."""

    def _on_finished(self, request_id: str) -> None:
        """React to a sequence that was ended from outside; the journal has the event already."""

    def _check_kv(self, check: KVCheck) -> list[TokenUpdate]:
        """Compute a cached block again before the step that would read it; return the ends that result.

        The step runs as it was decided. Its results for suspects are dropped: they no longer belong to live
        generations.
        """
        generation = self._live.get(check.request_id)
        if generation is None or generation.scheduled_time_s is None:  # ended or started over by an earlier check
            return []
        assert self._self_check is not None, f"{check} of a scheduler that checks nothing"
        begin_s = self._clock()
        finding = self._self_check.run(check, generation)
        if finding is None:
            return []
        now_s = self._clock()
        self._journal.kv_block_checked(finding, begin_s, now_s)
        for request_id in finding.suspects.started_over:
            self._live[request_id] = Generation(self._live[request_id].request, self._block_size, self._hashes_blocks)
        return [self._end_of_suspect(request_id, now_s) for request_id in finding.suspects.ended]

    def _end_of_suspect(self, request_id: str, now_s: float) -> TokenUpdate:
        start = len(self._live.pop(request_id).output_token_ids)
        error = (
            "the request read a block of KV memory that was found corrupt: its answer so far may be wrong. "
            "The block is out of use; send the request again."
        )
        status = SequenceStatus(finish_reason=FinishReason.ERROR, error=error)
        return TokenUpdate(request_id, now_s, status=status, start=start)

    def _add_to_executor(self, generation: Generation, now_s: float) -> None:
        """Add a request to the executor when it runs for the first time; a request that ends in the queue is never
        added."""
        if generation.scheduled_time_s is None:
            generation.scheduled_time_s = now_s
            self._executor.add_request(generation.request.new_request)

    def _account(
        self, batch: ScheduledBatch, generations: tuple[Generation, ...], result: StepResult
    ) -> list[TokenUpdate]:
        now_s = self._clock()
        commits: list[Commit] = []
        updates: list[TokenUpdate] = []
        for generation, made in zip(generations, result.requests, strict=True):
            if self._live.get(made.request_id) is not generation:  # ended while this step ran
                continue
            commit, stop_token_id = generation.accept(made)
            commits.append(commit)
            if commit.finish_reason is not None:
                del self._live[made.request_id]
            if made.token_ids or made.prompt_logprobs or commit.finish_reason is not None:
                updates.append(self._update_of(generation, made, commit, stop_token_id, now_s))
        self._scheduler.update(batch.step, commits, self._timer.ended(batch.step, now_s, result.draft_time_s))
        self._journal.committed(result, commits, now_s, self._clock())
        self._on_computed(commits)
        return updates

    def _update_of(
        self, generation: Generation, made: RequestResult, commit: Commit, stop_token_id: int | None, now_s: float
    ) -> TokenUpdate:
        status = None
        if not generation.has_reported or made.prompt_logprobs or commit.finish_reason is not None:
            generation.has_reported = True
            state = self._scheduler.get(made.request_id)
            assert state is not None, f"{made.request_id} is live here and unknown to the scheduler"
            status = SequenceStatus(
                scheduled_time_s=generation.scheduled_time_s,
                num_cached_tokens=state.num_cached_tokens,
                num_preemptions=state.num_preemptions,
                finish_reason=commit.finish_reason,
                stop_reason=stop_token_id,
                error=made.error,
                hidden_state=made.hidden_state,
                prompt_logprobs=made.prompt_logprobs,
                prompt_logprobs_start=made.prompt_logprobs_start,
            )
        num_tokens = commit.num_tokens
        token_ids, logprobs = made.token_ids[:num_tokens], made.logprobs[:num_tokens]
        start = len(generation.output_token_ids) - num_tokens
        return TokenUpdate(made.request_id, now_s, token_ids, logprobs, status, commit.num_draft_tokens, start)
