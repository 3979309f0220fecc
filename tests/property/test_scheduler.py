"""The scheduler under random arrivals, aborts and settings, with a device that checks what it reads.

FakeExecutor checks every K and V that a query sees; here are the rules of the schedule itself. Each run is also
replayed from its event log, through JSON, and must decide the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from factories import make_layout
from fakes import FakeEngine
from twostroke.batch import Limit, ScheduledBatch, Stroke
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.event_codec import from_json, to_json
from twostroke.events import EventRing
from twostroke.request import Request, RequestStatus
from twostroke.scheduler.phases import waits_for_update
from twostroke.scheduler.replay import replay

SEEDS = st.integers(0, 2**32 - 1)


@dataclass
class Progress:
    """Progress of a request since it was last admitted."""

    num_preemptions: int
    next_position: int


STEP_TIMES = StepTimeModel(
    layers=Curve((1, 4, 20), (1.0, 1.2, 3.0)), head=Curve((1, 8), (0.1, 0.3)), pair_s=0.001, seen_s=0.001
)


def make_engine(dice: random.Random) -> FakeEngine:
    """Any combination of settings, and a pool that one longest request just fits into, or a little more."""
    windows = dice.choice([[None], [None], [6], [None, None, 6], [None, 3, 9], [2, 5], [5, 5, 5, None], [3, 3, None]])
    layout = make_layout(windows, dice.choice([1, 2, 4]))
    max_model_len = dice.choice([12, 40])
    kind = dice.choice(["paged"] * 8 + ["contiguous", "no KV cache"])
    is_chunked = kind != "no KV cache" and dice.random() < 0.8
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=dice.choice([1, 4, 4, 8, 20]),
        max_num_seqs=dice.choice([1, 3, 8, 8]),
        policy=dice.choice(["fcfs", "priority", "priority", "fair", "fair"]),
        ageing_s=dice.choice([1.0, 100.0, 100.0]),
        enable_chunked_prefill=is_chunked,
        batching=dice.choice(["continuous"] * 4 + ["static"]),
        mixing=dice.choice(["mixed"] * 4 + ["prefill_first"]),
    )
    has_cache = kind == "paged" and dice.random() < 0.7
    num_slots = dice.choice([0, 1, 3, 100])
    cache_config = CacheConfig(
        block_size=layout.block_size,
        enable_kv_cache=kind != "no KV cache",
        kv_reservation="contiguous" if kind == "contiguous" else "paged",
        enable_prefix_caching=has_cache,
        kv_check_rate=dice.choice([0, 0.3, 1]) if has_cache else 0,
        kv_offloading_size=num_slots * layout.bytes_per_block if has_cache and num_slots else None,
    )
    whole = layout.run_blocks(max_model_len)
    step = min(max_model_len, scheduler_config.max_num_batched_tokens) if is_chunked else max_model_len
    least = whole if kind == "contiguous" else layout.peak_blocks(max_model_len, step)
    log = EventRing(1_000_000)
    return FakeEngine(
        layout,
        least + dice.randint(0, dice.choice([2, whole // 2])),
        max_model_len=max_model_len,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        latency=dice.choice([0, 1, 1, 2]),
        max_drafts=dice.choice([0, 3, "auto"]),
        stop_chance=dice.choice([0.0, 0.1]),
        corruption_chance=dice.choice([0.0, 0.3, 1.0]),
        seed=dice.randint(0, 10_000),
        log=log,
        step_times=dice.choice([None, STEP_TIMES, STEP_TIMES]),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a FakeEngine."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        """Make a new engine."""
        self.engine = make_engine(random.Random(seed))
        self.num_requests = 0
        self.progress: dict[str, Progress] = {}

    @rule(seed=SEEDS, num_requests=st.integers(1, 5))
    def submit(self, seed: int, num_requests: int) -> None:
        """Submit a burst of requests of two families of prompts; many are short with long answers."""
        dice = random.Random(seed)
        longest = self.engine.kv.max_model_len
        for _ in range(num_requests):
            num_prompt_tokens = dice.randint(1, dice.choice([3, longest - 1]))
            max_tokens = dice.choice([1, longest - num_prompt_tokens, dice.randint(1, longest - num_prompt_tokens)])
            num_own = dice.choice([0, 0, dice.randint(0, num_prompt_tokens)])
            prompt = [dice.randint(0, 1)] * (num_prompt_tokens - num_own) + [2] * num_own
            salt = dice.choice(["", "", "tenant"])
            request_id = f"r{self.num_requests}"
            tenant = dice.choice(["", "a", "b", "b", "b"])
            priority = dice.randint(0, 2)
            background = self.engine.settings.serves_background and dice.random() < 0.4
            self.engine.submit(
                request_id, prompt, max_tokens, priority=priority, salt=salt, tenant=tenant, background=background
            )
            self.num_requests += 1

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request at any time, even with a step in flight."""
        request_id = data.draw(st.sampled_from(sorted(self.engine.live)))
        self.engine.abort(request_id)
        assert self.engine.scheduler.get(request_id) is None

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        """Run a few steps, each checked."""
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        """Run a step, and check its rules."""
        scheduler = self.engine.scheduler
        requests = {i: scheduler.get(i) for i in self.engine.live}
        queued = {i for i, r in requests.items() if r is not None and r.status is not RequestStatus.RUNNING}
        decoding = {i for i, r in requests.items() if r is not None and decodes_now(r)}
        batch = self.engine.step()
        self.check_order(batch, queued)
        self.check_sizes(batch)
        self.check_positions(batch, requests)
        self.check_reasons(batch, requests)
        if self.engine.settings.mixing == "mixed":
            decoding -= self.engine.background  # background work gets the remaining budget
            left_out = decoding - {r.request_id for r in batch.requests} - set(batch.preempted_request_ids)
            assert not left_out, f"{left_out} decode and got no token"
        else:
            assert len({r.stroke for r in batch.requests}) <= 1, "two strokes in one step"
        for request_id in self.engine.started_over:
            self.progress.pop(request_id, None)
            request = scheduler.get(request_id)
            assert request is not None
            assert (request.status, request.num_output_tokens) == (RequestStatus.WAITING, 0)

    def check_order(self, batch: ScheduledBatch, queued: set[str]) -> None:
        """Check that no request was admitted before a more urgent one: keys bound how far requests may overtake.

        A fair queue keeps this order among the requests of each tenant; among tenants see test_fairness.py. Background
        work is less urgent than all other work.
        """
        keys = {i: (i in self.engine.background, key) for i, key in self.engine.keys.items()}
        is_fair = self.engine.settings.policy == "fair"
        for tenant in ["", "a", "b"] if is_fair else [None]:
            mine = {i for i in queued if tenant in (None, self.engine.tenants[i])}
            admitted = mine & {r.request_id for r in batch.requests}
            if admitted and mine - admitted:
                assert max(keys[i] for i in admitted) < min(keys[i] for i in mine - admitted)

    def check_sizes(self, batch: ScheduledBatch) -> None:
        """Check the budget and the slots."""
        settings = self.engine.settings
        budget = settings.max_num_batched_tokens
        whole = [r.num_scheduled_tokens for r in batch.requests if r.stroke is Stroke.PREFILL]
        if settings.enable_chunked_prefill or not any(n > budget for n in whole):
            assert batch.num_tokens <= budget
        else:
            assert len(whole) == 1, "a prompt over the budget shares its step with another one"
        assert len(batch.requests) <= min(settings.max_num_seqs, budget)
        assert self.engine.scheduler.num_running <= min(settings.max_num_seqs, budget)

    def check_positions(self, batch: ScheduledBatch, requests: dict[str, Request | None]) -> None:
        """Check that between preemptions every position after the cached prefix is computed exactly once."""
        if not self.engine.kv.keeps_computed_kv:
            assert all(r.num_computed_tokens == 0 for r in batch.requests)
            return
        results = self.engine.last_results
        for scheduled in batch.requests:
            request = requests[scheduled.request_id]
            assert request is not None
            known = self.progress.get(scheduled.request_id)
            if known is None or known.num_preemptions != request.num_preemptions:
                assert scheduled.stroke is Stroke.PREFILL
                assert scheduled.num_computed_tokens % self.engine.layout.block_size == 0
            else:
                assert scheduled.num_computed_tokens == known.next_position
            num_valid = scheduled.num_scheduled_tokens - scheduled.num_draft_tokens
            num_valid += max(0, len(results[scheduled.request_id]) - 1)
            end = scheduled.num_computed_tokens + num_valid
            self.progress[scheduled.request_id] = Progress(request.num_preemptions, end)

    def check_reasons(self, batch: ScheduledBatch, requests: dict[str, Request | None]) -> None:
        """Check that every waiting request has a reason."""
        tenants = {i: request.arrival.tenant for i, request in requests.items() if request is not None}
        assert (batch.wait_reason != "") == (batch.num_waiting > 0), f"{batch}"
        assert batch.limited_by is not Limit.NONE or batch.num_waiting == 0
        assert not set(batch.preempted_request_ids) & {r.request_id for r in batch.requests}
        scheduler = self.engine.scheduler
        assert (batch.head_request_id is None) == (batch.num_waiting == 0)
        assert {r.request_id for r in batch.admitted} <= {r.request_id for r in batch.requests}
        for preemption in batch.preemptions:
            by, taken = preemption.by_request_id, preemption.request_id
            keys = {i: (i in self.engine.background, key) for i, key in self.engine.keys.items()}
            assert keys[by][0] <= keys[taken][0], f"{preemption}: background work took it"
            if self.engine.settings.policy != "fair" or tenants[by] == tenants[taken]:
                assert keys[by] <= keys[taken], f"{preemption}: taken from a more urgent request"
        if not self.engine.latency:
            assert batch.num_waiting + len(self.engine.started_over) == scheduler.num_waiting

    @invariant()
    def holds(self) -> None:
        """Check that every structure is consistent with itself and the others."""
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        """End all requests; every block is freed, and a replay of the log decides the same."""
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        longest = engine.kv.max_model_len
        for _ in range(20 + 4 * longest * (self.num_requests + 1)):
            if not engine.scheduler.has_work:
                break
            self.step()
            engine.scheduler.check_invariants()
        engine.run(max_steps=5)
        assert len(engine.ended) == self.num_requests
        usage = engine.kv.usage()
        assert usage.num_used == 0
        assert usage.num_free + usage.num_cached + usage.num_quarantined == usage.num_blocks
        assert isinstance(engine.log, EventRing)
        events = [from_json(to_json(event)) for event in engine.log]
        assert events == list(engine.log)
        assert replay(events) is None


def decodes_now(request: Request) -> bool:
    """Return whether it runs, its prompt is computed, and its next token is known."""
    return 0 < request.num_prefill_tokens <= request.num_computed_tokens and not waits_for_update(request)


TestScheduler = SchedulerMachine.TestCase


def test_a_scheduler_does_not_look_at_the_dice() -> None:
    """The same calls, the same decisions."""

    def run() -> list[ScheduledBatch]:
        engine = FakeEngine(make_layout((None, 6)), 20, max_model_len=24, max_drafts=2, stop_chance=0.05, seed=3)
        dice = random.Random(5)
        for i in range(12):
            engine.submit(f"r{i}", [dice.randint(0, 2) for _ in range(dice.randint(1, 16))], 8)
            engine.step()
        engine.run()
        return engine.batches

    assert run() == run()
