"""Simulation of two pools: the production router, a scheduler for each process, and the links between them.

    arrival ─► Router.route ─┬─ handed over ─► prefill engine: one token, its blocks on loan ──┐ layers, as they
                             │                 decode engine: an import of these blocks     ◄──┘ are computed
                             └─ alone ───────► decode engine: the whole request

All decisions are made by production code: the gateway's journal, placer and router (cluster/dispatcher.py,
cluster/routed_placer.py, pools/router.py), and in each process (worker.py) the scheduler and both ends of a
hand-over. Simulated are steps (engine.py), links (link.py) and the lender between them (lender.py). Every process is
a machine of its own: computation in one does not slow another. No process dies.

The dispatcher counts tokens and never reads one, so all token ids are 0. Blocks have their recorded hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from twostroke.batch import NewRequest
from twostroke.client.load import EngineLoad
from twostroke.cluster.dispatcher import Dispatcher, DispatchResult
from twostroke.cluster.routed_placer import ReadyWorker, RoutedPlacer
from twostroke.config.checks import check_number
from twostroke.config.pools import PoolConfig, RoutingConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import PredictsSteps
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import EndHold, LenderAddress
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.errors import InvalidParameter
from twostroke.events import EngineStarted, Event, KVImportEnded, RequestRouted
from twostroke.explain.names import GATEWAY
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.leases import LEASE_S
from twostroke.outputs import RequestTimes
from twostroke.pools.member import Member, Role
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.replay import layers_of, layout_of, scheduler_of
from twostroke.served_run import Run, ServedRequest
from twostroke.simulation.engine import LiveRequest, SimulatedEngine, SimulatedStep
from twostroke.simulation.link import Link
from twostroke.simulation.requests import SimulatedRequest
from twostroke.simulation.worker import SimulatedWorker, SimulatedWorld

_PLAIN, _SCORED = SamplingParams(), SamplingParams(prompt_logprobs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPools:
    """Number of processes in each pool, and the rate of their links.

    Raises:
        InvalidParameter: sizes that a server does not accept, a prefill pool without a link, or a link without a
        prefill pool.
    """

    prefill: int = 0
    """Prefill processes; 0: decode processes compute their own prompts."""
    decode: int = 0
    """Decode processes; 0: simulate the single recorded process."""
    link_bytes_per_s: float | None = None
    """Rate of each process's link in each direction."""
    tpot_target_s: float = 0.05
    """Target seconds per output token; to meet it the router keeps prompts away from decode processes."""

    def __post_init__(self) -> None:
        """Check ranges as a server does."""
        PoolConfig(prefill=self.prefill, decode=self.decode, tpot_target_s=self.tpot_target_s)
        rate = self.link_bytes_per_s
        if rate is not None:
            check_number("link_bytes_per_s", rate, 0, 1e18, "more than 0 bytes a second, at most 1e18", low_open=True)
        if self.prefill and rate is None:
            remedy = "Add link_bytes_per_s=1.25e9 for 10 Gbit/s, or the rate that was measured between two machines."
            raise InvalidParameter("prefill", self.prefill, "needs a link that carries KV to decode processes", remedy)
        if not self.prefill and rate is not None:
            remedy = "Add prefill=1 and decode=1, or leave it out."
            raise InvalidParameter("link_bytes_per_s", rate, "is for a prefill pool, but there is none", remedy)


@dataclass(frozen=True, slots=True)
class KVHandovers:
    """Totals of the KV hand-overs from the prefill pool to the decode pool."""

    num_requests: int
    """Requests that were handed over, or planned to be."""
    num_fetched: int
    """Requests whose prefix arrived; the others ended before, or were computed by the decode process."""
    num_bytes: int
    """Bytes of KV in the prefixes that arrived."""


