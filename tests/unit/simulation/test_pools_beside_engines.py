"""Two pools in simulated time beside the same pools of real engines, token by token.

The engines are those of tests/fake_pools.py: dispatcher, schedulers, leases and both ends of hand-overs are real, the
device checks every read. All steps take a second, all requests come at whole seconds, and the link takes no time: so
both worlds can be driven by seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from factories import uniform_layout
from fake_pools import FakePools, FakeTransfer
from tiers import examples
from twostroke.batch import NewRequest
from twostroke.cluster.dispatcher import DispatchResult
from twostroke.cluster.routed_placer import Place, ReadyWorker
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.engine.generation import GenerationRequest
from twostroke.event_codec import plain
from twostroke.events import EngineStarted
from twostroke.kv_cache.prefix_cache import hash_blocks
from twostroke.request import Arrival, FinishReason
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.replay import layout_of
from twostroke.simulation.pools import PoolSimulation, SimulatedPools
from twostroke.simulation.requests import SimulatedRequest

SECOND = StepTimeModel(layers=Curve((1,), (1.0,)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
BLOCK = 4
FIRST_S = 16
"""From then on a link of 1e18 bytes/s adds nothing to a float."""


@dataclass(frozen=True)
class Asked:
    """A request of a second."""

    name: str
    at_s: int
    prompt: tuple[int, ...]
    num_outputs: int
    stops: bool = False
    """With its last token, before its limit."""
    gone_s: int | None = None
    """When its caller goes, for good."""

    @property
    def max_tokens(self) -> int:
        return 22 if self.stops or self.gone_s is not None else self.num_outputs


def started(windows: Sequence[int | None], num_blocks: int, **scheduler: int) -> EngineStarted:
    layout = uniform_layout(windows, block_size=BLOCK, num_kv_heads=1, head_dim=2, kv_format="f32")
    cache = CacheConfig(block_size=BLOCK, num_kv_blocks=num_blocks)
    return EngineStarted(
        0.0, "simulated", plain(SchedulerConfig(**scheduler)), plain(cache), plain(layout), num_blocks, 64, "none"
    )


class SecondBySecond(FakePools):
    """Pools whose wire runs between steps only, and takes no time."""

    def in_the_middle(self) -> None:
        pass

    def carry(self) -> bool:
        """Carry all bytes that can arrive, and end leases; return whether anything has ended."""
        # of transfers that end at the same time the simulation reports the failed ones first
        transfers = sorted(self.transfers(), key=lambda transfer: not _fails(transfer))
        for transfer in transfers:
            for _ in range(200):
                transfer.advance()
        for worker in self.workers:
            worker.reap()
        return any(transfer.is_over for transfer in transfers)

    def settle(self) -> None:
        """Deliver all messages and bytes in flight."""
        is_busy = True
        while is_busy:
            is_busy = self.carry()
            for worker in self.workers:
                while worker.commands:
                    worker.obey()
                    is_busy = True

    def run(self, asked: Sequence[Asked]) -> dict[str, list[int]]:
        """Return the times of each request's tokens."""
        times: dict[str, list[int]] = {one.name: [] for one in asked}
        by_themselves = {one.name for one in asked if one.gone_s is None}
        last_s = max((one.gone_s for one in asked if one.gone_s is not None), default=0)
        while not by_themselves <= self.ended or self.now_s < last_s:
            self.now_s += 1
            for worker in self.workers:
                while worker.said:
                    self.hear(worker)
            for name, made in self.tokens.items():
                times[name] += [self.now_s] * (len(made) - len(times[name]))
            self.carry()
            self._say(asked)
            self.settle()
            for worker in self.workers:
                if worker.engine.has_work:
                    self.now_s += 1  # its reports are sent when the step has ended
                    worker.said.append(tuple(worker.engine.step()))
                    self.now_s -= 1
        return times

    def _say(self, asked: Sequence[Asked]) -> None:
        """Send the requests that are due, and abort others."""
        for one in asked:
            if one.at_s == self.now_s:
                self.tokens[one.name] = []
                self.carry_out(self.dispatcher.add(self._request(one)))
        for one in asked:
            if one.gone_s == self.now_s:
                self.carry_out(self.dispatcher.finish(one.name, FinishReason.ABORT))

    def _request(self, one: Asked) -> GenerationRequest:
        stops = one.stops and one.gone_s is None
        ends = {"min_tokens": one.num_outputs - 1, "stop_token_ids": tuple(range(5))} if stops else {}
        params = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True, **ends)
        return GenerationRequest(NewRequest(one.name, one.prompt, params, 0), float(one.at_s), one.max_tokens)


def _fails(transfer: FakeTransfer) -> bool:
    return transfer.is_given_up or (transfer.lease is not None and bool(transfer.lease.failure))


class Recorded(PoolSimulation):
    """Remembers where requests went."""

    def __init__(self, *given: object) -> None:
        self.places: dict[str, Place] = {}
        super().__init__(*given)

    def _apply(self, outcome: DispatchResult) -> None:
        self.places |= outcome.placed
        super()._apply(outcome)


@dataclass
class LikeThere:
    """Puts requests where the simulation did."""

    places: Mapping[str, Place]
    names: Mapping[str | None, str | None]

    def place(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        members: Sequence[ReadyWorker],
        num_live: Callable[[str], int],
    ) -> Place:
        del token_ids, members, num_live
        there = self.places[request.request_id]
        return Place(self.names[there.decode] or "", self.names[there.prefill])


