"""The fair policy: what tenants are served, what a flood costs the others, and what it cannot do."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from factories import make_layout
from fakes import FakeEngine
from tiers import examples
from twostroke.batch import Stroke
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import Policy, SchedulerConfig

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


def make_engine(
    policy: Policy = "fair", *, num_seqs: int = 6, budget: int = 16, num_blocks: int = 120, seed: int = 0
) -> FakeEngine:
    engine = FakeEngine(
        make_layout((None,), BLOCK_SIZE),
        num_blocks,
        max_model_len=MAX_MODEL_LEN,
        scheduler_config=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget, policy=policy),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        seed=seed,
    )
    engine.executor.checks_reads = False
    return engine


class Service:
    """Service that each tenant received, by the policy's weights: prompts when first computed, outputs as they come."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.served = {"a": 0.0, "b": 0.0}
        self._begun: set[str] = set()

    def step(self) -> None:
        batch = self.engine.step()
        for scheduled in batch.requests:
            tenant = self.engine.tenants[scheduled.request_id]
            if scheduled.request_id not in self._begun:
                self._begun.add(scheduled.request_id)
                self.served[tenant] += self.engine.executor.generations[scheduled.request_id].num_prompt_tokens
            self.served[tenant] += 2.0 * len(self.engine.last_results[scheduled.request_id])


@given(
    seed=st.integers(0, 10_000),
    prompts=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    outputs=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    num_seqs=st.integers(1, 8),
    num_blocks=st.sampled_from([16, 40, 120]),
)
@settings(deadline=None, max_examples=examples(30))
def test_two_tenants_that_never_run_out_are_served_alike(
    seed: int, prompts: tuple[int, int], outputs: tuple[int, int], num_seqs: int, num_blocks: int
) -> None:
    engine = make_engine(num_seqs=num_seqs, num_blocks=num_blocks)
    service = Service(engine)
    dice = random.Random(seed)
    number = 0
    bound = 2 * max(30, 2.0 * num_blocks * BLOCK_SIZE)
    assert bound < 2000
    for step in range(400):
        for tenant, num_prompt, num_output in zip("ab", prompts, outputs, strict=True):
            # one of them asks for far more at once
            depth = 40 if tenant == "a" else num_seqs + 1
            while sum(engine.tenants[i] == tenant for i in engine.live) < depth:
                length, max_tokens = dice.randint(1, num_prompt), dice.randint(1, num_output)
                engine.submit(f"r{number}", [number] * length, max_tokens, tenant=tenant)
                number += 1
        service.step()
        assert abs(service.served["a"] - service.served["b"]) <= bound, f"step {step}: {service.served}"
    assert min(service.served.values()) > 0


def ttfts_of_b(
    policy: Policy, *, num_of_a: int, prompt_of_a: int, output_of_a: int, num_of_b: int = 60, seed: int = 1
) -> list[float]:
    """Tenant b asks for one thing at a time while a keeps a queue; work from b's arrivals to their first tokens.

    Work is what a step costs where the machine is: 2 for being a step, 1 for each token in it. The step in which
    b asks is already under way, and counts.
    """
    engine = make_engine(policy, num_seqs=16, budget=64, num_blocks=400)
    dice = random.Random(seed)
    ttfts: list[float] = []
    number = 0
    for _ in range(num_of_b):
        for _ in range(dice.randint(0, 20)):
            number = flood(engine, number, num_of_a, prompt_of_a, output_of_a, dice)
            engine.step()
        # the arrival is within a step, which lasts for part of its time
        under_way = work(engine.batches[-1].num_tokens) * dice.random() if engine.live else 0.0
        name = f"b{len(ttfts)}"
        engine.submit(name, [9] * 40, 4, tenant="b")
        spent = under_way
        while not (engine.last_results.get(name) and engine.batches[-1].requests):
            number = flood(engine, number, num_of_a, prompt_of_a, output_of_a, dice)
            spent += work(engine.step().num_tokens)
        ttfts.append(spent)
        while name in engine.live:
            engine.step()
    return sorted(ttfts)


def work(num_tokens: int) -> float:
    return 2.0 + num_tokens


def flood(engine: FakeEngine, number: int, depth: int, num_prompt: int, num_output: int, dice: random.Random) -> int:
    while sum(engine.tenants[i] == "a" for i in engine.live) < depth:
        length = dice.randint(1, num_prompt)
        engine.submit(f"a{number}", [number] * length, dice.randint(1, num_output), tenant="a")
        number += 1
    return number


@pytest.mark.parametrize(("prompt_of_a", "output_of_a"), [(8, 40), (20, 20), (4, 60)])
def test_a_flood_of_one_tenant_at_most_doubles_the_others_time_to_first_token(
    prompt_of_a: int, output_of_a: int
) -> None:
    alone = ttfts_of_b("fair", num_of_a=0, prompt_of_a=1, output_of_a=1)
    flooded = ttfts_of_b("fair", num_of_a=100, prompt_of_a=prompt_of_a, output_of_a=output_of_a)
    # the half of these is compared, for which few will do
    without = ttfts_of_b("fcfs", num_of_a=100, prompt_of_a=prompt_of_a, output_of_a=output_of_a, num_of_b=15)
    assert flooded[-1] <= 2 * alone[-1] + 64 + 2  # what is under way when b asks cannot be undone
    assert without[len(without) // 2] > 4 * alone[-1], "the flood is none"


def test_a_long_prompt_under_way_lets_a_newcomer_pass() -> None:
    engine = make_engine(budget=16)
    engine.submit("a0", [1] * 60, 4, tenant="a")
    engine.submit("a1", [2] * 60, 4, tenant="a")
    engine.step()
    engine.submit("b0", [3] * 10, 4, tenant="b")
    batch = engine.step()
    assert [r.request_id for r in batch.requests][:1] == ["b0"]
    assert batch.num_tokens == 16, "what b leaves goes to the prompt under way"


def test_who_is_displaced_does_not_displace_back() -> None:
    engine = make_engine(num_seqs=4)
    for number in range(8):
        engine.submit(f"a{number}", [number] * 4, 40, tenant="a")
    for _ in range(4):
        engine.step()
    engine.submit("b0", [9] * 4, 40, tenant="b")
    engine.submit("b1", [9] * 4, 40, tenant="b")
    engine.submit("b2", [9] * 4, 40, tenant="b")
    batches = [engine.step() for _ in range(20)]
    displaced = [i for batch in batches for i in batch.preempted_request_ids]
    assert displaced == ["a3", "a2"], "two slots each, then no request is displaced any more"
    running = {r.request_id for r in batches[-1].requests if r.stroke is Stroke.DECODE}
    assert running == {"a0", "a1", "b0", "b1"}


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    """While b was away a was served ten times; from now on they take turns."""
    engine = make_engine(num_seqs=1)
    for number in range(20):
        engine.submit(f"a{number}", [1] * 4, 2, tenant="a")
    for _ in range(20):
        engine.step()
    for number in range(20):
        engine.submit(f"b{number}", [2] * 4, 2, tenant="b")
    engine.batches.clear()
    for _ in range(24):
        engine.step()
    firsts = [r.request_id[0] for batch in engine.batches for r in batch.requests if r.stroke is Stroke.PREFILL]
    assert sorted(firsts[:10]) in (["a"] * 5 + ["b"] * 5, ["a"] * 4 + ["b"] * 6, ["a"] * 6 + ["b"] * 4), firsts
