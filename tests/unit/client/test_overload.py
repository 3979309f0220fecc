"""Admission under overload, on a clock that belongs to the test: the real scheduler runs, every step has a price."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from factories import make_layout
from fakes import FakeEngine
from twostroke.api.admission import MAX_WAIT_FRACTION, QueueLimits, RequestCost, check_overload, predicted_wait_s
from twostroke.batch import ScheduledBatch
from twostroke.client.load import EngineLoad, LoadMeter, StepTimeFit
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter, Overloaded

NUM_SEQS = 8
NUM_OUTPUTS = 20
STEP_S, PREFILL_S_PER_TOKEN = 0.01, 0.0005


def price(batch: ScheduledBatch) -> float:
    return STEP_S + PREFILL_S_PER_TOKEN * batch.num_prefill_tokens


@dataclass
class Shop:
    """An engine whose queue has a door."""

    limits: QueueLimits
    engine: FakeEngine = field(init=False)
    meter: LoadMeter = field(init=False)
    waits: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.meter = LoadMeter(NUM_SEQS, is_fair=False)
        self.engine = FakeEngine(
            make_layout((None,), 16),
            400,
            max_model_len=256,
            scheduler_config=SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=64),
            log=self.meter,
            step_time_s=price,
        )
        self.engine.executor.checks_reads = False
        self.dice = random.Random(1)

    def ask(self, number: int) -> None:
        """Submit a request now."""
        num_prompt_tokens = self.dice.randint(10, 120)
        load = self.meter.load("")
        try:
            check_overload(load, self.limits, RequestCost(1, num_prompt_tokens))
        except Overloaded:
            self.num_refused += 1
            return
        request_id = f"r{number}"
        self.predicted[request_id] = predicted_wait_s(load)
        self.meter.sent(request_id, "", num_tokens=num_prompt_tokens, max_tokens=NUM_OUTPUTS)
        self.engine.submit(request_id, [number] * num_prompt_tokens, NUM_OUTPUTS)

    def serve(self, requests_per_s: float, seconds: float) -> float:
        """Serve an open loop; return the requests that ended per second."""
        number, next_s = 0, 0.0
        arrivals: dict[str, float] = {}
        while self.engine.now_s < seconds:
            while next_s <= self.engine.now_s:
                self.ask(number)
                arrivals[f"r{number}"] = self.engine.now_s
                number += 1
                next_s += self.dice.expovariate(requests_per_s)
            if not self.engine.scheduler.has_work:
                self.engine.now_s = next_s
                continue
            begins_s = self.engine.now_s
            for scheduled in self.engine.step().requests:
                self.waits.setdefault(scheduled.request_id, begins_s - arrivals[scheduled.request_id])
        return len(self.engine.ended) / self.engine.now_s


def limits(max_queue_wait_s: float = 1e9, max_queued_requests: int = 10**9) -> QueueLimits:
    return QueueLimits(max_queued_requests, 10**9, max_queue_wait_s, 10**9)


def test_at_three_times_the_capacity_as_many_are_served_as_at_capacity_and_none_waits_too_long() -> None:
    capacity = Shop(limits()).serve(requests_per_s=60.0, seconds=60.0)
    shop = Shop(limits(max_queue_wait_s=1.0))
    goodput = shop.serve(requests_per_s=3 * capacity, seconds=60.0)
    assert goodput > 0.95 * capacity
    assert shop.num_refused > 0.6 * 3 * capacity * 60
    assert max(shop.waits.values()) < 1.0, "the prediction was far too low"


def test_the_prediction_is_near_what_happens() -> None:
    shop = Shop(limits(max_queue_wait_s=2.0))
    shop.serve(requests_per_s=60.0, seconds=60.0)
    settled = [i for i in shop.waits if int(i[1:]) > 500 and shop.waits[i] > 0.5]
    ratios = sorted(shop.predicted[i] / shop.waits[i] for i in settled)
    assert len(ratios) > 100
    assert 0.7 < ratios[len(ratios) // 20] < ratios[-len(ratios) // 20] < 1.4


def test_the_meter_forgets_everything_that_ended() -> None:
    shop = Shop(limits(max_queue_wait_s=0.5))
    shop.serve(requests_per_s=80.0, seconds=10.0)
    for request_id in list(shop.engine.live):
        shop.engine.abort(request_id)
    load = shop.meter.load("")
    assert (load.num_running, load.num_running_tokens, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0, 0)


def test_preemptions_put_requests_back_into_the_meters_queue() -> None:
    meter = LoadMeter(4, is_fair=False)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    engine = FakeEngine(make_layout((None,), 4), 20, max_model_len=64, scheduler_config=config, log=meter)
    for number in range(3):
        meter.sent(f"r{number}", "", num_tokens=8, max_tokens=40)
        engine.submit(f"r{number}", [number] * 8, 40)
    while engine.scheduler.has_work:
        engine.step()
        load = meter.load("")
        assert (load.num_waiting, load.num_running) == (engine.scheduler.num_waiting, engine.scheduler.num_running)
    assert any(batch.preempted_request_ids for batch in engine.batches)


def test_a_pause_is_no_step() -> None:
    """The last that ran was ended by its caller, in between two steps; the next comes much later."""
    shop = Shop(limits())
    shop.ask(0)
    for _ in range(5):
        shop.engine.step()
    shop.engine.abort("r0")
    while shop.engine.scheduler.has_work:
        shop.engine.step()
    before_s = shop.meter.load("").step_s
    shop.engine.now_s += 1000.0
    shop.ask(1)
    for _ in range(5):
        shop.engine.step()
    assert shop.meter.load("").step_s == pytest.approx(before_s, rel=0.5)


def test_step_times_are_told_apart_by_what_was_prefilled() -> None:
    times = StepTimeFit()
    assert (times.base_s(0.0), times.s_per_unit, times.slope_s) == (0.0, 0.0, None)
    for number in range(50):
        times.add(number % 7, 0.25 + 0.125 * (number % 7))
    assert times.s_per_unit == times.slope_s == pytest.approx(0.125)
    assert times.base_s(times.s_per_unit) == pytest.approx(0.25)


def test_steps_that_are_all_alike_are_taken_for_prefills() -> None:
    times = StepTimeFit()
    times.add(10, 2.0)
    times.add(10, 2.0)
    assert times.s_per_unit == pytest.approx(0.2)
    assert times.base_s(times.s_per_unit) == pytest.approx(0.0)
    assert times.line == (pytest.approx(times.base_s(0.0)), 0.0)
    assert times.slope_s is None, "nothing tells a unit's part from that of the step"


def test_a_full_queue_has_room_for_a_tenant_below_its_share() -> None:
    flooded = {"num_slots": 1, "num_waiting": 10, "num_waiting_tokens": 100, "num_tenants": 2}
    check_overload(EngineLoad(**flooded, num_own_waiting=4), limits(max_queued_requests=10), RequestCost())
    with pytest.raises(Overloaded, match="the queue is full: with this request 11 requests; the limit is 10"):
        check_overload(EngineLoad(**flooded, num_own_waiting=5), limits(max_queued_requests=10), RequestCost())


def test_a_deadline_of_the_callers_counts_until_the_first_token() -> None:
    load = EngineLoad(num_slots=4, step_s=0.5, prefill_s_per_token=0.01)
    cost = RequestCost(1, 100)
    check_overload(load, limits(), cost, deadline_s=1.6 / MAX_WAIT_FRACTION)
    with pytest.raises(Overloaded, match=r"its first token would come after about 1\.5 s") as refused:
        check_overload(load, limits(), cost, deadline_s=1.4 / MAX_WAIT_FRACTION)
    assert refused.value.retry_after_s == 1


@pytest.mark.parametrize(
    ("cost", "name"),
    [
        (RequestCost(11, 1), "prompt"),
        (RequestCost(11, 1, field="n"), "n"),
        (RequestCost(1, 101), "prompt"),
        (RequestCost(1, 1, 1001), "max_tokens"),
        (RequestCost(1, 1, 1001, ("logprobs", 5)), "logprobs"),
        (RequestCost(1, 1, 1001, ("prompt_logprobs", 0)), "prompt_logprobs"),
    ],
)
def test_what_never_fits_is_the_callers_mistake(cost: RequestCost, name: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        cost.check_fits_empty_queue(QueueLimits(10, 100, 1.0, 1000))
    assert refused.value.name == name
    assert ("log-probabilities" in str(refused.value)) == name.endswith("logprobs")