class PoolSimulation:
    """Simulation of several engines like a recorded one.

    Args:
        started: the start event of each engine.
        step_times: predicts how long a step takes, in each engine.
        pools: the number of processes, and their links.
        ended: called whenever a request has ended.

    Raises:
        InvalidParameter: an engine setting cannot be combined with a prefill pool.
    """

    def __init__(
        self,
        started: EngineStarted,
        step_times: PredictsSteps,
        pools: SimulatedPools,
        ended: Callable[[], object] | None = None,
    ) -> None:
        if pools.prefill:
            _check_handover_settings(started)
        self._ended = ended or (lambda: None)
        self._now_s = 0.0
        self._max_num_seqs: int = started.scheduler["max_num_seqs"]
        layout, layers = layout_of(started.layout), layers_of(started)
        self._prefill_s_per_token = _prefill_s_per_token(started, layers, step_times)
        self._world = SimulatedWorld(layout, Link(pools.link_bytes_per_s or 1.0), lambda: self._now_s, self._on_event)
        self._placer = RoutedPlacer(RoutingConfig(tpot_target_s=pools.tpot_target_s), self._world.names)
        self._dispatcher = Dispatcher(self._placer)
        self._workers: dict[str, SimulatedWorker] = {}
        for role, size in ((Role.PREFILL, pools.prefill), (Role.DECODE, pools.decode)):
            for i in range(size):
                engine = SimulatedEngine(
                    scheduler_of(started),
                    layers,
                    step_times,
                    block_size=layout.block_size,
                    hashes_blocks=started.cache["enable_prefix_caching"],
                )
                self._join(SimulatedWorker(f"{role.value}-{i}", engine, self._world), role, started.num_blocks)
        if pools.link_bytes_per_s is not None:  # the router would know the rate after the first hand-over
            for i, j in product(range(pools.prefill), range(pools.decode)):
                self._placer.router.link_measured(f"prefill-{i}", f"decode-{j}", pools.link_bytes_per_s)
        self._aborts: deque[tuple[float, str]] = deque()
        """Requests that their callers abort before the first token: (time in seconds, request id), sorted."""
        self._num_live = self._num_handed_over = self._num_fetched = self._num_bytes = 0

    def _join(self, worker: SimulatedWorker, role: Role, num_blocks: int) -> None:
        name, layout = worker.process, self._world.layout
        self._workers[name] = worker
        idle = Member(
            member_id=name,
            role=role,
            max_num_seqs=self._max_num_seqs,
            num_free_blocks=num_blocks,
            num_blocks=num_blocks,
            block_size=layout.block_size,
            kv_bytes_per_token=layout.bytes_per_token,
            num_layers=worker.engine.layers.num_layers,
        )
        self._placer.joined_idle(idle, layout.prefix_tokens)
        self._report(worker)
        lender, size = LenderAddress(Address(name=name), 0), layout.block_size
        self._dispatcher.worker_ready(ReadyWorker(name, role, lender, size, prefix_tokens=layout.prefix_tokens))

    @property
    def hand_overs(self) -> KVHandovers:
        """Hand-overs so far."""
        return KVHandovers(self._num_handed_over, self._num_fetched, self._num_bytes)

    def run(self, requests: Sequence[SimulatedRequest]) -> Run:
        """Run all requests, from the first arrival to the last end.

        Raises:
            InvalidParameter: a request is longer than the engines accept.
        """
        waiting = deque(sorted(requests, key=lambda one: one.arrival.arrival_time_s))
        served = [ServedRequest(one.arrival.request_id, RequestTimes(one.arrival.arrival_time_s)) for one in waiting]
        by_arrival = iter(served)
        gone = sorted(
            (one.arrival.arrival_time_s + one.ended_after_s, one.arrival.request_id)
            for one in waiting
            if one.ended_after_s is not None
        )
        self._aborts.extend(gone)
        while (next_s := self._next_s(waiting)) is not None:
            self._now_s = next_s
            for worker in self._workers.values():
                if worker.step is not None and worker.step.end_s <= next_s:
                    self._end_step(worker, worker.step)
            self._move()
            while waiting and waiting[0].arrival.arrival_time_s <= next_s:
                self._arrive(LiveRequest(waiting.popleft(), next(by_arrival)))
            while self._aborts and self._aborts[0][0] <= next_s:
                self._apply(self._dispatcher.finish(self._aborts.popleft()[1], FinishReason.ABORT))
            self._run_until_idle()
            if not waiting and not self._num_live and not any(w.step or w.inbox for w in self._workers.values()):
                break
        assert not self._num_live, f"{self._num_live} requests wait and can never run"
        steps = sorted((step for w in self._workers.values() for step in w.engine.steps), key=lambda step: step.end_s)
        ran = tuple(request for request in served if request.times.token_times_s)
        return Run(ran, tuple(steps), self._now_s)

    def check_invariants(self, *, is_over: bool = False) -> None:
        """Check every process; if `is_over`, also that no process holds KV after the last leases have expired."""
        if is_over:
            self._now_s += LEASE_S
            self._run_until_idle()
        for worker in self._workers.values():
            worker.check_invariants(is_over=is_over)

    def _next_s(self, waiting: deque[SimulatedRequest]) -> float | None:
        """Return the time of the next event, or None if nothing can happen any more."""
        workers = self._workers.values()
        times = [worker.step.end_s for worker in workers if worker.step is not None]
        times += [waiting[0].arrival.arrival_time_s] if waiting else []
        times += [self._aborts[0][0]] if self._aborts else []
        ends = (self._world.link.next_s, *(worker.lender.next_s for worker in workers))
        times += [time_s for time_s in ends if time_s is not None]
        return max(self._now_s, min(times)) if times else None

    def _run_until_idle(self) -> None:
        """Deliver messages and begin steps in all idle workers until nothing changes."""
        is_busy = True
        while is_busy:
            idle = [worker for worker in self._workers.values() if worker.step is None]
            has_heard = sum(worker.process_inbox() for worker in idle) + self._move() > 0
            is_busy = has_heard or sum(worker.begin_step() for worker in idle) > 0

    def _move(self) -> bool:
        """Advance transfers and leases to the current time; return whether any transfer or lease ended."""
        done = self._world.link.advance(self._now_s)
        for transfer in done:
            transfer.on_done()
        over = [(worker, hold_id) for worker in self._workers.values() for hold_id in worker.lender.reap()]
        for worker, hold_id in over:
            worker.inbox.append(EndHold(hold_id))
        return bool(done or over)

    # ------------------------------------------------------------------ the gateway

    def _arrive(self, live: LiveRequest) -> None:
        arrival = live.outcome.arrival
        request_id = arrival.request_id
        self._world.requests[request_id] = live
        params = _PLAIN if arrival.reads_prefix_cache else _SCORED
        new = NewRequest(request_id, (0,) * arrival.num_prompt_tokens, params, 0)
        outcome = self._dispatcher.add(GenerationRequest(new, arrival.arrival_time_s, arrival.max_tokens))
        if not outcome.placed:
            limit = f"may need {arrival.num_prompt_tokens + arrival.max_tokens} tokens of KV; no process has that many"
            raise InvalidParameter("request", request_id, limit, "Give more KV memory (kv_cache_memory).")
        self._apply(outcome)

    def _end_step(self, worker: SimulatedWorker, step: SimulatedStep) -> None:
        updates = [_update_of(live, step.end_s) for live in worker.end_step(step)]
        self._apply(self._dispatcher.process_updates(worker.process, updates))
        self._report(worker)

    def _apply(self, outcome: DispatchResult) -> None:
        for name, place in outcome.placed:
            self._num_handed_over += place.prefill is not None
            now_s = self._now_s
            self._placer.routed(RequestRouted(now_s, GATEWAY, name, place.decode, place.prefill, place.reason))
        for order in outcome.commands:
            self._workers[order.worker_id].inbox.append(order.command)
        num_before, self._num_live = self._num_live, self._dispatcher.num_live
        for _ in range(num_before - self._num_live):
            self._ended()

    def _on_event(self, process: str, event: Event) -> None:
        self._placer.on_event(process, event)
        if isinstance(event, KVImportEnded) and not event.problem:
            self._num_fetched += 1
            self._num_bytes += event.num_bytes

    def _report(self, worker: SimulatedWorker) -> None:
        self._placer.reported(worker.process, partial(self._load_of, worker), self._now_s)

    def _load_of(self, worker: SimulatedWorker) -> EngineLoad:
        """Return a worker's load as a warmed-up engine reports it: with a known prefill rate."""
        return EngineLoad(
            self._max_num_seqs,
            num_running=worker.engine.scheduler.num_running,
            num_waiting=worker.engine.scheduler.num_waiting,
            num_waiting_tokens=worker.engine.num_tokens_to_prefill,
            step_s=worker.decode_step_s,
            prefill_s_per_token=self._prefill_s_per_token,
        )


