"""State of a run, folded once from the event log for all of its views (docs/decisions/059).

    RunState            every place, and every sequence that has not ended
      PlaceState        the process that runs there now, its requests, its steps in flight
        RequestState    a sequence as this process has it
    Taken               changes made by one event; views count, show or explain them

Views read this state instead of interpreting events themselves. The scheduler's own record of a request is
`request.Request`; this one is reconstructed from outside, also from incomplete logs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from twostroke.batch import AdmittedRequest, Commit, ScheduledRequest
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    EventsDropped,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.bounded_dict import BoundedDict
from twostroke.explain.names import GATEWAY, is_pool_process, place_of, request_of, sequence_of
from twostroke.explain.step import DecidedStep
from twostroke.outputs import RequestTimes
from twostroke.request import Arrival, FinishReason, RequestStatus


@dataclass(slots=True, eq=False)
class RequestState:
    """State of a sequence at one process, by its name there; it may go on elsewhere before it ends here."""

    request_id: str
    arrival: Arrival | None
    """Arrival; None: it arrived before the history begins."""
    place: PlaceState
    sequence_id: str = ""
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0))
    """Times of the sequence in all processes; empty if its arrival is unknown, or if it had ended before it arrived."""
    siblings: list[RequestState] = field(default_factory=list["RequestState"])
    """All sequences of its request, each at its current process."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the sequence, without tokens that another process generated."""
    max_tokens: int = 0
    """Output limit of the sequence."""
    num_cached_at_first: int = 0
    """Tokens of the sequence's prompt that were cached when it first ran."""
    told: RequestFinishedByCaller | None = None
    """Abort or stop from outside, until the process that runs the sequence confirms it."""
    finish_reason: FinishReason | None = None
    """Finish reason of the sequence."""
    is_last: bool = False
    """Whether the sequence has ended as the last one of its request."""

    is_here: bool = False
    """Whether its arrival is known, it has not ended, and no other process has continued it."""
    status: RequestStatus = RequestStatus.WAITING
    share: ScheduledRequest | None = None
    """Share of the last step that was decided with this request."""
    stroke: str = ""
    """Stroke of the last step that computed tokens of it."""
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_computed_tokens: int = 0
    """Computed tokens, by the results so far."""
    num_cached_tokens: int = 0
    """Cached tokens at admission, readmissions after preemption excluded."""
    num_preemptions: int = 0
    runs_since: float = inf
    """Step that allocated its blocks. Results of earlier steps concern blocks that it no longer has."""

    @property
    def is_running(self) -> bool:
        """Whether it holds blocks."""
        return self.status is RequestStatus.RUNNING