def simulated(
    engine: EngineStarted, asked: Sequence[Asked], pools: SimulatedPools
) -> tuple[dict[str, list[float]], Recorded]:
    requests = []
    for one in asked:
        names = hash_blocks(one.prompt, BLOCK)
        arrival = Arrival(one.name, one.at_s, len(one.prompt), one.max_tokens, block_hashes=names)
        if one.gone_s is not None:
            requests.append(SimulatedRequest(arrival, 0, FinishReason.ABORT, ended_after_s=one.gone_s - one.at_s))
        else:
            reason = FinishReason.STOP if one.stops else FinishReason.LENGTH
            requests.append(SimulatedRequest(arrival, one.num_outputs, reason))
    simulation = Recorded(engine, SECOND, pools)
    run = simulation.run(requests)
    return {request.request_id: request.times.token_times_s for request in run.requests}, simulation


def check_alike(engine: EngineStarted, asked: Sequence[Asked], pools: SimulatedPools) -> Recorded:
    """Check that both worlds make every request's tokens at the same times."""
    times, simulation = simulated(engine, asked, pools)
    numbers = range(1, pools.prefill + pools.decode + 1)
    here = [f"prefill-{i}" for i in range(pools.prefill)] + [f"decode-{i}" for i in range(pools.decode)]
    names = {name: f"{name.split('-')[0]}.{number}" for name, number in zip(here, numbers, strict=True)}
    engines = SecondBySecond(
        random.Random(0),
        LikeThere(simulation.places, {**names, None: None}),
        layout=layout_of(engine.layout),
        num_blocks=engine.num_blocks,
        max_model_len=engine.max_model_len,
        scheduler=SchedulerConfig(**engine.scheduler),
        num_prefill=pools.prefill,
        num_decode=pools.decode,
    )
    engines.now_s = FIRST_S - 1
    found = engines.run(asked)
    for one in asked:
        until_s = one.gone_s or float("inf")
        assert [time_s for time_s in times.get(one.name, []) if time_s <= until_s] == found[one.name], one
    return simulation


def prompt(number: int, num_tokens: int, num_shared: int = 0) -> tuple[int, ...]:
    """Return a prompt whose tokens are never generated."""
    return tuple(range(10, 10 + num_shared)) + tuple(range(1000 * number, 1000 * number + num_tokens - num_shared))


EAGER = SimulatedPools(prefill=1, decode=1, link_bytes_per_s=1e18, tpot_target_s=1e-4)


def test_a_prefix_without_room_waits_until_nobody_runs() -> None:
    """Blocks for the longest request alone: nothing may ever be held beside it, and nobody tells the request so."""
    engine = started((None, None), 16, max_num_batched_tokens=8)
    asked = [Asked("a", FIRST_S, prompt(1, 1), 20), Asked("b", FIRST_S + 2, prompt(2, 8), 3)]
    simulation = check_alike(engine, asked, EAGER)
    assert simulation.hand_overs.num_requests == 1
    assert simulation.hand_overs.num_fetched == 0


def test_blocks_that_nobody_fetches_stay_on_loan_until_their_time_is_over() -> None:
    """b stops at its first token, so its fetched prefix is dropped; until its lease ends, c finds no room to lend."""
    engine = started((None, None), 20, max_num_batched_tokens=64)
    asked = [
        Asked("a", FIRST_S, prompt(1, 1), 29),
        Asked("b", FIRST_S + 1, prompt(2, 16), 1, stops=True),
        Asked("c", FIRST_S + 3, prompt(3, 16), 3),
        Asked("d", FIRST_S + 14, prompt(4, 16), 3),
    ]
    simulation = check_alike(engine, asked, EAGER)
    assert simulation.hand_overs.num_requests == 3


@settings(deadline=None, max_examples=examples(150))
@given(
    workload=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 20),
            st.integers(0, 20),
            st.integers(0, 9),
            st.booleans(),
            st.integers(0, 20),
        ),
        min_size=1,
        max_size=12,
    ),
    prefill=st.integers(1, 2),
    decode=st.integers(1, 2),
    num_blocks=st.sampled_from([16, 20, 32, 90]),
    budget=st.sampled_from([4, 8, 64]),
    slots=st.sampled_from([1, 3, 8]),
    is_whole=st.booleans(),
)
def test_whatever_is_asked(
    workload: list[tuple[int, int, int, int, bool, int]],
    prefill: int,
    decode: int,
    num_blocks: int,
    budget: int,
    slots: int,
    is_whole: bool,
) -> None:
    asked = [
        Asked(
            f"r{i}",
            FIRST_S + at_s,
            prompt(i + 1, num_prompt, min(num_shared * BLOCK, num_prompt - 1)),  # equal ones have equal outputs
            num_outputs,
            stops,
            gone_s=FIRST_S + at_s + after_s if 0 < after_s < 4 else None,
        )
        for i, (num_prompt, num_outputs, at_s, num_shared, stops, after_s) in enumerate(workload)
    ]
    windows = (None, None) if is_whole else (None, 6)
    layout = uniform_layout(windows, block_size=BLOCK, num_kv_heads=1, head_dim=2, kv_format="f32")
    least = layout.peak_blocks(64, min(64, budget))
    engine = started(windows, least + num_blocks - 16, max_num_batched_tokens=budget, max_num_seqs=slots)
    pools = SimulatedPools(prefill=prefill, decode=decode, link_bytes_per_s=1e18, tpot_target_s=1e-4)
    check_alike(engine, asked, pools).check_invariants(is_over=True)