def _update_of(live: LiveRequest, time_s: float) -> TokenUpdate:
    """Return the tokens of a request that leaves a process, all at once, as earlier ones decide nothing."""
    reason = FinishReason.STOP if live.has_ended else FinishReason.LENGTH
    token_ids = (0,) * (live.num_outputs - live.num_outputs_on_arrival)
    status = SequenceStatus(finish_reason=reason)
    return TokenUpdate(
        live.outcome.arrival.request_id, time_s, token_ids, status=status, start=live.num_outputs_on_arrival
    )


def _prefill_s_per_token(started: EngineStarted, layers: Layers, step_times: PredictsSteps) -> float:
    """Return the seconds per prompt token in chunks of the largest size that a step takes."""
    num_tokens = min(started.scheduler["max_num_batched_tokens"], started.max_model_len)
    return step_times.seconds(layers.work([(0, num_tokens, 1)])) / num_tokens


def _check_handover_settings(started: EngineStarted) -> None:
    """Raise if the recorded engine's settings do not allow hand-overs, as in a server."""
    if not started.cache["enable_prefix_caching"]:
        remedy = "Add enable_prefix_caching=true, or leave prefill out."
        raise InvalidParameter("enable_prefix_caching", False, "KV is handed over through the prefix cache", remedy)
    if started.cache["kv_check_rate"]:
        limit = "cannot be combined with prefill processes; the log is of an engine that used it"
        raise InvalidParameter("kv_check_rate", started.cache["kv_check_rate"], limit, "Leave prefill out.")
