"""Background work in simulated time: what it takes, and what the others do not notice of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import make_arrival, make_kv
from tiers import examples
from twostroke.batch import Commit
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.measure.report import percentiles
from twostroke.request import RequestStatus
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import Run
from twostroke.simulation.requests import SimulatedRequest
from twostroke.simulation.simulate import Simulation

MACHINE = StepTimeModel(
    layers=Curve((1, 16, 512), (0.004, 0.006, 0.160)), head=Curve((1, 64), (0.0005, 0.002)), pair_s=1e-9, seen_s=1e-9
)
LAYERS = Layers([None] * 4)
LONG = 2048


def scheduler_of(num_blocks: int = 4000, *, is_timed: bool = True, **given: object) -> Scheduler:
    kv = make_kv(num_blocks, block_size=16, max_model_len=LONG, enable_prefix_caching=False)
    step_times = MACHINE if is_timed else None
    return Scheduler(SchedulerConfig(**given), kv, max_model_len=LONG, step_times=step_times, layers=LAYERS)


def served(requests: list[SimulatedRequest], num_blocks: int = 4000, **given: object) -> Run:
    simulation = Simulation(scheduler_of(num_blocks, **given), LAYERS, MACHINE, block_size=16, hashes_blocks=False)
    return simulation.run(requests)


def interactive(count: int, every_s: float, num_prompt: int = 1024, num_outputs: int = 20) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(make_arrival(f"i{i}", num_prompt, num_outputs, arrival_time_s=i * every_s), num_outputs)
        for i in range(count)
    ]


def background(count: int, num_prompt: int = 100, num_outputs: int = 60) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(make_arrival(f"b{i}", num_prompt, num_outputs, background=True), num_outputs)
        for i in range(count)
    ]


def ttfts(run: Run) -> list[float]:
    return [r.times.ttft_s for r in run.requests if r.request_id.startswith("i")]


def gaps(run: Run) -> list[float]:
    return [gap for r in run.requests if r.request_id.startswith("i") for gap in r.times.itl_s]


@pytest.mark.parametrize("every_s", [0.5, 0.8, 2.0])
def test_interactive_requests_are_as_fast_as_alone_and_background_work_takes_the_idle_time(every_s: float) -> None:
    count = 40
    alone = served(interactive(count, every_s), max_num_seqs=32)
    beside = served([*interactive(count, every_s), *background(int(20 * count * every_s))], max_num_seqs=32)
    for of, name in ((ttfts, "TTFT"), (gaps, "ITL")):
        was, is_now = (percentiles(of(run))["p99"] for run in (alone, beside))
        assert is_now <= 1.10 * was, f"p99 {name}: {was} alone, {is_now} beside background work"

    last_s = (count - 1) * every_s
    busy_s = sum(step.wall_s for step in alone.steps) * (count - 1) / count
    made = [at for r in beside.requests if r.request_id.startswith("b") for at in r.times.token_times_s]
    assert max(made) > last_s, "there was always some left"
    nobody_else = served([SimulatedRequest(make_arrival(f"{i}", 100, 60), 60) for i in range(200)], max_num_seqs=32)
    rate = nobody_else.num_output_tokens / nobody_else.duration_s
    share = sum(at <= last_s for at in made) / (rate * (last_s - busy_s))
    assert share >= 0.8, f"{share:.2f} of what the idle time is worth"
    assert 0.2 < busy_s / last_s < 0.9


@settings(max_examples=examples(40), deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 1500), st.integers(1, 40)), min_size=1, max_size=8),
    num_background=st.integers(1, 30),
    slowdown=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_no_step_of_others_is_longer_than_by_the_share(
    arrivals: list[tuple[float, int, int]], num_background: int, slowdown: float
) -> None:
    """All of the background work is done at the end."""
    requests = [
        SimulatedRequest(make_arrival(f"i{i}", prompt, out, arrival_time_s=at), out)
        for i, (at, prompt, out) in enumerate(arrivals)
    ]
    scheduler = scheduler_of(flex_slowdown=slowdown)
    is_background = {f"b{i}" for i in range(num_background)}
    shares: list[tuple[float, float]] = []
    decide = scheduler.schedule

    def watched(now_s: float) -> object:
        batch = decide(now_s)
        own = [r for r in batch.requests if r.request_id not in is_background]
        if own:
            shares.append(
                (MACHINE.seconds(LAYERS.work_of_shares(own)), MACHINE.seconds(LAYERS.work_of_shares(batch.requests)))
            )
        return batch

    scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    run = Simulation(scheduler, LAYERS, MACHINE, block_size=16, hashes_blocks=False).run(
        [*requests, *background(num_background)]
    )
    assert len(run.requests) == len(arrivals) + num_background
    assert all(whole <= (1 + slowdown) * own + 1e-9 for own, whole in shares)


def commit_all(scheduler: Scheduler, now_s: float) -> list[str]:
    """Commit one step, with whatever requests it had."""
    batch = scheduler.schedule(now_s)
    scheduler.update(batch.step, [Commit(r.request_id, int(r.samples_token)) for r in batch.requests])
    return [r.request_id for r in batch.requests]


def test_slots_and_blocks_go_to_whoever_is_not_background() -> None:
    scheduler = scheduler_of(130, max_num_seqs=4, is_timed=False)
    for i in range(4):
        scheduler.add_request(make_arrival(f"b{i}", 400, 40, background=True))
    for step in range(8):
        commit_all(scheduler, step)
    assert scheduler.num_running == 4
    scheduler.add_request(make_arrival("i0", 1200, 4))
    assert commit_all(scheduler, 8.0)[0] == "i0", "in the very next step"
    states = [scheduler.get(f"b{i}").status for i in range(4)]
    assert states[0] is RequestStatus.RUNNING, "the first of them goes on"
    assert states[-1] is RequestStatus.PREEMPTED, "the last makes room"
    scheduler.check_invariants()


def test_background_work_never_takes_from_others() -> None:
    scheduler = scheduler_of(130, max_num_seqs=4, is_timed=False)
    for i in range(4):
        scheduler.add_request(make_arrival(f"i{i}", 400, 100))
    for step in range(6):
        commit_all(scheduler, step)
    scheduler.add_request(make_arrival("b0", 1000, 4, background=True))
    scheduler.add_request(make_arrival("i4", 10, 4))
    for step in range(20):
        assert "b0" not in commit_all(scheduler, 6.0 + step)
    assert all(scheduler.get(f"i{i}").num_preemptions == 0 for i in range(4))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_each_tier_keeps_the_order_of_the_policy(policy: str) -> None:
    scheduler = scheduler_of(max_num_seqs=1, is_timed=False, policy=policy)
    names = [("b0", True), ("i0", False), ("b1", True), ("i1", False)]
    for at, (name, is_background) in enumerate(names):
        scheduler.add_request(make_arrival(name, 8, 1, arrival_time_s=float(at), background=is_background))
    ran: list[str] = []
    while scheduler.has_work:
        batch = scheduler.schedule(0.0)
        ran += [r.request_id for r in batch.requests]
        commits = [Commit(r.request_id, 1, finish_reason="length") for r in batch.requests]
        scheduler.update(batch.step, commits)
    assert ran == ["i0", "i1", "b0", "b1"]


@pytest.mark.parametrize("value", [-0.1, 11, "a lot", True])
def test_a_share_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(InvalidParameter, match="flex_slowdown"):
        SchedulerConfig(flex_slowdown=value)  # type: ignore[arg-type]
