"""Hand-overs under deaths, false deaths, cancels, expiries and retries in any order.

Everything that decides is real (dispatcher, engines, schedulers, KV accounts, lease books); the device checks every
read, so a stale byte, a block with two owners or a block that was freed too early shows at once.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from factories import make_layout
from fake_pools import FakePools, FakeWorker
from fakes import FakeGeneration
from twostroke.batch import NewRequest
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.scheduler import SchedulerConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.event_codec import from_json, to_json
from twostroke.events import StepScheduled
from twostroke.kv_transfer.leases import LEASE_S
from twostroke.pools.member import Role
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.replay import replay

SEEDS = st.integers(0, 2**32 - 1)


class HandoverMachine(RuleBasedStateMachine):
    """Drives FakePools."""

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        windows = dice.choice([[None], [None, None], [6], [None, None, 6], [None, 3, 9]])
        layout = make_layout(windows, dice.choice([1, 2, 4]))
        max_model_len = 40
        scheduler = SchedulerConfig(
            max_num_batched_tokens=dice.choice([4, 8, 64]),
            max_num_seqs=dice.choice([1, 3, 8]),
            policy=dice.choice(["fcfs", "fair"]),  # which preempts a prompt for another tenant's
        )
        step = min(max_model_len, scheduler.max_num_batched_tokens)
        least = layout.peak_blocks(max_model_len, step)
        self.pools = FakePools(
            dice,
            LeastBusy(),
            layout=layout,
            num_blocks=least + dice.choice([0, 2, least // 2, 2 * least]),
            max_model_len=max_model_len,
            scheduler=scheduler,
            num_prefill=dice.choice([0, 1, 1, 2]),
            num_decode=dice.choice([1, 2]),
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.cancelled: set[str] = set()

    @rule(seed=SEEDS, number=st.sampled_from([1, 1, 4]))
    def ask(self, seed: int, number: int) -> None:
        """Submit requests whose prompts share prefixes, or evict each other's."""
        dice = random.Random(seed)
        for _ in range(number):
            self._ask(dice)

    def _ask(self, dice: random.Random) -> None:
        name = f"r{len(self.requests)}"
        words = dice.choice([[1, 1, 1, 2], range(9)])
        prompt = tuple(dice.choice(words) for _ in range(dice.choice([1, 7, 16, 25])))
        params = SamplingParams(max_tokens=dice.choice([1, 2, 5, 14]))
        request = GenerationRequest(
            NewRequest(name, prompt, params, 0),
            self.pools.now_s,
            params.max_tokens or 1,
            tenant=dice.choice(["", "a", "b"]),
            background=dice.random() < 0.2,
        )
        self.requests[name] = request
        self.pools.tokens[name] = []
        self.pools.carry_out(self.pools.dispatcher.add(request))

    def _worker(self, seed: int) -> FakeWorker:
        everybody = [*self.pools.workers, *self.pools.zombies]
        if not everybody:
            self.pools.come_back()
            everybody = self.pools.workers
        return everybody[seed % len(everybody)]

    @rule(seed=SEEDS)
    def step(self, seed: int) -> None:
        self._worker(seed).step()

    @rule(seed=SEEDS)
    def obey(self, seed: int) -> None:
        worker = self._worker(seed)
        if worker.commands:
            worker.obey()

    @rule(seed=SEEDS)
    def hear(self, seed: int) -> None:
        self.pools.hear(self._worker(seed))

    @rule(seed=SEEDS, times=st.sampled_from([1, 1, 50]))
    def move(self, seed: int, times: int) -> None:
        transfers = self.pools.transfers()
        for _ in range(times if transfers else 0):
            transfers[seed % len(transfers)].advance()

    @rule(times=st.sampled_from([1, 3, 10]))
    def quiet_time(self, times: int) -> None:
        """Run without faults."""
        for _ in range(times):
            self.everything()

    def everything(self) -> None:
        """Let every worker proceed a little."""
        for worker in [*self.pools.workers, *self.pools.zombies]:
            worker.step()
            for transfer in self.pools.transfers():
                transfer.advance()
            self.pools.hear(worker)

    @rule(seed=SEEDS)
    def die(self, seed: int) -> None:
        """Kill a worker. Another takes its place at once, or later; until then its pool, or both, may be empty."""
        if self.pools.workers:
            worker = self.pools.workers[seed % len(self.pools.workers)]
            self.pools.kill(worker, really=seed % 3 > 0, soon=seed % 2 > 0)

    @rule()
    def come_back(self) -> None:
        self.pools.come_back()

    @rule(role=st.sampled_from(Role))
    def one_more(self, role: Role) -> None:
        if role is not Role.BOTH and len(self.pools.workers) < 6:
            self.pools.start(role)

    @rule(seed=SEEDS)
    def one_less(self, seed: int) -> None:
        staying = [worker for worker in self.pools.workers if worker not in self.pools.leaving]
        if not staying:
            return
        worker = staying[seed % len(staying)]
        if sum(other.member.role is Role.DECODE for other in staying) > (worker.member.role is Role.DECODE):
            self.pools.retire(worker)

    @rule(seed=SEEDS, in_time=st.booleans())
    def leave(self, seed: int, in_time: bool) -> None:
        leaving = self.pools.leaving
        if leaving:
            self.pools.let_go(leaving[seed % len(leaving)], in_time=in_time)

    @rule(seed=SEEDS)
    def cancel(self, seed: int) -> None:
        living = [n for n in self.requests if n not in self.pools.ended | self.cancelled and n not in self.pools.lost]
        if living:
            name = living[seed % len(living)]
            self.cancelled.add(name)
            self.pools.carry_out(self.pools.dispatcher.finish(name, FinishReason.ABORT))

    @rule(seconds=st.sampled_from([0.1, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.pools.now_s += seconds

    @rule(seed=SEEDS)
    def reap(self, seed: int) -> None:
        self._worker(seed).reap()

    @invariant()
    def books_are_right(self) -> None:
        for worker in [*self.pools.workers, *self.pools.zombies]:
            worker.scheduler.check_invariants()

    @invariant()
    def delivered_is_right(self) -> None:
        for name, tokens in self.pools.tokens.items():
            assert tokens == expected(self.requests[name])[: len(tokens)], name

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        self.pools.come_back()
        for _ in range(3000):
            self.everything()
            for worker in [*self.pools.workers, *self.pools.zombies]:
                worker.reap()
            self.pools.now_s += 0.2
            if self._is_quiet():
                break
        for name, request in self.requests.items():
            if name not in self.cancelled and name not in self.pools.lost:
                assert name in self.pools.ended, f"{name} never ended"
                assert self.pools.tokens[name] == expected(request)
        for worker in self.pools.workers:
            usage = worker.kv.usage()
            assert usage.num_used == 0, f"{worker.member.worker_id}: {usage}"
            assert len(worker.lender.book) == 0
            assert worker.fetching.num_waiting == 0
            log = [from_json(to_json(event)) for event in worker.log]
            assert replay(log) is None

    def _is_quiet(self) -> bool:
        everybody = [*self.pools.workers, *self.pools.zombies]
        busy = any(w.commands or w.said or w.engine.has_work or len(w.lender.book) for w in everybody)
        return not busy and not self.pools.transfers()


def expected(request: GenerationRequest) -> list[int]:
    """Return the result of a single engine."""
    generation = FakeGeneration(list(request.new_request.prompt_token_ids), 0)
    for _ in range(request.max_tokens):
        generation.token_ids.append(generation.content(len(generation.token_ids) - 1) % 5)
    return generation.token_ids[len(request.new_request.prompt_token_ids) :]


TestHandover = HandoverMachine.TestCase


def test_without_trouble_all_kv_comes_over() -> None:
    """The machine would pass, too, if nothing were ever handed over."""
    dice = random.Random(3)
    pools = FakePools(
        dice,
        LeastBusy(),
        layout=make_layout([None, None, 6], 4),
        num_blocks=200,
        max_model_len=40,
        scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
        num_decode=1,
    )
    requests = [
        GenerationRequest(NewRequest(f"r{i}", tuple(dice.randrange(9) for _ in range(25)), SamplingParams(), 0), 0.0, 6)
        for i in range(5)
    ]
    for request in requests:
        pools.tokens[request.request_id] = []
        pools.carry_out(pools.dispatcher.add(request))
    while len(pools.ended) < len(requests):
        for worker in pools.workers:
            worker.step()
            for transfer in pools.transfers():
                transfer.advance()
            pools.hear(worker)
    assert all(pools.tokens[r.request_id] == expected(r) for r in requests)
    decode = next(worker for worker in pools.workers if worker.member.role is Role.DECODE)
    prefill = next(worker for worker in pools.workers if worker.member.role is Role.PREFILL)
    assert prefill.device.fake.num_token_passes == 5 * 25
    assert decode.device.fake.num_token_passes == 5 * (25 % 4 + 5), "the last, partial block, and what follows"


def test_a_prompt_that_gave_way_leaves_nothing_on_loan() -> None:
    """The preempted prompt's lease died, so neither a fetch nor a release of the blocks will come."""
    scheduler = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=1)
    pools = FakePools(
        random.Random(0),
        LeastBusy(),
        layout=make_layout([None], 4),
        num_blocks=64,
        max_model_len=40,
        scheduler=scheduler,
    )
    worker = next(worker for worker in pools.workers if worker.member.role is Role.PREFILL)
    for number, background in ((7, True), (8, False)):
        new = NewRequest(f"r{number}", tuple(range(25)), SamplingParams(max_tokens=1), 0)
        worker.engine.add_request(GenerationRequest(new, 0.0, 1, background=background, lend_as=number))
        worker.step()
    while worker.engine.has_work:
        worker.step()
    assert worker.scheduler.handover.is_on_loan(8)
    pools.now_s += 2 * LEASE_S
    worker.reap()
    worker.step()
    steps = [event for event in worker.log if isinstance(event, StepScheduled)]
    assert [name for step in steps for name in step.batch.preempted_request_ids] == ["r7"]
    assert worker.kv.usage().num_used == 0
    assert replay([from_json(to_json(event)) for event in worker.log]) is None
