"""A process of a pool in simulated time: an engine, both ends of its hand-overs, and what it has been told.

It obeys the commands of cluster/messages.py between two steps, as cluster/process.py does. The ends are those that
serve (engine/kv_ends.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twostroke.cluster.messages import Add, Command, Finish
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_port import DropKV, EndHold, FetchKV, KVFetched
from twostroke.engine.kv_ends import KVEnds
from twostroke.engine.kv_fetching import KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.events import Event, StepScheduled
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.transport import Fetched, KVSource
from twostroke.request import Arrival
from twostroke.simulation.engine import Live, SimulatedEngine, SimulatedStep
from twostroke.simulation.lender import SimulatedLender
from twostroke.simulation.link import Link


@dataclass(slots=True, eq=False)
class World:
    """What the processes of a simulation have in common."""

    layout: KVLayout
    link: Link
    clock: Callable[[], float]
    heard: Callable[[str, Event], object]
    """Is told what a process says of itself."""
    requests: dict[str, Live] = field(default_factory=dict[str, Live])
    """By name, those that have ended included: word of them may still be on its way."""
    lenders: dict[str, SimulatedLender] = field(default_factory=dict[str, SimulatedLender])
    """By process."""

    def names(self, request_id: str, token_ids: Sequence[int], block_size: int, salt: str | None) -> tuple[bytes, ...]:
        """Return the names of a request's full blocks as they were recorded; see BlockNames."""
        del salt
        given, num_blocks = self.requests[request_id].given, len(token_ids) // block_size
        known = given.arrival.block_hashes[:num_blocks]
        return known + tuple(given.hash_of_block(i) for i in range(len(known), num_blocks))


class SimulatedWorker:
    """One process.

    Args:
        process: its name.
        engine: nothing has run in it yet.
        world: of all of them.
    """

    def __init__(self, process: str, engine: SimulatedEngine, world: World) -> None:
        self.process = process
        self.engine = engine
        self._world = world
        self.inbox: deque[Command] = deque()
        """What it has been told since its last step began."""
        self.step: SimulatedStep | None = None
        self.decode_step_s = 0.0
        """Of its last step without prefills."""
        layout = world.layout
        lender = SimulatedLender(process, layout, engine.layers.num_layers, world.link, world.clock)
        self.lender = world.lenders[process] = lender
        scheduler, clock = engine.scheduler, world.clock
        self._fetching = KVFetching(
            scheduler, self, self, layout=layout, clock=clock, post=self.inbox.append, names=world.names
        )
        self._ends = KVEnds(scheduler, self, clock, KVLending(scheduler, lender, layout), self._fetching)
        self._ends.bind(self._start, lambda: not engine.has_work)

    # ------------------------------------------------------------------ its loop

    def hear(self) -> bool:
        """Obey what there is; return whether there was anything."""
        has_heard = bool(self.inbox)
        while self.inbox:
            self._obey(self.inbox.popleft())
        return has_heard

    def begin_step(self) -> bool:
        """Begin a step, where there is work; return whether it has, or has told itself anything."""
        if self.engine.has_work:
            self._ends.let_imports_in()
            self.step = self.engine.decide(self._world.clock())
        if self.step is None:
            return bool(self.inbox)
        self.lender.step_s = self.step.begin_s, self.step.end_s
        self._ends.decided(self.step.batch)
        return True

    def end_step(self, step: SimulatedStep) -> list[Live]:
        """Take in a step that is over; return who is through here, ended or not."""
        self.step = None
        if not step.batch.num_prefill_tokens:
            self.decode_step_s = step.end_s - step.begin_s
        self.emit(StepScheduled(step.begin_s, self.process, step.batch))
        through = self.engine.take_in(step)
        for live in through:
            self._ends.ended(live.given.arrival.request_id)
        if not self.engine.has_work:  # there may be no other step
            self._ends.let_imports_in()
        return through

    def _obey(self, command: Command) -> None:
        match command:
            case Add(request):
                self._ends.add(request)
            case Finish(request_id):
                if self.engine.finish(request_id):
                    self._ends.ended(request_id)
                else:
                    self._ends.abort(request_id)
                self._ends.let_imports_in()
            case FetchKV() | DropKV() | KVFetched() | EndHold():
                self._ends.obey(command)
            case other:
                raise AssertionError(f"{other} to a simulated process")

    def _start(self, request: GenerationRequest) -> Arrival:
        live, new = self._world.requests[request.request_id], request.new_request
        arrival = live.given.arrival
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
        """Check the scheduler; when all is over, that nobody waits for anything or holds anything."""
        self.engine.scheduler.check_invariants()
        if is_over:
            usage = self.engine.scheduler.kv_usage
            assert not self._fetching.num_waiting, f"{self.process} waits for {self._fetching.num_waiting} imports"
            assert not usage.num_used, f"{self.process} holds {usage}"

    # ------------------------------------------------------------------ FetchingSide, and ImportLog

    def fetch(
        self, source: KVSource, into: KVImport, digest: bytes, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        del digest  # nobody else uses the number of the lease
        return self._world.lenders[source.address.name].fetch(source.lease_id, self.process, into, is_done)

    def emit(self, event: Event) -> None:
        self._world.heard(self.process, event)

    def close(self) -> None:
        pass
