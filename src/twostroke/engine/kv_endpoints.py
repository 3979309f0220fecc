"""Both ends of an engine's KV hand-overs, and the order in which they handle requests, messages and steps. Pure.

    a request arrives   it waits while its prefix is fetched; otherwise it starts, and may lend its blocks
    FetchKV             a prefix is to be fetched
    KVFetched           the fetch succeeded or failed: its request starts
    DropKV              no request will come for a fetched prefix
    EndHold             blocks on loan become ordinary blocks
    a step is decided   the lender learns which lent blocks the step fills
    a request ends      its loan is complete, or dead

Each of these may free blocks, so imports that wait for room are tried again after each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.batch import Commit, ScheduledBatch
from twostroke.engine.clock import Clock
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import DropKV, EndHold, FetchKV, KVFetched
from twostroke.engine.kv_fetching import ImportLog, KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.events import KVHoldEnded
from twostroke.request import Arrival
from twostroke.scheduler.scheduler import Scheduler


class KVEndpoints:
    """The lending and fetching ends of an engine; call `bind` before anything else.

    Args:
        scheduler: the engine's.
        journal: the engine's.
        clock: in seconds.
        lending: lends the KV computed here to other processes; None: nothing is lent.
        fetching: fetches KV that other processes computed; None: nothing is fetched.
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
        """Set the engine that this object serves.

        Args:
            start: queues a request in the engine, and returns it as the scheduler sees it.
            is_idle: returns whether the engine has no request.
        """
        self._start, self._is_idle = start, is_idle

    def add(self, request: GenerationRequest) -> None:
        """Start a request, unless it has to wait for its prefix."""
        if self._fetching is not None and self._fetching.waits_for_import(request):
            self.start_waiting_imports()
            return
        arrival = self._start(request)
        if self._lending is not None:
            self._lending.arrived(arrival)

    def handle(self, message: FetchKV | DropKV | KVFetched | EndHold) -> None:
        """Handle a hand-over message."""
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
        self.start_waiting_imports()

    def abort(self, request_id: str) -> bool:
        """End a request that waits for its prefix; return False if none has this id."""
        return self._fetching is not None and self._fetching.abort(request_id)

    def start_waiting_imports(self) -> None:
        """Start the waiting imports that now have room."""
        if self._fetching is not None:
            for request in self._fetching.start_imports(is_idle=self._is_idle()):
                self.add(request)

    def decided(self, batch: ScheduledBatch) -> None:
        """Tell the lender about a step that is about to be computed."""
        if self._lending is not None:
            self._lending.decided(batch)

    def computed(self, commits: Sequence[Commit]) -> None:
        """Tell the lender that a step is over, and settle the loans of requests that ended in it."""
        if self._lending is not None:
            self._lending.computed()
            for commit in commits:
                if commit.finish_reason is not None:
                    self.ended(commit.request_id)

    def ended(self, request_id: str) -> None:
        """Settle the loan of a request that has ended, for any reason."""
        hold_id = None if self._lending is None else self._lending.ended(request_id)
        if hold_id is not None:
            self._end_hold(hold_id)

    def _end_hold(self, hold_id: int) -> None:
        self._scheduler.handover.end_hold(hold_id)
        self._journal.emit(KVHoldEnded(self._clock(), self._journal.process, hold_id))

    def close(self) -> None:
        """Cancel all loans and imports."""
        for end in (self._lending, self._fetching):
            if end is not None:
                end.close()
