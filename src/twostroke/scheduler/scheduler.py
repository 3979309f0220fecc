"""The scheduler: decides, step by step, which requests compute how many tokens in which blocks.

    add_request ──► waiting ──admit──► running ──► finish, or a commit with a finish reason
                      ▲                   │
                      └──── preempt ──────┘            quarantine: requests that read a corrupt block restart, or end

    schedule()   decodes first, one token each and its drafts; then the prefills that run already, in queue order;
                 then admissions. All draw on one token budget; then the same for background work, if there is room.
    update()     the outcome: outputs are counted, rejected drafts rolled back, full blocks become findable.

schedule() may run one step ahead of update(). It counts what it has decided as computed, and a sample in flight as a
known token (the runner has it). Only a request with drafts in flight waits, because their acceptance is unknown. Blocks
freed while a step that uses them is in flight may be reused at once: steps run in order, so the next owner writes after
the last reader.

Pure: no clock, no randomness, no tensors. The same calls make the same decisions, block by block; see replay.py.

Progress is guaranteed. The most urgent running request gets its blocks: it takes them from the least urgent ones, and
alone it always fits, which the constructor checks. It therefore ends; then the next one is first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from twostroke.batch import NOT_TIMED, Commit, Limit, ScheduledBatch, StepDurations
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import PredictsSteps
from twostroke.kv_cache.manager import KVCacheManager, KVUsage
from twostroke.kv_check import Suspects
from twostroke.request import Arrival, FinishReason, Request, RequestStatus
from twostroke.scheduler.background import add_background_tier
from twostroke.scheduler.drafts import make_drafts
from twostroke.scheduler.kv_checks import KVChecks
from twostroke.scheduler.kv_handover import KVHandover
from twostroke.scheduler.offload import Offload
from twostroke.scheduler.phases import StepPhases, check_longest_fits, check_longest_still_fits
from twostroke.scheduler.policy import make_policy
from twostroke.scheduler.step_budget import make_slo_budget
from twostroke.scheduler.step_plan import SchedulerPart, StepPlan, StepShare

P = TypeVar("P", bound=SchedulerPart)


class Scheduler(StepPhases):
    """Owner of the requests from arrival to end, and of the order in which they run."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        speculation: SpeculativeConfig | None = None,
        max_drafts: int | None = None,
        step_times: PredictsSteps | None = None,
        layers: Layers | None = None,
    ) -> None:
        """Create the parts that the settings ask for.

        Args:
            config: the scheduler's settings.
            kv: the KV cache's accounts.
            max_model_len: tokens of the longest request.
            speculation: settings of drafting; None: no drafts.
            max_drafts: most tokens in a row that the drafter can propose; None: any number.
            step_times: model of step times; needed if the settings limit them.
            layers: of the model, for the work of a step; needed with step_times.

        Raises:
            DoesNotFit: one request of max_model_len tokens needs more blocks than there are.
            InvalidParameter: chunked prefill without a KV cache.
        """
        assert max_model_len <= kv.max_model_len, f"{max_model_len} tokens; the KV cache knows {kv.max_model_len}"
        super().__init__(config, kv)
        self._config, self._step_times, self._layers = config, step_times, layers
        self._max_model_len = max_model_len
        self._num_for_longest = check_longest_fits(kv, self._chunk_rule, max_model_len)
        self._key_of = make_policy(config, _prefill_s_of(step_times, layers))
        self._requests: dict[str, Request] = {}
        self._num_arrivals = self._num_steps = 0
        self._in_flight: dict[int, dict[str, StepShare]] = {}
        self._finished_ids: list[str] = []

        self._slo_budget = self._with(make_slo_budget(config, step_times, layers))
        self._drafts = self._with(make_drafts(speculation, max_drafts))
        self._offload = self._with(None if kv.host_prefixes is None else Offload(kv.host_prefixes))
        self._kv_checks = self._with(KVChecks(kv, self._requests) if kv.check_rate > 0 else None)
        self._handover: KVHandover | None = None

    def _with(self, part: P | None) -> P | None:
        """Add a part, if there is one."""
        if part is not None:
            self._parts.append(part)
        return part

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended; its next token may still wait for an update."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return self._max_model_len

    @property
    def kv_usage(self) -> KVUsage:
        """Counts of blocks by state, and how well they are filled."""
        return self._kv.usage()

    def get(self, request_id: str) -> Request | None:
        """Return a request that has not ended."""
        return self._requests.get(request_id)

    def add_request(self, arrival: Arrival) -> None:
        """Put a request into the queue."""
        request_id, num_tokens = arrival.request_id, arrival.num_prompt_tokens + arrival.max_tokens
        assert request_id not in self._requests, f"{request_id} is not unique"
        assert min(arrival.num_prompt_tokens, arrival.max_tokens) > 0, f"{arrival}"
        assert num_tokens <= self._max_model_len, f"{request_id}: {num_tokens} tokens, at most {self._max_model_len}"
        self._requests[request_id] = request = Request(arrival, self._key_of(arrival, self._num_arrivals))
        self._num_arrivals += 1
        if arrival.background and self._tiers is None:
            self._tiers = self._order = add_background_tier(self._order, self._config, self._step_times, self._layers)
            self._waiting, self._running = self._order.waiting, self._order.running
        if arrival.lend_as is not None or arrival.import_id is not None:
            self._open_handover()
        self._order.on_arrival(request)
        self._waiting.add(request)

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Decide the next step.

        Args:
            now_s: the caller's clock, for time-based budgets; the keys of the queues do not depend on it.

        Returns:
            The decision. An empty batch is not executed and gets no update; every other batch gets exactly one.
        """
        for part in self._parts:
            part.on_step_start()
        plan = self._plan_type(self._token_budget(now_s), self._foreground)
        self._schedule_tier(plan)
        if self._tiers is not None and self._tiers.has_background:
            self._schedule_background(plan, self._tiers)
        return self._close(plan)

    def update(self, step: int, commits: Sequence[Commit], seconds: StepDurations = NOT_TIMED) -> None:
        """Apply the outcome of a step: one commit for each scheduled request that has not ended since.

        Steps are updated in the order in which they were decided. A commit of a request that has ended is ignored; one
        of a request that was preempted meanwhile counts, since its token was sampled.

        Args:
            step: of the batch.
            commits: results of its requests.
            seconds: duration of the step, for parts that measure.
        """
        assert step == next(iter(self._in_flight), None), f"step {step}; in flight: {list(self._in_flight)}"
        shares = self._in_flight.pop(step)
        for part in self._parts:
            part.learn(step, [share.scheduled for share in shares.values()], commits, seconds)
        for commit in commits:
            share = shares.pop(commit.request_id, None)
            if share is not None and share.request.status is not RequestStatus.FINISHED:
                self._settle(share, commit)
        missing = [i for i, share in shares.items() if not share.request.is_finished]
        assert not missing, f"step {step} has no commit for {missing}"
        for part in self._parts:
            part.on_step_start()  # there may be no further step

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request at any moment (abort, stop string) and free its blocks at once. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; return how many blocks were forgotten."""
        return self._kv.reset_prefix_cache()

    @property
    def handover(self) -> KVHandover:
        """Loans and imports; the first access enables them."""
        return self._open_handover()

    @property
    def kv_checks(self) -> KVChecks:
        """Self-check of cached blocks, in a scheduler that has it."""
        assert self._kv_checks is not None, "kv_check_rate is 0"
        return self._kv_checks

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Return the block tables of a running request, one per KV group, as the runner has them."""
        return self._kv.block_tables(request_id)

    def quarantine(self, request_id: str, entry: int, block_ids: Sequence[int | None]) -> Suspects:
        """Take corrupt blocks out of use, and restart or end every request that may have read them.

        A request without output restarts as if it had just arrived; its results in flight are dropped. A request with
        output ends, since its tokens may be wrong. No prefix computed so far is found in the prefix cache any more.

        Args:
            request_id: of the request whose prefix was checked.
            entry: entry of its block tables that the blocks are.
            block_ids: per KV group; None where the group's block is sound.

        Raises:
            EngineError: the remaining blocks do not hold the longest request.
        """
        suspects = self.kv_checks.suspects(self._running, self._requests[request_id], entry, block_ids)
        ended = [request for request in suspects if request.num_output_tokens]
        started_over = [request for request in suspects if not request.num_output_tokens]
        for request in ended:
            self._end(request, FinishReason.ERROR)
        for request in started_over:
            self._start_over(request)
        self._kv.quarantine([block_id for block_id in block_ids if block_id is not None])
        check_longest_still_fits(self._kv, self._num_for_longest, self._max_model_len)
        return Suspects(tuple(r.request_id for r in started_over), tuple(r.request_id for r in ended))

    def _close(self, plan: StepPlan) -> ScheduledBatch:
        """Turn the plan into a batch in flight."""
        step = self._num_steps
        self._num_steps += 1
        finished_ids: tuple[str, ...] = ()
        if plan.shares:  # an empty batch never reaches the runner, so the ids wait for the next one
            self._in_flight[step] = plan.shares
            finished_ids, self._finished_ids = tuple(self._finished_ids), []
        for part in self._parts:
            part.on_plan_closing(plan)
        refusal = plan.refusal or plan.preempted()
        unrefused = Limit.TOKENS if plan.is_cut else Limit.NONE
        batch = ScheduledBatch(
            step=step,
            requests=tuple([share.scheduled for share in plan.shares.values()]),
            limited_by=refusal.limit if refusal is not None else unrefused,
            preemptions=tuple(plan.preemptions),
            finished_request_ids=finished_ids,
            num_waiting=len(self._waiting),
            wait_reason=refusal.reason if refusal is not None else "",
            head_request_id=self._waiting.first.request_id if len(self._waiting) else None,
            admitted=tuple(plan.admitted),
            num_running=len(self._running),
            num_free_blocks=self._kv.num_free_blocks,
            kv_checks=plan.kv_checks,
            drafts=plan.drafts,
            kv_moves=plan.kv_moves,
            token_budget=plan.budget.limit,
        )
        for part in self._parts:
            part.on_batch(batch)
        return batch

    def _open_handover(self) -> KVHandover:
        if self._handover is None:
            self._handover = KVHandover(self._kv, self._num_for_longest, self._prefills)
            self._parts.append(self._handover)
        return self._handover

    # ------------------------------------------------------------------ outcome

    def _start_over(self, request: Request) -> None:
        """Put a request without output back into the queue, as it came; the runner is told that it ended."""
        for shares in self._in_flight.values():
            shares.pop(request.request_id, None)
        self._leave_running(request)
        self._waiting.add(request)
        self._finished_ids.append(request.request_id)
        request.move_to(RequestStatus.WAITING)
        request.num_computed_tokens = request.num_prefill_tokens = request.num_pending_tokens = 0
        request.num_draft_tokens = 0

    def _settle(self, share: StepShare, commit: Commit) -> None:
        """Account for one request's result."""
        request, scheduled, num_preemptions = share
        num_accepted = commit.num_tokens
        if commit.finish_reason is FinishReason.ERROR:  # other requests must not find its blocks
            self._end(request, FinishReason.ERROR)
            return
        if scheduled.samples_token:
            request.num_pending_tokens -= 1
            request.num_output_tokens += num_accepted
            self._order.charge(request, num_output_tokens=num_accepted)
            if scheduled.num_draft_tokens:
                request.num_draft_tokens = 0
            if commit.block_hashes:
                request.block_hashes.extend(commit.block_hashes)
        if commit.finish_reason is None:
            share.check(commit)
        if request.num_preemptions == num_preemptions:
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            if scheduled.num_draft_tokens:
                # The input token and the accepted drafts are computed; the last accepted token is not yet.
                end = scheduled.num_computed_tokens + num_accepted
                self._kv.roll_back(request.request_id, end)
                request.num_computed_tokens = end
            self._kv.cache_blocks(request.request_id, request.block_hashes, end)
        if commit.finish_reason is not None:
            self._end(request, commit.finish_reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            if self._handover is None or not self._handover.lend_at_end(request, reason):
                self._kv.free(request_id)
        else:
            self._waiting.remove(request)
        for part in self._parts:
            part.on_request_end(request)
        if request.status is not RequestStatus.WAITING:  # the runner knows it
            self._finished_ids.append(request_id)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        del self._requests[request_id]

    # ------------------------------------------------------------------ checks

    def check_invariants(self) -> None:
        """Check that queues, states and block tables agree."""
        self._kv.check_invariants()
        if self._handover is not None:
            self._handover.check_invariants()
        self._waiting.check_invariants()
        self._running.check_invariants()
        assert len(self._waiting) + len(self._running) == len(self._requests), "a request is in no queue or in two"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING, f"{request}"
            num_tokens = self._kv.num_tokens_held(request.request_id)
            assert num_tokens > 0, f"{request} runs without blocks"
            if self._kv.keeps_computed_kv:
                assert num_tokens == request.num_computed_tokens, f"{request}: {num_tokens} tokens have a place"
        for request in self._waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request}"
            assert request.num_computed_tokens == 0, f"{request} waits with computed tokens"
        for request in self._requests.values():
            assert self._requests[request.request_id] is request, f"{request}"
            assert 0 <= request.num_pending_tokens <= len(self._in_flight), f"{request}"
            assert request.num_output_tokens + request.num_pending_tokens <= request.arrival.max_tokens, f"{request}"


def _prefill_s_of(step_times: PredictsSteps | None, layers: Layers | None) -> Callable[[int], float] | None:
    """Return a function from prompt tokens to the seconds of their prefill alone; None without step times."""
    if step_times is None or layers is None:
        return None
    return lambda num_tokens: step_times.seconds(layers.work([(0, num_tokens, 1)]))
