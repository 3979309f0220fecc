"""The scheduler: decides, step by step, who computes how many tokens in which blocks.

    add_request ──► waiting ──admit──► running ──► finish, or a commit with a finish reason
                      ▲                   │
                      └──── preempt ──────┘            quarantine: what a corrupt block has touched starts over, or ends

    schedule()   decodes first, one token each and its drafts; then the prefills that run already, in queue order;
                 then admissions. All draw on one token budget; then the same for background work, if there is room.
    update()     the outcome: outputs are counted, rejected drafts rolled back, full blocks become findable.

schedule() may run one step ahead of update(). It counts what it has decided as computed, and a sample in flight as a
token that is there (the runner has it); only a request whose drafts are in flight waits, because nobody knows yet how
many of them will stand. Blocks given back while a step that uses them is in flight may be given on at once: steps
run in order, so their next owner writes after the last reader.

Pure: no clock, no dice, no tensors. The same calls make the same decisions, block by block; see replay.py.

Progress. Most urgent first, the first running request gets its blocks: it takes them from the least urgent ones, and
alone it always fits, which the constructor checks. It therefore ends; then the next one is first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.batch import (
    UNTIMED,
    BlockTableUpdate,
    Commit,
    Limit,
    Preemption,
    ScheduledBatch,
    StepSeconds,
    Stroke,
)
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.cost.step_model import PredictsSteps
from twostroke.cost.step_work import Layers
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.manager import KVCacheManager, KVUsage
from twostroke.kv_check import KVCheck, Suspects
from twostroke.request import Arrival, FinishReason, Request, RequestStatus
from twostroke.scheduler.admission import (
    Admission,
    Admittance,
    ContinuousGate,
    Gate,
    Refusal,
    StaticGate,
    check_that_one_fits,
    check_that_one_still_fits,
    waits_for_update,
)
from twostroke.scheduler.background import AllRoom, BackgroundRoom, Tiers, TimedRoom
from twostroke.scheduler.budget import make_chunk_rule
from twostroke.scheduler.drafts import make_gate
from twostroke.scheduler.fair import FairOrder
from twostroke.scheduler.kv_checks import KVChecks
from twostroke.scheduler.kv_handover import KVHandover
from twostroke.scheduler.policy import DeadlineOrder, FixedOrder, Key, Order, make_policy
from twostroke.scheduler.step_budget import make_step_budget
from twostroke.scheduler.step_plan import Queues, Share, StepPlan

_Phase = Callable[[StepPlan], None]


class Scheduler:
    """Owns the requests from arrival to end, and the order in which they run."""

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
        """Chooses the parts.

        Args:
            config: what a user may set.
            kv: the KV cache's accounts.
            max_model_len: tokens of the longest request.
            speculation: who drafts; None: nobody.
            max_drafts: most tokens in a row that it can guess; None: any number.
            step_times: how long steps take; needed where the settings limit that.
            layers: of the model, for the work of a step; likewise.

        Raises:
            DoesNotFit: one request of max_model_len tokens needs more blocks than there are.
            InvalidParameter: chunked prefill without a KV cache.
        """
        assert max_model_len <= kv.max_model_len, f"{max_model_len} tokens; the KV cache knows {kv.max_model_len}"
        self._kv = kv
        self._max_model_len = max_model_len
        self._budget = make_step_budget(config, step_times, layers)
        # Everybody who runs can have a token in every step.
        max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._chunk_rule = make_chunk_rule(config, kv.keeps_computed_kv)
        gate: Gate = StaticGate() if config.batching == "static" else ContinuousGate()
        self._admission = Admission(kv, self._chunk_rule, gate, max_num_running)
        self._kv_checks = KVChecks(kv)
        self._drafts = make_gate(speculation, max_drafts)
        self._rounds = self._rounds_of(config)
        check_that_one_fits(kv, self._chunk_rule, max_model_len)
        self._handover = KVHandover(kv, self._chunk_rule, max_model_len)

        self._key_of = make_policy(config, _prefill_s_of(step_times, layers))
        self._num_arrivals = 0
        self._requests: dict[str, Request] = {}
        self._keys: dict[str, Key] = {}
        self._order = Tiers(self._order_of(config), self._order_of(config))
        self._room = _room_of(config, step_times, layers)
        self._waiting, self._running = self._order.waiting, self._order.running
        self._num_steps = 0
        self._in_flight: dict[int, dict[str, Share]] = {}
        self._finished_ids: list[str] = []

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
        """Where the blocks are."""
        return self._kv.usage()

    def get(self, request_id: str) -> Request | None:
        """A request that has not ended."""
        return self._requests.get(request_id)

    def add_request(self, arrival: Arrival) -> None:
        """Puts a request into the queue."""
        request_id, num_tokens = arrival.request_id, arrival.num_prompt_tokens + arrival.max_tokens
        assert request_id not in self._requests, f"{request_id} is not unique"
        assert min(arrival.num_prompt_tokens, arrival.max_tokens) > 0, f"{arrival}"
        assert num_tokens <= self._max_model_len, f"{request_id}: {num_tokens} tokens, at most {self._max_model_len}"
        request = Request(arrival)
        self._requests[request_id] = request
        self._keys[request_id] = self._key_of(arrival, self._num_arrivals)
        self._num_arrivals += 1
        self._order.arrived(request)
        self._waiting.add(self._keys[request_id], request)

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Decides the next step.

        Args:
            now_s: the caller's clock, for budgets that go by it; the keys of the queues do not move with it.

        Returns:
            The decision. An empty batch is not executed and gets no update; everything else gets exactly one.
        """
        self._kv.take_in_prefetched()
        foreground = self._order.foreground
        head = foreground.waiting.first if len(foreground.waiting) else None
        tokens = self._budget.tokens(now_s, foreground.running, head)
        plan = StepPlan(tokens, self._kv.keeps_computed_kv, foreground)
        self._schedule_tier(plan)
        if self._order.has_background:
            plan.order = self._order.background
            room = self._room.tokens([share.scheduled for share in plan.shares.values()], plan.order)
            plan.budget.remaining = min(plan.budget.remaining, room)
            self._schedule_tier(plan)
        self._admission.end_of_step(plan.refusal)
        batch = self._close(plan)
        self._budget.decided(batch)
        return batch

    def update(self, step: int, commits: Sequence[Commit], seconds: StepSeconds = UNTIMED) -> None:
        """Takes in the outcome of a step: one commit for each scheduled request that has not ended since.

        Steps are updated in the order in which they were decided. A commit of a request that has ended is ignored;
        one of a request that was preempted meanwhile counts, its token was sampled.

        Args:
            step: of the batch.
            commits: what its requests got.
            seconds: how long it took, for a gate that goes by measurement.
        """
        assert step == next(iter(self._in_flight), None), f"step {step}; in flight: {list(self._in_flight)}"
        shares = self._in_flight.pop(step)
        self._budget.took(step, seconds.step_s - seconds.draft_s)
        self._drafts.learn([share.scheduled for share in shares.values()], commits, seconds)
        for commit in commits:
            share = shares.pop(commit.request_id, None)
            if share is not None and share.request.status is not RequestStatus.FINISHED:
                self._settle(share, commit)
        missing = [i for i, share in shares.items() if not share.request.is_finished]
        assert not missing, f"step {step} has no commit for {missing}"
        self._kv.take_in_prefetched()  # there may be no other step

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request at any moment (abort, stop string); its blocks are free at once. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)

    def reset_prefix_cache(self) -> int:
        """No prefix computed so far is found any more; returns how many blocks were forgotten."""
        return self._kv.reset_prefix_cache()

    def begin_import(self, import_id: int, block_hashes: Sequence[bytes], num_tokens: int) -> KVImport | None:
        """Takes blocks for a prefix that is fetched from another process; see KVHandover."""
        return self._handover.begin_import(import_id, block_hashes, num_tokens, self._prefills())

    def complete_import(self, import_id: int, block_hashes: Sequence[bytes]) -> None:
        """All of it has come: a request with this prefix finds it from now on."""
        self._kv.holds.complete_import(import_id, block_hashes)

    def end_hold(self, hold_id: int) -> None:
        """Nobody fetches under this number any more: its blocks are ordinary ones. Unknown numbers are ignored."""
        self._kv.holds.end(hold_id)

    def is_on_loan(self, hold_id: int) -> bool:
        """Whether the request that was to lend its blocks has ended, and has done so."""
        return hold_id in self._kv.holds

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Of a running request, per KV group, as the runner has them."""
        return self._kv.block_tables(request_id)

    def kv_checks_before(self, check: KVCheck) -> list[KVCheck]:
        """Checks of the earlier blocks of the prefix that `check` belongs to, in their order; a question."""
        return self._kv_checks.before(self._requests[check.request_id], check)

    def quarantine(self, request_id: str, entry: int, block_ids: Sequence[int | None]) -> Suspects:
        """Takes blocks out of use that were found corrupt, and sees to everybody who may have read them.

        Who has no output yet starts over as if it had just come; its results in flight are nobody's. Who has some
        ends: its tokens may be wrong. Nothing that was computed so far is found in the prefix cache any more.

        Args:
            request_id: for whose prefix they were found.
            entry: which entry of its block tables they are.
            block_ids: per KV group; None where the group's block is sound.

        Raises:
            EngineError: what is left does not hold the longest request.
        """
        suspects = self._kv_checks.suspects(self._running, self._requests[request_id], entry, block_ids)
        ended = [request for request in suspects if request.num_output_tokens]
        started_over = [request for request in suspects if not request.num_output_tokens]
        for request in ended:
            self._end(request, FinishReason.ERROR)
        for request in started_over:
            self._start_over(request)
        self._kv.quarantine([block_id for block_id in block_ids if block_id is not None])
        check_that_one_still_fits(self._kv, self._chunk_rule, self._max_model_len)
        return Suspects(tuple(r.request_id for r in started_over), tuple(r.request_id for r in ended))

    # ------------------------------------------------------------------ phases of a step

    def _schedule_tier(self, plan: StepPlan) -> None:
        """The first round that schedules anything makes the step."""
        for phases in self._rounds:
            for phase in phases:
                phase(plan)
            if plan.shares:
                return

    def _order_of(self, config: SchedulerConfig) -> Order:
        """As the policy has it."""

        def key_of(request: Request) -> Key:
            return self._keys[request.request_id]

        if config.policy == "fair":
            return FairOrder(config, key_of if config.ttft_slo is not None else None)
        return FixedOrder() if config.ttft_slo is None else DeadlineOrder(key_of)

    def _rounds_of(self, config: SchedulerConfig) -> tuple[tuple[_Phase, ...], ...]:
        """Phases in their order."""
        if config.mixing == "mixed":
            return ((self._schedule_decodes, self._schedule_prefills, self._admit),)
        return (self._schedule_prefills, self._admit), (self._schedule_decodes,)

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """A token for everybody who decodes, and drafts as far as the budget has tokens for everybody else."""
        num_spare = plan.budget.remaining - len(plan.order.running)
        decoding = [
            request
            for request in plan.order.running.snapshot()
            if request.num_computed_tokens >= request.num_prefill_tokens and not waits_for_update(request)
        ]
        if plan.order is self._order.background:
            # drafts are for those who wait for a token; and there may be room for some of the decodes only
            for request in decoding:
                if plan.budget.remaining > 0 and request.status is RequestStatus.RUNNING:
                    self._schedule_decode(plan, request, 0)
            return
        wanted = self._drafts.num_drafts(decoding)
        plan.drafts = self._drafts.decision
        for request, num_wanted in zip(decoding, wanted, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago by somebody more urgent
            num_drafts = max(0, min(num_wanted, num_spare, request.num_outputs_left - 1))
            num_spare -= num_drafts
            self._schedule_decode(plan, request, num_drafts)

    def _schedule_decode(self, plan: StepPlan, request: Request, num_drafts: int) -> None:
        start = request.num_computed_tokens
        updates = self._kv.try_allocate(request.request_id, start, start + 1 + num_drafts)
        if updates is None:
            # Nobody gives way for drafts.
            num_drafts = 0
            updates = self._allocate_by_preempting(plan, request, start + 1)
            if updates is None:
                return
        request.num_draft_tokens = num_drafts
        plan.take(request, Stroke.DECODE, 1 + num_drafts, updates)

    def _schedule_prefills(self, plan: StepPlan) -> None:
        """The next chunk of everybody who is admitted and not through with what was known then."""
        waiting = plan.order.waiting
        for request in plan.order.running.snapshot():
            if request.num_computed_tokens >= request.num_prefill_tokens or waits_for_update(request):
                continue
            while plan.refusal is None and len(waiting) and plan.order.goes_before(waiting.first, request):
                plan.refusal = self._try_admit(plan, waiting.first)
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago
            num_left = request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
            num_now = self._chunk_rule.num_tokens_now(num_left, plan.budget)
            plan.is_cut = plan.is_cut or num_now < num_left
            if num_now == 0:
                return
            updates = self._allocate_by_preempting(plan, request, request.num_computed_tokens + num_now)
            if updates is not None:
                plan.take(request, Stroke.PREFILL, num_now, updates)

    def _admit(self, plan: StepPlan) -> None:
        """From the head of the queue on, as long as slots, budget and blocks last."""
        while len(plan.order.waiting) and plan.refusal is None:
            plan.refusal = self._try_admit(plan, plan.order.waiting.first)

    def _try_admit(self, plan: StepPlan, request: Request) -> Refusal | None:
        refusal = plan.preempted()
        if refusal is not None:
            return refusal
        while isinstance(verdict := self._consider(plan, request), Refusal):
            in_vain = plan.is_short or waits_for_update(request)
            victim = None if in_vain else self._order.displaced_by(request, verdict.limit)
            if victim is None:
                return verdict
            self._preempt(plan, victim, by=request)
        if verdict.cached.offloaded:
            verdict = self._brought_back(plan, request, verdict)
            if isinstance(verdict, Refusal):
                return verdict
        key = self._keys[request.request_id]
        self._waiting.remove(key)
        self._running.add(key, request)
        self._kv.admit(request.request_id, verdict.cached, verdict.num_promised_blocks)
        self._handover.runs(request)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = verdict.cached.num_tokens
            num_to_compute = request.num_tokens - verdict.cached.num_tokens
            self._order.pay(request, num_prompt_tokens=num_to_compute)
            if not request.arrival.background:
                self._room.begun(num_to_compute)
        plan.admitted.append(verdict.record(request))
        request.move_to(RequestStatus.RUNNING)
        request.num_computed_tokens = verdict.cached.num_tokens
        request.num_prefill_tokens = request.num_tokens + request.num_pending_tokens
        end = request.num_computed_tokens + verdict.num_tokens
        plan.is_cut = plan.is_cut or end < request.num_prefill_tokens
        updates = self._kv.try_allocate(request.request_id, request.num_computed_tokens, end)
        assert updates is not None, f"{request.request_id} was admitted and has no room for its first {end} tokens"
        plan.take(request, Stroke.PREFILL, verdict.num_tokens, updates)
        return None

    def _brought_back(self, plan: StepPlan, request: Request, verdict: Admittance) -> Admittance | Refusal:
        """What of its prefix is in host memory comes back: beside the passes of others, so that no token waits for a
        copy, and in a step no more tokens than it may compute; at once where nobody else computes anything."""
        if plan.shares:
            num_blocks = self._kv.prefetch(verdict.cached, request.block_hashes, plan.budget.limit)
            where = f"{num_blocks} of {len(verdict.cached.offloaded)} blocks in host memory"
            return Refusal(Limit.TOKENS, f"tokens: {where} of its prefix are fetched beside this step")
        self._kv.load(verdict.cached, request.block_hashes)
        return self._admission.with_loaded(request, verdict)

    def _consider(self, plan: StepPlan, request: Request) -> Admittance | Refusal:
        return self._admission.consider(request, plan.budget, len(self._running), self._prefills())

    def _prefills(self) -> list[Request]:
        """Running requests that have not computed all that they had at admission."""
        return [request for request in self._running if request.num_computed_tokens < request.num_prefill_tokens]

    def _close(self, plan: StepPlan) -> ScheduledBatch:
        """Makes the plan a step in flight."""
        step = self._num_steps
        self._num_steps += 1
        finished_ids: tuple[str, ...] = ()
        if plan.shares:  # an empty batch never reaches the runner, so the news waits for the next one
            self._in_flight[step] = plan.shares
            finished_ids, self._finished_ids = tuple(self._finished_ids), []
        moves = self._kv.take_moves(runs=bool(plan.shares))
        # checks come before a step, in which what is loaded with it is not there yet
        checks = () if moves and moves.loads else self._kv_checks.of_hits(plan.admitted, self._requests)
        head_request_id = self._waiting.first.request_id if self._waiting else None
        queues = Queues(len(self._waiting), head_request_id, len(self._running), self._kv.num_free_blocks)
        return plan.batch(step, finished_ids, queues, checks, moves)

    # ------------------------------------------------------------------ preemption

    def _allocate_by_preempting(
        self, plan: StepPlan, request: Request, end: int
    ) -> tuple[BlockTableUpdate, ...] | None:
        """Blocks up to token `end`, taken from the least urgent if need be; None when that is the request itself."""
        start = request.num_computed_tokens
        while (updates := self._kv.try_allocate(request.request_id, start, end)) is None:
            victim = self._running.last
            self._preempt(plan, victim, by=request)
            if victim is request:
                return None
        return updates

    def _preempt(self, plan: StepPlan, request: Request, *, by: Request) -> None:
        """Gives a request's blocks back, which `by` needs; it will compute its tokens again, its output included.

        Recomputing, not copying out: a prefill of known tokens is cheap beside generating them, and what is still in
        the prefix cache by then is not computed again. A share that it was given in this very step is taken back.
        """
        request_id = request.request_id
        plan.take_back(request)
        plan.is_short = plan.is_short or request.arrival.background == by.arrival.background
        self._leave_running(request)
        self._waiting.add(self._keys[request_id], request)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        plan.preemptions.append(Preemption(request_id, by.request_id))

    def _start_over(self, request: Request) -> None:
        """Puts a request without output back into the queue, as it came; the runner hears that it ended."""
        for shares in self._in_flight.values():
            shares.pop(request.request_id, None)
        self._leave_running(request)
        self._waiting.add(self._keys[request.request_id], request)
        self._finished_ids.append(request.request_id)
        request.move_to(RequestStatus.WAITING)
        request.num_computed_tokens = request.num_prefill_tokens = request.num_pending_tokens = 0
        request.num_draft_tokens = 0

    def _leave_running(self, request: Request) -> None:
        self._running.remove(self._keys[request.request_id])
        self._kv.free(request.request_id)

    # ------------------------------------------------------------------ outcome

    def _settle(self, share: Share, commit: Commit) -> None:
        """Accounts for one request's result."""
        request, scheduled, num_preemptions = share
        num_accepted = commit.num_tokens
        if commit.finish_reason is FinishReason.ERROR:  # what it computed must not be found by others
            self._end(request, FinishReason.ERROR)
            return
        if scheduled.samples_token:
            request.num_pending_tokens -= 1
            request.num_output_tokens += num_accepted
            self._order.pay(request, num_output_tokens=num_accepted)
            if scheduled.num_draft_tokens:
                request.num_draft_tokens = 0
            if commit.block_hashes:
                request.block_hashes.extend(commit.block_hashes)
        if commit.finish_reason is None:
            share.check(commit)
        if request.num_preemptions == num_preemptions:
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            if scheduled.num_draft_tokens:
                # The token fed and the drafts that stood are valid; the last one accepted is not computed yet.
                end = scheduled.num_computed_tokens + num_accepted
                self._kv.roll_back(request.request_id, end)
                request.num_computed_tokens = end
            self._kv.name_blocks(request.request_id, request.block_hashes, end)
        if commit.finish_reason is not None:
            self._end(request, commit.finish_reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        if request.status is RequestStatus.RUNNING:
            if self._handover.may_lend(request, reason):
                self._running.remove(self._keys[request_id])
                self._handover.lend(request)
            else:
                self._leave_running(request)
        else:
            self._waiting.remove(self._keys[request_id])
        self._handover.ended(request)
        if request.status is not RequestStatus.WAITING:  # the runner has heard of it
            self._finished_ids.append(request_id)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        del self._requests[request_id], self._keys[request_id]
        self._drafts.forget(request_id)

    # ------------------------------------------------------------------ checks

    def check_invariants(self) -> None:
        """Queues, states and block tables tell the same story."""
        self._kv.check_invariants()
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
    """Return the seconds that a prompt of so many tokens takes by itself, where step times are known."""
    if step_times is None or layers is None:
        return None
    return lambda num_tokens: step_times.seconds(layers.work([(0, num_tokens, 1)]))


def _room_of(config: SchedulerConfig, step_times: PredictsSteps | None, layers: Layers | None) -> BackgroundRoom:
    """By time, where that is known."""
    if step_times is None or layers is None:
        return AllRoom(config.max_num_batched_tokens)
    return TimedRoom(config.flex_slowdown, config.max_num_batched_tokens, step_times, layers)
