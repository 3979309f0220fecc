"""RunState: what the event log says of a run, folded once for all who read it (docs/decisions/059).

    RunState             every place, and every sequence that has not ended
      EngineState        a place: the process that runs there now, its requests, its steps in flight
        LocalRequest     a sequence as one process has it
          SequenceState  the same sequence in all processes that run it, one after the other
    Taken                what one event has changed; views count it, show it or explain it

A view asks no event for what is here. The scheduler's own account of a request is `request.Request`; this one is read
off from outside, from logs with holes, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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
from twostroke.explain.names import GATEWAY, is_of_pool, place_of, request_of, sequence_of
from twostroke.explain.remembered import Remembered
from twostroke.explain.step import DecidedStep
from twostroke.outputs import RequestTimes
from twostroke.request import Arrival, FinishReason, RequestStatus


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence whose arrival is known."""

    sequence_id: str
    siblings: list[SequenceState]
    """All sequences of its request."""
    num_prompt_tokens: int
    max_tokens: int
    times: RequestTimes
    engine: EngineState
    """Where it is, or was last."""
    local: LocalRequest | None = None
    """What it is there; None between two processes, and when it has ended."""
    num_cached_tokens: int = 0
    """Of its prompt, when it first ran."""
    told: RequestFinishedByCaller | None = None
    """It was ended from outside, and the process that runs it has not said so yet."""
    finish_reason: FinishReason | None = None
    is_last: bool = False
    """It has ended as the last one of its request."""


@dataclass(slots=True, eq=False)
class LocalRequest:
    """A sequence as one process has it, by its name there; it may go on elsewhere before this process ends it."""

    request_id: str
    arrival: Arrival | None
    """None of one that came before the history begins."""
    sequence: SequenceState | None = None
    """None likewise, and of one that had ended when it came here."""
    status: RequestStatus = RequestStatus.WAITING
    share: ScheduledRequest | None = None
    """Its part in the last step decided for it."""
    stroke: str = ""
    """Of the last step that computed anything of it."""
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_computed_tokens: int = 0
    """By the results so far."""
    num_cached_tokens: int = 0
    """When it was admitted, the time after a preemption aside."""
    num_preemptions: int = 0
    queued_in_step: int = -1
    """Step that was decided when it last lost its blocks. Results of earlier ones are of blocks that it has no more."""

    @property
    def is_running(self) -> bool:
        """Whether it holds blocks."""
        return self.status is RequestStatus.RUNNING

    @property
    def is_here(self) -> bool:
        """Whether its arrival is known, and no other process goes on with its sequence."""
        return self.sequence is not None and self.sequence.local is self