class PlaceState:
    """State of a place, at which one process after the other runs sequences."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started: EngineStarted | None = None
        """Start event of its process; None: not seen yet."""
        self.is_whole = False
        """Whether the history knows the process from its start."""
        self.requests: dict[str, RequestState] = {}
        """Requests that have not ended here, by their names here."""
        self.num_here = 0
        """Number of requests that are at this place only."""
        self.num_running = 0
        """Number of these that run."""
        self.in_flight: deque[DecidedStep] = deque()
        """Decided steps without a result; the first one is running."""
        self.last_step: DecidedStep | None = None
        """Latest step that has a result."""
        self.last_result_s = -inf

    @property
    def page_size(self) -> int:
        """Tokens of a page; 1 where not known."""
        return 1 if self.started is None else self.started.layout.get("block_size", 1)

    def arrival_of(self, request_id: str) -> Arrival | None:
        """Return the arrival of a request that has not ended; None where it is not known."""
        request = self.requests.get(request_id)
        return None if request is None else request.arrival

    @property
    def num_tokens_held(self) -> dict[str, int]:
        """Tokens in KV memory of each running request."""
        shares = {name: request.share for name, request in self.requests.items() if request.is_running}
        return {name: 0 if share is None else share.token_range.stop for name, share in shares.items()}

    def step_running_at(self, time_s: float) -> DecidedStep | None:
        """Return the step that was running at a recent time; None: no step ran."""
        if self.in_flight:
            return self.in_flight[0]
        return self.last_step if self.last_result_s > time_s else None

    def move_to(self, request: RequestState, status: RequestStatus) -> None:
        """Set the status of a request."""
        if request.is_here:
            self.num_running += (status is RequestStatus.RUNNING) - request.is_running
        request.status = status

    def requeue(self, request_id: str, status: RequestStatus) -> RequestState | None:
        """Set the status of a request that lost its blocks; return the request, if it is known."""
        request = self.requests.get(request_id)
        if request is not None:
            self.move_to(request, status)
            request.num_computed_tokens, request.runs_since = 0, inf
            request.num_preemptions += status is RequestStatus.PREEMPTED
        return request

    def release(self, request: RequestState) -> bool:
        """Record that a request leaves this place; return whether it was here."""
        was_here = request.is_here
        self.num_here -= was_here
        self.num_running -= was_here and request.is_running
        request.is_here = False
        return was_here

    def done(self, event: StepCommitted) -> DecidedStep | None:
        """Return the step of a result and remove it from the steps in flight; None if the history does not know it."""
        step = None
        while self.in_flight and self.in_flight[0].batch.step <= event.step:
            step = self.last_step = self.in_flight.popleft()
            self.last_result_s = event.time_s
        if step is None or step.batch.step != event.step:
            return None
        step.done_s = event.time_s
        step.num_generated = sum([commit.num_tokens for commit in event.commits])
        return step


class EventChanges:
    """Changes made by one event; each attribute names the events that set it."""

    left: PlaceState | None = None
    """RequestArrived: the place that the sequence left."""
    step: DecidedStep | None = None
    """StepScheduled, StepCommitted: the step; None: its decision is not known."""
    admitted: Sequence[AdmittedRequest] = ()
    """StepScheduled: requests that run for the first time."""
    grown: Sequence[ScheduledRequest] = ()
    """StepScheduled: shares with new blocks."""
    computed: Sequence[tuple[RequestState, ScheduledRequest]] = ()
    """StepCommitted: requests that still hold what the step computed, with their shares of it. Only those that have
    filled a page or verified drafts."""
    first_tokens: Sequence[RequestState] = ()
    """StepCommitted: sequences with their first token."""
    gaps: Iterable[tuple[tuple[float, int], int]] = ()
    """StepCommitted: pairs of (seconds since the token before, number of tokens) and number of sequences."""
    num_tokens: int = 0
    """StepCommitted: tokens of sequences that are here."""

    def __init__(self, place: PlaceState) -> None:
        self.place = place
        """Place of the event; a gateway's events belong to a place without requests."""
        self.gone: list[tuple[RequestState, FinishReason]] = []
        """Any event: requests that have ended here."""
        self.ended: list[RequestState] = []
        """Any event: sequences that have ended."""


