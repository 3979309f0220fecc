"""Workers' reports determine the sizes of pools, each from its own figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from factories import make_facts
from twostroke.client.load import EngineLoad, StepTimeFit
from twostroke.cluster.pool_scaling import ObservedLoad, PoolScaling, WorkerFigures, limits_of
from twostroke.config.pools import PoolConfig
from twostroke.errors import InvalidParameter
from twostroke.pools.member import Role

LIMITS = limits_of(PoolConfig(prefill=1, decode=1, max_prefill=8, max_decode=8, tpot_target_s=0.05, ttft_target_s=1.0))


PREFILL = WorkerFigures("p0", Role.PREFILL, 0, EngineLoad(8, prefill_s_per_token=0.001), make_facts())
DECODE = WorkerFigures(
    "d0", Role.DECODE, 0, EngineLoad(8, decode_step_s=0.03, step_s_per_sequence=0.001), make_facts(), 100
)


def test_a_pool_that_has_no_most_keeps_its_size() -> None:
    assert limits_of(PoolConfig(prefill=1, decode=2)) == {}
    assert set(limits_of(PoolConfig(prefill=1, decode=2, max_decode=3))) == {Role.DECODE}
    assert not PoolScaling({}).is_wanted


def test_prompts_add_prefill_workers_and_nobody_else() -> None:
    scaling = PoolScaling(LIMITS)
    scaling.arrived(4000)
    decisions = scaling.decide([PREFILL, DECODE], 2.0)
    assert decisions[Role.PREFILL].num_wanted == 3, "2,000 tokens a second at 1,000 a second each, not over 80 % busy"
    assert decisions[Role.DECODE].num_wanted == 1
    assert decisions[Role.PREFILL].words == "up: arriving prompt tokens keep 2.0 members busy"
    quiet = scaling.decide([PREFILL, DECODE], 2.0)
    assert quiet[Role.PREFILL].need == 0, "an interval counts what came in it"


def test_streams_add_decode_workers_and_nobody_else() -> None:
    decisions = PoolScaling(LIMITS).decide([PREFILL, replace(DECODE, num_live=50)], 2.0)
    assert decisions[Role.DECODE].need == pytest.approx(2.5), "20 streams keep the target at one"
    assert decisions[Role.DECODE].num_wanted == 4
    assert decisions[Role.PREFILL].num_wanted == 1


def test_full_caches_add_decode_workers() -> None:
    decisions = PoolScaling(LIMITS).decide([replace(DECODE, num_live=2, num_free_blocks=5)], 2.0)
    assert decisions[Role.DECODE].limited_by == "KV blocks"
    assert decisions[Role.DECODE].num_wanted == 2


def observed() -> ObservedLoad:
    """Return the load of a minute with 6,000 prompt tokens and 600 output tokens."""
    load = ObservedLoad(tpot_target_s=0.05)
    for worker in (PREFILL, DECODE):
        load.joined(worker.role, 64)
    for second in range(61):
        load.saw(float(second), num_prompt_tokens=100, num_output_tokens=10)
    return load


def test_the_ratio_is_what_the_workers_of_each_pool_measured() -> None:
    tails = EngineLoad(8, prefill_s_per_token=1e-9, decode_step_s=0.03, step_s_per_sequence=0.001)
    ratio = observed().suggested([PREFILL, replace(DECODE, load=tails)], 60.0)
    assert ratio is not None
    assert ratio.prefill_tokens_per_s == pytest.approx(1000), "last blocks at a decode worker say nothing of prompts"
    assert ratio.num_prefill == pytest.approx(6100 / 60 / 1000)


def test_a_load_is_not_forgotten_with_the_worker_that_measured_it() -> None:
    """The worker leaves when its pool shrinks, or dies; the remaining ones have not measured anything yet."""
    load, idle = observed(), EngineLoad(8)
    before = load.suggested([PREFILL, DECODE], 60.0)
    assert before is not None
    for worker in (PREFILL, DECODE):
        assert worker.load is not None
        load.left(worker.role, worker.load)
        load.left(worker.role, idle)  # and another that has measured nothing
    assert load.suggested([replace(PREFILL, load=idle), replace(DECODE, load=idle)], 60.0) == before
    assert load.suggested([replace(PREFILL, load=None), replace(DECODE, load=None, facts=None)], 60.0) == before
    slower = EngineLoad(8, prefill_s_per_token=0.002)
    ratio = load.suggested([replace(PREFILL, load=slower), replace(DECODE, load=idle)], 60.0)
    assert ratio is not None
    assert ratio.num_prefill == pytest.approx(2 * before.num_prefill), "its own figures come first"
    assert load.suggested([PREFILL, DECODE], 121.0) is None, "the last minute has no load"


@pytest.mark.parametrize(
    "step_s", [lambda n: 1e-6 * n**2, lambda n: 0.001 * n, lambda n: 0.02, lambda n: 0.03 + 0.001 * n]
)
def test_steps_of_any_shape_count_as_measured(step_s: Callable[[int], float]) -> None:
    """An unconstrained line through steps that take ever longer would begin below 0; here it begins at 0."""
    times = StepTimeFit()
    for number in (1, 2, 4, 8, 16, 32):
        times.add(number, step_s(number))
    base_s, slope_s = times.line
    assert min(base_s, slope_s) >= 0
    decoding = EngineLoad(8, decode_step_s=base_s, step_s_per_sequence=slope_s)
    assert decoding.has_decoded
    assert observed().suggested([PREFILL, replace(DECODE, load=decoding)], 60.0) is not None
    assert PoolScaling(LIMITS).decide([PREFILL, replace(DECODE, load=decoding)], 2.0)[Role.DECODE].need is not None


def test_prompts_that_take_the_same_time_whatever_their_length_have_a_speed() -> None:
    times = StepTimeFit()
    for num_tokens, time_s in ((100, 0.11), (101, 0.10), (102, 0.09)):
        times.add(num_tokens, time_s)
    assert times.slope_s == 0
    assert 1 / times.s_per_unit == pytest.approx(1000, rel=0.1)


def test_a_pool_whose_workers_all_start_is_left_alone() -> None:
    starting = WorkerFigures("d0", Role.DECODE, 3)
    assert Role.DECODE not in PoolScaling(LIMITS).decide([PREFILL, starting], 2.0)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"max_decode": 2}, "max_decode=2: needs a pool with at least one process"),
        ({"decode": 3, "max_decode": 2}, "max_decode=2: must be at least decode, 3"),
        ({"decode": 1, "max_prefill": 2}, "max_prefill=2: needs a pool"),
        ({"decode": 1, "scaling_interval_s": 1.0}, "scaling_interval_s=1.0: needs pools of variable size"),
        ({"decode": 1, "max_decode": 2, "ttft_target_s": 2.0}, "ttft_target_s=2.0: is the target for adding prefill"),
        ({"tpot_target_s": 0.1}, "tpot_target_s=0.1: needs more than one process"),
        ({"decode": 1, "max_decode": 2, "scaling_interval_s": 0.0}, "scaling_interval_s=0.0: must be more than 0"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(given: dict[str, float], what: str) -> None:
    with pytest.raises(InvalidParameter, match=what):
        PoolConfig(**given)  # type: ignore[arg-type]