class EngineState:
    """A place of which one process after the other runs sequences."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.started: EngineStarted | None = None
        """How its process began; None before it has said so."""
        self.is_whole = False
        """The history knows it from its start on."""
        self.requests: dict[str, LocalRequest] = {}
        """Those that have not ended here, by their names here."""
        self.num_here = 0
        """Of these, those that are here and nowhere else."""
        self.num_running = 0
        """Of num_here, those that run."""
        self.in_flight: deque[DecidedStep] = deque()
        """Decided, results to come; the first is running."""
        self.next_step = 0
        """Number behind that of the last step with tokens."""
        self.last_step: DecidedStep | None = None
        """The last one that gave its result."""
        self.last_result_s = float("-inf")

    def arrival_of(self, request_id: str) -> Arrival | None:
        """Return how a request arrived that has not ended; None where that is not known."""
        request = self.requests.get(request_id)
        return None if request is None else request.arrival

    @property
    def num_tokens_held(self) -> dict[str, int]:
        """Return the running requests, with their tokens that have a place in KV memory."""
        shares = {name: request.share for name, request in self.requests.items() if request.is_running}
        return {name: 0 if share is None else share.token_range.stop for name, share in shares.items()}

    def step_running_at(self, time_s: float) -> DecidedStep | None:
        """Return the step that was running at a moment that is not long ago."""
        if self.in_flight:
            return self.in_flight[0]
        return self.last_step if self.last_result_s > time_s else None

    def move_to(self, request: LocalRequest, status: RequestStatus) -> None:
        """Give a request another status."""
        if request.is_here:
            self.num_running += (status is RequestStatus.RUNNING) - request.is_running
        request.status = status

    def requeue(self, request_id: str, status: RequestStatus, step: int) -> LocalRequest | None:
        """Take a request's blocks away, while `step` is decided; return it, if it is known."""
        request = self.requests.get(request_id)
        if request is not None:
            self.move_to(request, status)
            request.num_computed_tokens, request.queued_in_step = 0, step
            request.num_preemptions += status is RequestStatus.PREEMPTED
        return request

    def let_go(self, request: LocalRequest) -> SequenceState | None:
        """Another process, or nobody, goes on with a request; return its sequence, if that was here."""
        sequence = request.sequence
        if sequence is None or sequence.local is not request:
            return None
        self.num_here -= 1
        self.num_running -= request.is_running
        sequence.local = None
        return sequence

    def done(self, event: StepCommitted) -> DecidedStep | None:
        """Return the step of a result, which is in flight no more; None of one that the history does not know."""
        step = None
        while self.in_flight and self.in_flight[0].batch.step <= event.step:
            step = self.last_step = self.in_flight.popleft()
            self.last_result_s = event.time_s
        if step is None or step.batch.step != event.step:
            return None
        step.done_s = event.time_s
        return step


class Taken:
    """What one event has changed; each attribute is of the events that it names."""

    def __init__(self, engine: EngineState) -> None:
        self.engine = engine
        """Where; what a gateway says is of a place without requests."""
        self.left: EngineState | None = None
        """RequestArrived: the place that no longer counts the sequence."""
        self.step: DecidedStep | None = None
        """StepScheduled, StepCommitted: the step; None of a result whose decision is not known."""
        self.admitted: list[AdmittedRequest] = []
        """StepScheduled: those that run for the first time."""
        self.computed: list[tuple[LocalRequest, ScheduledRequest]] = []
        """StepCommitted: requests that still hold what the step computed, and their shares of it."""
        self.first_tokens: list[SequenceState] = []
        """StepCommitted: sequences with their first token."""
        self.gaps: defaultdict[tuple[float, int], int] = defaultdict(int)
        """StepCommitted: seconds since the token before, and how many tokens came; the same for nearly everybody."""
        self.num_tokens = 0
        """StepCommitted: tokens of sequences that are here."""
        self.gone: list[tuple[LocalRequest, FinishReason]] = []
        """Any: requests that have ended here."""
        self.ended: list[SequenceState] = []
        """Any: sequences that have ended."""


