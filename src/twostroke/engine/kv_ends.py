"""Both ends of an engine's hand-overs, and the order in which they hear of requests, messages and steps. Pure.

    a request comes     it waits for its prefix, where that is fetched; else it starts, and may lend
    FetchKV             a prefix is to be fetched
    KVFetched           it has come, or will not: its request starts
    DropKV              no request will come for it
    EndHold             blocks that were on loan are ordinary ones
    a step is decided   what is on loan of it is told to those who read it
    a request ends      its loan is complete, or it is dead

Each of these may have made room, so prefixes that wait for room are looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.batch import Commit, ScheduledBatch
from twostroke.engine.clock import Clock
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_port import DropKV, EndHold, FetchKV, KVFetched
from twostroke.engine.kv_fetching import ImportLog, KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.events import KVHoldEnded
from twostroke.request import Arrival
from twostroke.scheduler.scheduler import Scheduler


class KVEnds:
    """The ends that an engine has; `bind` the engine before anything else.

    Args:
        scheduler: of the engine.
        journal: of the engine.
        clock: in seconds.
        lending: where others fetch the KV of what is computed here; None: nowhere.
        fetching: where KV is fetched that others have computed; None: nowhere.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        journal: ImportLog,
        clock: Clock,
        lending: KVLending | None = None,
        fetching: KVFetching | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._journal = journal
        self._clock = clock
        self._lending = lending
        self._fetching = fetching
        self._start: Callable[[GenerationRequest], Arrival]
        self._is_idle: Callable[[], bool]

    def bind(self, start: Callable[[GenerationRequest], Arrival], is_idle: Callable[[], bool]) -> None:
        """Say which engine this is for.

        Args:
            start: queues a request there, and returns it as the scheduler knows it.
            is_idle: returns whether the engine has no request.
        """
        self._start, self._is_idle = start, is_idle

    def add(self, request: GenerationRequest) -> None:
        """Start a request, unless its prefix is still to come."""
        if self._fetching is not None and self._fetching.holds_back(request):
            self.let_imports_in()
            return
        arrival = self._start(request)
        if self._lending is not None:
            self._lending.arrived(arrival)

    def obey(self, message: FetchKV | DropKV | KVFetched | EndHold) -> None:
        """Do what a message says."""
        if isinstance(message, EndHold):
            self._end_hold(message.hold_id)
        else:
            assert self._fetching is not None, f"{message} to an engine that fetches nothing"
            match message:
                case FetchKV():
                    self._fetching.begin(message)
                case DropKV(import_id):
                    self._fetching.drop(import_id)
                case KVFetched(import_id, fetched):
                    for request in self._fetching.fetched(import_id, fetched):
                        self.add(request)
        self.let_imports_in()

    def abort(self, request_id: str) -> bool:
        """End a request that waits for its prefix; False: none of this name does."""
        return self._fetching is not None and self._fetching.abort(request_id)

    def let_imports_in(self) -> None:
        """Let prefixes that wait for room take it, if there is some now."""
        if self._fetching is not None:
            for request in self._fetching.try_again(is_idle=self._is_idle()):
                self.add(request)

    def decided(self, batch: ScheduledBatch) -> None:
        """A step is about to be computed."""
        if self._lending is not None:
            self._lending.decided(batch)

    def computed(self, commits: Sequence[Commit]) -> None:
        """A step is over, and accounted for."""
        if self._lending is not None:
            self._lending.computed()
            for commit in commits:
                if commit.finish_reason is not None:
                    self.ended(commit.request_id)

    def ended(self, request_id: str) -> None:
        """A request has ended, in whatever way."""
        hold_id = None if self._lending is None else self._lending.ended(request_id)
        if hold_id is not None:
            self._end_hold(hold_id)

    def _end_hold(self, hold_id: int) -> None:
        self._scheduler.handover.end_hold(hold_id)
        self._journal.emit(KVHoldEnded(self._clock(), self._journal.process, hold_id))

    def close(self) -> None:
        """Give up what is lent and fetched."""
        for end in (self._lending, self._fetching):
            if end is not None:
                end.close()
