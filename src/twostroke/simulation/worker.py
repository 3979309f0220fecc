"""Simulated worker process of a pool: an engine, both ends of its KV hand-overs, and a command inbox.

It handles the commands of cluster/messages.py between two steps, as cluster/process.py does. The hand-over ends are
those used in service (engine/kv_endpoints.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twostroke.cluster.messages import Add, Command, Finish
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import DropKV, EndHold, FetchKV, KVFetched
from twostroke.engine.kv_endpoints import KVEndpoints
from twostroke.engine.kv_fetching import KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.events import Event, StepScheduled
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.transport import Fetched, KVSource
from twostroke.request import Arrival
from twostroke.simulation.engine import LiveRequest, SimulatedEngine, SimulatedStep
from twostroke.simulation.lender import SimulatedLender
from twostroke.simulation.link import Link


@dataclass(slots=True, eq=False)
class SimulatedWorld:
    """State shared by all processes of a simulation."""

    layout: KVLayout
    link: Link
    clock: Callable[[], float]
    on_event: Callable[[str, Event], object]
    """Callback for every event that a process emits; called with the process name and the event."""
    requests: dict[str, LiveRequest] = field(default_factory=dict[str, LiveRequest])
    """Requests by id, ended ones included: messages about them may still be in flight."""
    lenders: dict[str, SimulatedLender] = field(default_factory=dict[str, SimulatedLender])
    """Lenders by process name."""

    def names(self, request_id: str, token_ids: Sequence[int], block_size: int, salt: str | None) -> tuple[bytes, ...]:
        """Return the recorded hashes of a request's full blocks; an implementation of `BlockHasher`."""
        del salt
        given, num_blocks = self.requests[request_id].outcome, len(token_ids) // block_size
        known = given.arrival.block_hashes[:num_blocks]
        return known + tuple(given.block_hash(i) for i in range(len(known), num_blocks))


class SimulatedWorker:
    """Worker process in simulated time.

    Args:
        process: its name.
        engine: an engine that has not run yet.
        world: state shared with the other processes.
    """

    def __init__(self, process: str, engine: SimulatedEngine, world: SimulatedWorld) -> None:
        self.process = process
        self.engine = engine
        self._world = world
        self.inbox: deque[Command] = deque()
        """Commands received since the last step began."""
        self.step: SimulatedStep | None = None
        self.decode_step_s = 0.0
        """Seconds of the last step without prefills."""
        layout = world.layout
        lender = SimulatedLender(process, layout, engine.layers.num_layers, world.link, world.clock)
        self.lender = world.lenders[process] = lender
        scheduler, clock = engine.scheduler, world.clock
        self._fetching = KVFetching(
            scheduler, self, self, layout=layout, clock=clock, post=self.inbox.append, names=world.names
        )
        self._endpoints = KVEndpoints(scheduler, self, clock, KVLending(scheduler, lender, layout), self._fetching)
        self._endpoints.bind(self._start, lambda: not engine.has_work)

    # ------------------------------------------------------------------ the worker's loop

    def process_inbox(self) -> bool:
        """Handle all queued commands; return whether there were any."""
        has_heard = bool(self.inbox)
        while self.inbox:
            self._run_commands(self.inbox.popleft())
        return has_heard

    def begin_step(self) -> bool:
        """Begin a step if there is work; return whether a step began or a command was queued."""
        if self.engine.has_work:
            self._endpoints.start_waiting_imports()
            self.step = self.engine.decide(self._world.clock())
        if self.step is None:
            return bool(self.inbox)
        self.lender.step_s = self.step.begin_s, self.step.end_s
        self._endpoints.decided(self.step.batch)
        return True

    def end_step(self, step: SimulatedStep) -> list[LiveRequest]:
        """Commit a step that is over; return the requests that leave this process, ended or not."""
        self.step = None
        if not step.batch.num_prefill_tokens:
            self.decode_step_s = step.end_s - step.begin_s
        self.emit(StepScheduled(step.begin_s, self.process, step.batch))
        through = self.engine.commit(step)
        for live in through:
            self._endpoints.ended(live.outcome.arrival.request_id)
        if not self.engine.has_work:  # there may be no other step
            self._endpoints.start_waiting_imports()
        return through

    def _run_commands(self, command: Command) -> None:
        match command:
            case Add(request):
                self._endpoints.add(request)
            case Finish(request_id):
                if self.engine.finish(request_id):
                    self._endpoints.ended(request_id)
                else:
                    self._endpoints.abort(request_id)
                self._endpoints.start_waiting_imports()
            case FetchKV() | DropKV() | KVFetched() | EndHold():
                self._endpoints.handle(command)
            case other:
                raise AssertionError(f"{other} to a simulated process")

    def _start(self, request: GenerationRequest) -> Arrival:
        live, new = self._world.requests[request.request_id], request.new_request
        arrival = live.outcome.arrival
        if request.lend_as is not None or new.output_token_ids:
            known = new.prompt_token_ids + new.output_token_ids
            arrival = replace(
                arrival,
                num_prompt_tokens=len(known),
                max_tokens=request.max_tokens - len(new.output_token_ids),
                block_hashes=self._world.names(request.request_id, known, self._world.layout.block_size, None),
                lend_as=request.lend_as,
                lend_block_size=request.lend_block_size,
                import_id=request.import_id,
            )
        self.engine.arrive(live, arrival)
        return arrival

    def check_invariants(self, *, is_over: bool) -> None:
        """Check the scheduler's invariants; if `is_over`, also that no import waits and no KV block is held."""
        self.engine.scheduler.check_invariants()
        if is_over:
            usage = self.engine.scheduler.kv_usage
            assert not self._fetching.num_waiting, f"{self.process} waits for {self._fetching.num_waiting} imports"
            assert not usage.num_used, f"{self.process} holds {usage}"

    # ------------------------------------------------------------------ BorrowerSide, and ImportLog

    def fetch(
        self, source: KVSource, into: KVImport, digest: bytes, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        del digest  # no other lender uses the same lease id
        return self._world.lenders[source.address.name].fetch(source.lease_id, self.process, into, is_done)

    def emit(self, event: Event) -> None:
        self._world.on_event(self.process, event)

    def close(self) -> None:
        pass
