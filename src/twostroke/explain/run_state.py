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

from collections import defaultdict
from collections.abc import Iterable, Sequence

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
from twostroke.explain.engine_state import EngineState, LocalRequest, SequenceState
from twostroke.explain.names import GATEWAY, is_of_pool, place_of, request_of, sequence_of
from twostroke.explain.remembered import Remembered
from twostroke.explain.step import DecidedStep
from twostroke.outputs import RequestTimes
from twostroke.request import Arrival, FinishReason, RequestStatus


class Taken:
    """What one event has changed; each attribute is of the events that it names."""

    left: EngineState | None = None
    """RequestArrived: the place that no longer counts the sequence."""
    step: DecidedStep | None = None
    """StepScheduled, StepCommitted: the step; None of a result whose decision is not known."""
    admitted: Sequence[AdmittedRequest] = ()
    """StepScheduled: those that run for the first time."""
    grown: Sequence[ScheduledRequest] = ()
    """StepScheduled: shares with new blocks."""
    computed: Sequence[tuple[LocalRequest, ScheduledRequest]] = ()
    """StepCommitted: requests that still hold what the step computed, with their shares of it; those only that have
    filled a page, or verified drafts."""
    first_tokens: Sequence[SequenceState] = ()
    """StepCommitted: sequences with their first token."""
    gaps: Iterable[tuple[tuple[float, int], int]] = ()
    """StepCommitted: seconds since the token before, and how many tokens came; and of how many sequences."""
    num_tokens: int = 0
    """StepCommitted: tokens of sequences that are here."""

    def __init__(self, engine: EngineState) -> None:
        self.engine = engine
        """Where; what a gateway says is of a place without requests."""
        self.gone: list[tuple[LocalRequest, FinishReason]] = []
        """Any: requests that have ended here."""
        self.ended: list[SequenceState] = []
        """Any: sequences that have ended."""


class RunState:
    """Follows all processes of a run, event by event."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineState] = {}
        """By place."""
        self._running: dict[str, EngineState] = {}
        """The same by process."""
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
        engine = self._running.get(event.process)
        if engine is None:
            place = place_of(event.process)
            engine = self._running[event.process] = self._engines.setdefault(place, EngineState(place))
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
            engine.started, engine.is_whole = event, True

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
        now_s, requests, page_size = event.time_s, engine.requests, engine.page_size
        number = -1 if step is None else step.batch.step
        num_here = 0
        gaps: defaultdict[tuple[float, int], int] = defaultdict(int)
        computed: list[tuple[LocalRequest, ScheduledRequest]] = []
        first_tokens: list[SequenceState] = []
        error = FinishReason.ERROR  # looked up once: it takes as long as a call
        ended: list[tuple[LocalRequest, FinishReason]] = []
        for share, commit in _paired(step, event.commits):  # this is done for every token
            num_new = commit.num_tokens
            request = requests.get(commit.request_id)
            if request is None:  # it ended while this step ran, or arrived before the first event
                continue
            sequence = request.sequence
            if num_new and sequence is not None and sequence.local is request:
                num_here += num_new
                token_times_s = sequence.times.token_times_s
                if token_times_s:
                    gaps[now_s - token_times_s[-1], num_new] += 1
                else:
                    first_tokens.append(sequence)
                token_times_s += [now_s] * num_new
            if commit.block_hashes:
                request.block_hashes.extend(commit.block_hashes)
            reason = commit.finish_reason
            if share is not None and request.runs_since <= number and reason is not error:
                request.stroke = share.stroke
                # of drafts, those that stood are valid; the last token accepted is not computed yet
                num_new = num_new if share.num_draft_tokens else share.num_scheduled_tokens
                num_before, end = request.num_computed_tokens, share.num_computed_tokens + num_new
                request.num_computed_tokens = end
                if end // page_size > num_before // page_size or commit.block_hashes or share.num_draft_tokens:
                    computed.append((request, share))
            if reason is not None:
                ended.append((request, reason))
        taken.computed, taken.first_tokens, taken.gaps, taken.num_tokens = (
            computed,
            first_tokens,
            gaps.items(),
            num_here,
        )
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
            request = engine.requeue(request_id, RequestStatus.WAITING)
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
    grown: list[ScheduledRequest] = []
    for preemption in batch.preemptions:
        engine.requeue(preemption.request_id, RequestStatus.PREEMPTED)
    if batch.admitted:
        taken.admitted = [admitted for admitted in batch.admitted if _is_first(admitted, engine, event)]
    for share in batch.requests:  # this is done for every token
        request = requests.get(share.request_id)
        if request is None:  # it came before the history begins
            request = requests[share.request_id] = LocalRequest(share.request_id, None, None, RequestStatus.RUNNING)
            request.runs_since = 0
        request.share = share
        for update in share.block_tables:
            if update.block_ids:
                grown.append(share)
                break
    taken.step, taken.grown = DecidedStep(event), grown
    if not batch.is_empty:
        engine.in_flight.append(taken.step)


def _is_first(admitted: AdmittedRequest, engine: EngineState, event: StepScheduled) -> bool:
    """Note that a request has left the queue; return whether it is the first time."""
    request = engine.requests.get(admitted.request_id)
    if request is None:
        return False
    if request.status is not RequestStatus.PREEMPTED:  # then it finds what it had computed itself
        request.num_cached_tokens = admitted.num_cached_tokens
    engine.move_to(request, RequestStatus.RUNNING)
    request.runs_since = event.batch.step
    sequence = request.sequence
    if sequence is None or sequence.local is not request or sequence.times.scheduled_s is not None:
        return False
    sequence.times.scheduled_s = event.time_s
    sequence.num_cached_tokens = admitted.num_cached_tokens
    return True


def _paired(step: DecidedStep | None, commits: tuple[Commit, ...]) -> Iterable[tuple[ScheduledRequest | None, Commit]]:
    """Commits with their shares of the step, which are in the same order; of those who have ended there is none."""
    if step is not None and len(step.batch.requests) == len(commits):
        return zip(step.batch.requests, commits, strict=True)
    return [(None if step is None else step.shares.get(commit.request_id), commit) for commit in commits]
