"""What workers report, as sizes of the pools: each by its own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from factories import make_facts
from twostroke.config.pools import PoolConfig
from twostroke.engine.load import Load
from twostroke.engine.pool_scaling import PoolScaling, WorkerFigures, limits_of
from twostroke.errors import InvalidParameter
from twostroke.pools.member import Role

LIMITS = limits_of(PoolConfig(prefill=1, decode=1, max_prefill=8, max_decode=8, tpot_target_s=0.05, ttft_target_s=1.0))


PREFILL = WorkerFigures("p0", Role.PREFILL, 0, Load(8, prefill_s_per_token=0.001), make_facts())
DECODE = WorkerFigures("d0", Role.DECODE, 0, Load(8, decode_step_s=0.03, step_s_per_sequence=0.001), make_facts(), 100)


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


def test_a_pool_whose_workers_all_start_is_left_alone() -> None:
    starting = WorkerFigures("d0", Role.DECODE, 3)
    assert Role.DECODE not in PoolScaling(LIMITS).decide([PREFILL, starting], 2.0)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"max_decode": 2}, "max_decode=2: is for a pool that has a process to begin with"),
        ({"decode": 3, "max_decode": 2}, "max_decode=2: must be at least decode, 3"),
        ({"decode": 1, "max_prefill": 2}, "max_prefill=2: is for a pool"),
        ({"decode": 1, "scaling_interval_s": 1.0}, "scaling_interval_s=1.0: needs pools that change"),
        ({"decode": 1, "max_decode": 2, "ttft_target_s": 2.0}, "ttft_target_s=2.0: is what prefill processes"),
        ({"tpot_target_s": 0.1}, "tpot_target_s=0.1: needs more than one process"),
        ({"decode": 1, "max_decode": 2, "scaling_interval_s": 0.0}, "scaling_interval_s=0.0: must be more than 0"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(given: dict[str, float], what: str) -> None:
    with pytest.raises(InvalidParameter, match=what):
        PoolConfig(**given)  # type: ignore[arg-type]