class RunState:
    """Follows all processes of a run, event by event."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineState] = {}
        self._sequences: dict[str, SequenceState] = {}
        self._requests: dict[str, list[SequenceState]] = {}
        """All sequences of each request, while one has not ended."""
        self._told = Remembered[str, RequestFinishedByCaller]()
        """Ends of sequences that nobody has seen yet."""
        self._over = Remembered[str, bool]()
        """Sequences that ended between two processes: the second may not know when it takes one in."""

    def is_over(self, sequence_id: str) -> bool:
        """Return whether a sequence ended between two processes."""
        return sequence_id in self._over

    def take(self, event: Event) -> Taken:
        """Take in one event, in order."""
        place = place_of(event.process)
        engine = self._engines.get(place)
        if engine is None:
            engine = self._engines[place] = EngineState(place)
        taken = Taken(engine)
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
                for engine in self._engines.values():
                    engine.is_whole = False
            case _:
                pass
        return taken

    # ------------------------------------------------------------------ events

    def _lost(self, event: EngineStarted | EngineLost, taken: Taken) -> None:
        """Whoever is still there was run by a process that died; of pools it goes on elsewhere."""
        engine, goes_on = taken.engine, is_of_pool(event.process)
        for request in list(engine.requests.values()):
            self._gone(request, FinishReason.ERROR, taken, event, goes_on=goes_on)
        engine.in_flight.clear()
        if isinstance(event, EngineStarted):
            engine.started, engine.is_whole, engine.next_step = event, True, 0

    def _arrived(self, event: RequestArrived, taken: Taken) -> None:
        engine, arrival, name = taken.engine, event.arrival, event.request_id
        before = engine.requests.get(name)
        if before is not None:
            engine.let_go(before)
        request = engine.requests[name] = LocalRequest(name, arrival, block_hashes=list(arrival.block_hashes))
        sequence_id = sequence_of(name)
        if sequence_id in self._over:
            return
        sequence = self._sequences.get(sequence_id)
        goes_on = arrival.import_id is not None or name != sequence_id
        if sequence is None or not (goes_on or sequence.local is None):
            sequence = self._begin(sequence_id, arrival, engine)
        else:  # with what of it was delivered; what came too late is made again
            if sequence.local is not None:
                sequence.engine.let_go(sequence.local)
                taken.left = sequence.engine
            token_times_s = sequence.times.token_times_s
            del token_times_s[max(0, arrival.num_prompt_tokens - sequence.num_prompt_tokens) :]
            sequence.max_tokens = len(token_times_s) + arrival.max_tokens
        sequence.engine, sequence.local, request.sequence = engine, request, sequence
        sequence.told = self._told.pop(sequence_id, sequence.told)
        engine.num_here += 1

    def _committed(self, event: StepCommitted, taken: Taken) -> None:
        engine = taken.engine
        step = taken.step = engine.done(event)
        now_s, requests, gaps = event.time_s, engine.requests, taken.gaps
        number = -1 if step is None else step.batch.step
        num_generated = 0
        running, error = RequestStatus.RUNNING, FinishReason.ERROR  # looked up once: it takes as long as a call
        ended: list[tuple[LocalRequest, FinishReason]] = []
        for share, commit in _paired(step, event.commits):  # this is done for every token
            num_new = commit.num_tokens
            num_generated += num_new
            request = requests.get(commit.request_id)
            if request is None:  # it ended while this step ran, or arrived before the first event
                continue
            sequence = request.sequence
            if num_new and sequence is not None and sequence.local is request:
                taken.num_tokens += num_new
                token_times_s = sequence.times.token_times_s
                if token_times_s:
                    gaps[now_s - token_times_s[-1], num_new] += 1
                else:
                    taken.first_tokens.append(sequence)
                token_times_s.extend([now_s] * num_new)
            if commit.block_hashes:
                request.block_hashes.extend(commit.block_hashes)
            reason = commit.finish_reason
            if (
                share is not None
                and request.status is running
                and request.queued_in_step <= number
                and reason is not error
            ):
                request.stroke = share.stroke
                # of drafts, those that stood are valid; the last token accepted is not computed yet
                num_new = num_new if share.num_draft_tokens else share.num_scheduled_tokens
                request.num_computed_tokens = share.num_computed_tokens + num_new
                taken.computed.append((request, share))
            if reason is not None:
                ended.append((request, reason))
        if step is not None:
            step.num_generated = num_generated
        for request, reason in ended:
            is_lent = request.arrival is not None and request.arrival.lend_as is not None
            self._gone(request, reason, taken, goes_on=is_lent and reason is FinishReason.LENGTH)

    def _finished_by_caller(self, event: RequestFinishedByCaller, taken: Taken) -> None:
        if taken.engine.place == GATEWAY:
            self._ended_from_outside(event, taken)
            return
        request = taken.engine.requests.get(event.request_id)
        if request is not None:
            # the gateway would have told an abort before, if nobody were to go on with it
            is_told = request.sequence is not None and request.sequence.told is not None
            goes_on = event.reason is FinishReason.ABORT and is_of_pool(event.process) and not is_told
            self._gone(request, event.reason, taken, event, goes_on=goes_on)

    def _kv_checked(self, event: KVBlockChecked, taken: Taken) -> None:
        engine = taken.engine
        for request_id in event.suspects.started_over:
            request = engine.requeue(request_id, RequestStatus.WAITING, engine.next_step)
            if request is not None and request.sequence is not None and request.is_here:
                request.sequence.times.scheduled_s = None
        for request_id in event.suspects.ended:
            request = engine.requests.get(request_id)
            if request is not None:
                self._gone(request, FinishReason.ERROR, taken, event)

    def _ended_from_outside(self, event: RequestFinishedByCaller, taken: Taken) -> None:
        """A gateway says that a sequence has ended, wherever it is; a process that runs it tells when."""
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            self._told.put(event.request_id, event)
        elif sequence.local is not None:
            sequence.told = event
        else:
            self._over.put(event.request_id, True)
            self._end(sequence, event.reason, taken, event)

    # ------------------------------------------------------------------ sequences

    def _begin(self, sequence_id: str, arrival: Arrival, engine: EngineState) -> SequenceState:
        siblings = self._requests.setdefault(request_of(sequence_id), [])
        times = RequestTimes(arrival.arrival_time_s)
        sequence = SequenceState(sequence_id, siblings, arrival.num_prompt_tokens, arrival.max_tokens, times, engine)
        siblings.append(sequence)
        self._sequences[sequence_id] = sequence
        return sequence

    def _gone(
        self,
        request: LocalRequest,
        reason: FinishReason,
        taken: Taken,
        event: Event | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """End a request where it is. Its sequence ends as well, unless another process goes on with it."""
        del taken.engine.requests[request.request_id]
        taken.gone.append((request, reason))
        sequence = taken.engine.let_go(request)
        if sequence is not None and not goes_on:
            self._end(sequence, reason, taken, event)
        elif sequence is not None and sequence.told is not None:
            self._end(sequence, sequence.told.reason, taken, sequence.told)

    def _end(self, sequence: SequenceState, reason: FinishReason, taken: Taken, event: Event | None) -> None:
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


def _scheduled(event: StepScheduled, taken: Taken) -> None:
    engine, batch, requests = taken.engine, event.batch, taken.engine.requests
    for preemption in batch.preemptions:
        engine.requeue(preemption.request_id, RequestStatus.PREEMPTED, batch.step)
    for admitted in batch.admitted:
        request = requests.get(admitted.request_id)
        if request is None:
            continue
        if request.status is not RequestStatus.PREEMPTED:  # then it finds what it had computed itself
            request.num_cached_tokens = admitted.num_cached_tokens
        engine.move_to(request, RequestStatus.RUNNING)
        sequence = request.sequence
        if sequence is not None and sequence.local is request and sequence.times.scheduled_s is None:
            sequence.times.scheduled_s = event.time_s
            sequence.num_cached_tokens = admitted.num_cached_tokens
            taken.admitted.append(admitted)
    for share in batch.requests:  # this is done for every token
        request = requests.get(share.request_id)
        if request is None:  # it came before the history begins
            request = requests[share.request_id] = LocalRequest(share.request_id, None, status=RequestStatus.RUNNING)
        request.share = share
    taken.step = DecidedStep(event)
    if not batch.is_empty:
        engine.in_flight.append(taken.step)
        engine.next_step = batch.step + 1


def _paired(step: DecidedStep | None, commits: tuple[Commit, ...]) -> Iterable[tuple[ScheduledRequest | None, Commit]]:
    """Commits with their shares of the step, which are in the same order; of those who have ended there is none."""
    if step is not None and len(step.batch.requests) == len(commits):
        return zip(step.batch.requests, commits, strict=True)
    return [(None if step is None else step.shares.get(commit.request_id), commit) for commit in commits]