class RunState:
    """State of all processes of a run, updated event by event."""

    def __init__(self) -> None:
        self._places: dict[str, PlaceState] = {}
        """Places by name."""
        self._by_process: dict[str, PlaceState] = {}
        """Places by process."""
        self._sequences: dict[str, RequestState] = {}
        self._requests: dict[str, list[RequestState]] = {}
        """All sequences of each request, while one has not ended."""
        self._told = BoundedDict[str, RequestFinishedByCaller]()
        """Ends of sequences that have not been seen yet."""
        self._over = BoundedDict[str, bool]()
        """Sequences that ended between two processes; the second process may take one in without knowing."""

    def is_over(self, sequence_id: str) -> bool:
        return sequence_id in self._over

    def take(self, event: Event) -> EventChanges:
        """Update the state by one event, in order, and return the changes."""
        place = self._by_process.get(event.process)
        if place is None:
            name = place_of(event.process)
            place = self._by_process[event.process] = self._places.setdefault(name, PlaceState(name))
        taken = EventChanges(place)
        match event:
            case StepCommitted():
                self._committed(event, taken)
            case StepScheduled():
                _scheduled(event, taken)
            case RequestArrived():
                self._arrived(event, taken)
            case RequestFinishedByCaller():
                self._finished_by_caller(event, taken)
            case KVBlockChecked():
                self._kv_checked(event, taken)
            case EngineStarted() | EngineLost():
                self._lost(event, taken)
            case EventsDropped():
                for other in self._places.values():
                    other.is_whole = False
            case _:
                pass
        return taken

    # ------------------------------------------------------------------ events

    def _lost(self, event: EngineStarted | EngineLost, taken: EventChanges) -> None:
        """Remove the requests of a process that died; those of a pool go on elsewhere."""
        place, goes_on = taken.place, is_pool_process(event.process)
        for request in list(place.requests.values()):
            self._gone(request, FinishReason.ERROR, taken, event, goes_on=goes_on)
        place.in_flight.clear()
        if isinstance(event, EngineStarted):
            place.started, place.is_whole = event, True

    def _arrived(self, event: RequestArrived, taken: EventChanges) -> None:
        place, arrival, name = taken.place, event.arrival, event.request_id
        unended = place.requests.get(name)
        if unended is not None:
            place.release(unended)
        request = place.requests[name] = RequestState(name, arrival, place, sequence_of(name))
        request.block_hashes.extend(arrival.block_hashes)
        if request.sequence_id in self._over:
            return
        before = self._sequences.get(request.sequence_id)
        goes_on = arrival.import_id is not None or name != request.sequence_id
        if before is not None and (goes_on or not before.is_here):
            if before.place.release(before):
                taken.left = before.place
            _go_on(before, request, arrival)
        else:
            request.times = RequestTimes(arrival.arrival_time_s)
            request.num_prompt_tokens, request.max_tokens = arrival.num_prompt_tokens, arrival.max_tokens
            request.siblings = self._requests.setdefault(request_of(request.sequence_id), [])
            request.siblings.append(request)
        self._sequences[request.sequence_id] = request
        request.told = self._told.pop(request.sequence_id, request.told)
        request.is_here = True
        place.num_here += 1

    def _committed(self, event: StepCommitted, taken: EventChanges) -> None:
        place = taken.place
        step = taken.step = place.done(event)
        now_s, requests, page_size = event.time_s, place.requests, place.page_size
        number = -1 if step is None else step.batch.step
        num_here = 0
        gaps: defaultdict[tuple[float, int], int] = defaultdict(int)
        computed: list[tuple[RequestState, ScheduledRequest]] = []
        first_tokens: list[RequestState] = []
        error = FinishReason.ERROR  # looked up once: it takes as long as a call
        ended: list[tuple[RequestState, FinishReason]] = []
        for share, commit in _paired(step, event.commits):  # this is done for every token
            num_new = commit.num_tokens
            request = requests.get(commit.request_id)
            if request is None:  # it ended while this step ran, or arrived before the first event
                continue
            if num_new and request.is_here:
                num_here += num_new
                token_times_s = request.times.token_times_s
                if token_times_s:
                    gaps[now_s - token_times_s[-1], num_new] += 1
                else:
                    first_tokens.append(request)
                token_times_s += [now_s] * num_new
            if commit.block_hashes:
                request.block_hashes.extend(commit.block_hashes)
            reason = commit.finish_reason
            if share is not None and request.runs_since <= number and reason is not error:
                request.stroke = share.stroke
                # accepted drafts are computed; the last new token is not computed yet
                num_new = num_new if share.num_draft_tokens else share.num_scheduled_tokens
                num_before, end = request.num_computed_tokens, share.num_computed_tokens + num_new
                request.num_computed_tokens = end
                if end // page_size > num_before // page_size or commit.block_hashes or share.num_draft_tokens:
                    computed.append((request, share))
            if reason is not None:
                ended.append((request, reason))
        taken.computed, taken.first_tokens = computed, first_tokens
        taken.gaps, taken.num_tokens = gaps.items(), num_here
        for request, reason in ended:
            is_lent = request.arrival is not None and request.arrival.lend_as is not None
            self._gone(request, reason, taken, goes_on=is_lent and reason is FinishReason.LENGTH)

    def _finished_by_caller(self, event: RequestFinishedByCaller, taken: EventChanges) -> None:
        if taken.place.name == GATEWAY:
            self._ended_from_outside(event, taken)
            return
        request = taken.place.requests.get(event.request_id)
        if request is not None:
            # the gateway reports an abort first, unless another process is to continue it
            is_abort = event.reason is FinishReason.ABORT and request.told is None
            self._gone(request, event.reason, taken, event, goes_on=is_abort and is_pool_process(event.process))

    def _kv_checked(self, event: KVBlockChecked, taken: EventChanges) -> None:
        place = taken.place
        for request_id in event.suspects.started_over:
            request = place.requeue(request_id, RequestStatus.WAITING)
            if request is not None and request.is_here:
                request.times.scheduled_s = None
        for request_id in event.suspects.ended:
            request = place.requests.get(request_id)
            if request is not None:
                self._gone(request, FinishReason.ERROR, taken, event)

    def _ended_from_outside(self, event: RequestFinishedByCaller, taken: EventChanges) -> None:
        """Record that the gateway ended a sequence; a process that runs it reports the time."""
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            self._told.put(event.request_id, event)
        elif sequence.is_here:
            sequence.told = event
        else:
            self._over.put(event.request_id, True)
            self._end(sequence, event.reason, taken, event)

    # ------------------------------------------------------------------ sequences

    def _gone(
        self,
        request: RequestState,
        reason: FinishReason,
        taken: EventChanges,
        event: Event | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """End a request at its place. Its sequence ends as well, unless another process goes on with it."""
        del taken.place.requests[request.request_id]
        taken.gone.append((request, reason))
        was_here = taken.place.release(request)
        if was_here and not goes_on:
            self._end(request, reason, taken, event)
        elif was_here and request.told is not None:
            self._end(request, request.told.reason, taken, request.told)

    def _end(self, sequence: RequestState, reason: FinishReason, taken: EventChanges, event: Event | None) -> None:
        """End a sequence: with its last token, unless an event has ended it otherwise."""
        token_times_s = sequence.times.token_times_s
        if isinstance(event, RequestFinishedByCaller):
            if event.num_output_tokens is not None:
                del token_times_s[event.num_output_tokens :]
            if reason in (FinishReason.STOP, FinishReason.LENGTH) and token_times_s:
                event = None
        sequence.times.finish_s = None if event is None else event.time_s
        sequence.finish_reason = reason
        if self._sequences.get(sequence.sequence_id) is sequence:
            del self._sequences[sequence.sequence_id]
        sequence.is_last = all(one.finish_reason is not None for one in sequence.siblings)
        if sequence.is_last:
            del self._requests[request_of(sequence.sequence_id)]
        taken.ended.append(sequence)


def _go_on(before: RequestState, request: RequestState, arrival: Arrival) -> None:
    """Continue a sequence at another process with its delivered tokens; later tokens are computed again."""
    siblings, times = before.siblings, before.times
    siblings[siblings.index(before)] = request
    del times.token_times_s[max(0, arrival.num_prompt_tokens - before.num_prompt_tokens) :]
    request.siblings, request.times, request.told = siblings, times, before.told
    request.num_prompt_tokens, request.num_cached_at_first = before.num_prompt_tokens, before.num_cached_at_first
    request.max_tokens = len(times.token_times_s) + arrival.max_tokens


def _scheduled(event: StepScheduled, taken: EventChanges) -> None:
    place, batch, requests = taken.place, event.batch, taken.place.requests
    grown: list[ScheduledRequest] = []
    for preemption in batch.preemptions:
        place.requeue(preemption.request_id, RequestStatus.PREEMPTED)
    if batch.admitted:
        taken.admitted = [admitted for admitted in batch.admitted if _is_first(admitted, place, event)]
    for share in batch.requests:  # this is done for every token
        request = requests.get(share.request_id)
        if request is None:  # it arrived before the history begins
            request = requests[share.request_id] = RequestState(share.request_id, None, place)
            request.status, request.runs_since = RequestStatus.RUNNING, 0
        request.share = share
        for update in share.block_tables:
            if update.block_ids:
                grown.append(share)
                break
    taken.step, taken.grown = DecidedStep(event), grown
    if not batch.is_empty:
        place.in_flight.append(taken.step)


def _is_first(admitted: AdmittedRequest, place: PlaceState, event: StepScheduled) -> bool:
    """Record that a request has left the queue; return whether it is the first time."""
    request = place.requests.get(admitted.request_id)
    if request is None:
        return False
    if request.status is not RequestStatus.PREEMPTED:  # else its own blocks count as cached
        request.num_cached_tokens = admitted.num_cached_tokens
    place.move_to(request, RequestStatus.RUNNING)
    request.runs_since = event.batch.step
    if not request.is_here or request.times.scheduled_s is not None:
        return False
    request.times.scheduled_s = event.time_s
    request.num_cached_at_first = admitted.num_cached_tokens
    return True


def _paired(step: DecidedStep | None, commits: tuple[Commit, ...]) -> Iterable[tuple[ScheduledRequest | None, Commit]]:
    """Return commits with their shares of the step. Both have the same order; ended requests have no commit."""
    if step is not None and len(step.batch.requests) == len(commits):
        return zip(step.batch.requests, commits, strict=True)
    return [(None if step is None else step.shares.get(commit.request_id), commit) for commit in commits]
