"""EngineMetrics: the event log, counted. What each number means is said in families.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.batch import AdmittedRequest, CacheEnd, KVMoves
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    KVBlockChecked,
    KVImportEnded,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.names import ENGINE, GATEWAY, is_of_pool, place_of, request_of, sequence_of
from twostroke.explain.remembered import Remembered
from twostroke.metrics import families
from twostroke.metrics.counts import (
    DraftCounts,
    KVCheckCounts,
    Latencies,
    LoadGauges,
    SizeHistograms,
    SloCounts,
    TransferCounts,
)
from twostroke.metrics.instruments import Instruments
from twostroke.outputs import RequestTimes
from twostroke.request import Arrival, FinishReason


class Counter(Protocol):
    """Counts sequences of one process after the other."""

    def forget(self, name: str) -> None:
        """A sequence that is there, by this name, goes on elsewhere."""
        ...

    def count_end(self, journey: Journey, finish_s: float | None, reason: FinishReason) -> None:
        """It has ended, with its last token unless `finish_s` says otherwise."""
        ...


@dataclass(slots=True, eq=False)
class Journey:
    """A sequence that has not ended."""

    sequence_id: str
    counter: Counter
    """Of the process where it is, or was last."""
    arrival: Arrival
    """There."""
    num_prompt_tokens: int
    max_tokens: int
    times: RequestTimes
    name_there: str | None = None
    """None between two processes."""
    num_cached_tokens: int = 0
    is_running: bool = False
    told: RequestFinishedByCaller | None = None
    """It was ended from outside, and the process that runs it has not said so yet."""

    @property
    def request(self) -> str:
        """Whose sequence it is."""
        return request_of(self.sequence_id)

    def leave(self) -> None:
        """It is between two processes now, or over if it was to end."""
        self.name_there, self.is_running = None, False
        if self.told is not None:
            self.end_as(self.told)

    def go_on(self, event: RequestArrived, counter: Counter) -> None:
        """Another process has taken it in, with what of it was delivered; what came too late is made again."""
        if self.name_there is not None:
            self.counter.forget(self.name_there)
        arrival = event.arrival
        del self.times.token_times_s[max(0, arrival.num_prompt_tokens - self.num_prompt_tokens) :]
        self.max_tokens = len(self.times.token_times_s) + arrival.max_tokens
        self.arrival, self.counter, self.is_running = arrival, counter, False

    def end_as(self, event: RequestFinishedByCaller) -> None:
        """Ends it the way somebody outside wants it."""
        token_times_s = self.times.token_times_s
        if event.num_output_tokens is not None:
            del token_times_s[event.num_output_tokens :]
        ends_with_its_last_token = event.reason in (FinishReason.STOP, FinishReason.LENGTH) and token_times_s
        self.counter.count_end(self, None if ends_with_its_last_token else event.time_s, event.reason)


@dataclass(slots=True, eq=False)
class RequestSize:
    """The sequences of one request."""

    num_sequences: int = 0
    num_live: int = 0
    most_output_tokens: int = 0


@dataclass(slots=True, eq=False)
class Journeys:
    """All sequences of all processes."""

    _live: dict[str, Journey] = field(default_factory=dict[str, Journey])
    _requests: dict[str, RequestSize] = field(default_factory=dict[str, RequestSize])
    _told: Remembered[str, RequestFinishedByCaller] = field(default_factory=Remembered[str, RequestFinishedByCaller])
    """Ends of sequences that nobody has seen yet."""
    _over: Remembered[str, bool] = field(default_factory=Remembered[str, bool])
    """Sequences that ended between two processes: the second may not know when it takes one in."""

    def taken_in(self, event: RequestArrived, counter: Counter) -> Journey | None:
        """A process has taken a sequence in; None: it is over, and that process will hear of it."""
        arrival, sequence_id = event.arrival, sequence_of(event.request_id)
        if sequence_id in self._over:
            return None
        journey = self._live.get(sequence_id)
        if journey is not None and (arrival.import_id is not None or event.request_id != sequence_id):
            journey.go_on(event, counter)
        else:
            times = RequestTimes(arrival.arrival_time_s)
            journey = Journey(sequence_id, counter, arrival, arrival.num_prompt_tokens, arrival.max_tokens, times)
            self._live[sequence_id] = journey
            size = self._requests.setdefault(journey.request, RequestSize())
            size.num_sequences += 1
            size.num_live += 1
        journey.name_there = event.request_id
        journey.told = self._told.pop(sequence_id, journey.told)
        return journey

    def ended(self, journey: Journey) -> RequestSize | None:
        """It is counted; the whole request, if that was its last sequence."""
        if self._live.get(journey.sequence_id) is journey:
            del self._live[journey.sequence_id]
        size = self._requests[journey.request]
        size.num_live -= 1
        size.most_output_tokens = max(size.most_output_tokens, len(journey.times.token_times_s))
        return None if size.num_live else self._requests.pop(journey.request)

    def ended_from_outside(self, event: RequestFinishedByCaller) -> None:
        """The gateway says so; a process that runs it tells when."""
        journey = self._live.get(event.request_id)
        if journey is None:
            self._told.put(event.request_id, event)
        elif journey.name_there is not None:
            journey.told = event
        else:
            self._over.put(event.request_id, True)
            journey.end_as(event)


# ---------------------------------------------------------------------- one engine


class EngineMetrics:
    """Counts an engine's events; an `EventLog`.

    For one thread: the scrape (exposition.py) must run in the same one. A token costs about half a microsecond.

    Args:
        model_name: what clients call the model; a label of every sample.
        engine: which engine of several; the other label.
        journeys: of the sequences of all engines, between which they go on; None: there is no other.
    """

    def __init__(self, model_name: str, engine: str = "0", journeys: Journeys | None = None) -> None:
        self.labels = {"model_name": model_name, "engine": engine}
        self.instruments = Instruments()
        self._journeys = Journeys() if journeys is None else journeys
        self._sequences: dict[str, Journey] = {}
        """Those that are here, by their names here."""
        self._num_running = 0
        self._load = LoadGauges(self.instruments)
        self._kv_checks = KVCheckCounts(self.instruments)
        self._transfers = TransferCounts(self.instruments)
        self._drafts = DraftCounts(self.instruments)
        self._latencies = Latencies(self.instruments)
        self._sizes = SizeHistograms(self.instruments)
        self._slo = SloCounts(self.instruments)
        number = self.instruments.number
        self._prompt_tokens = number(families.PROMPT_TOKENS)
        self._cached_tokens = number(families.PROMPT_TOKENS_CACHED)
        self._generation_tokens = number(families.GENERATION_TOKENS)
        self._ended = number(families.REQUEST_SUCCESS)
        self._preemptions = number(families.NUM_PREEMPTIONS)
        self._offloaded = number(families.KV_OFFLOADED_BLOCKS)
        self._moved(KVMoves())
        self._cache_queries = number(families.PREFIX_CACHE_QUERIES)
        self._cache_hits = number(families.PREFIX_CACHE_HITS)
        self._steps = number(families.ENGINE_STEPS)
        self._starts = number(families.ENGINE_STARTS)
        self._step_tokens = self.instruments.distribution(families.ITERATION_TOKENS)
        for reason in FinishReason:
            self._ended.set(0, reason)

    def observe(self, event: Event) -> None:
        """Counts one event; they come in order."""
        match event:
            case StepCommitted():
                self._committed(event)
            case StepScheduled():
                self._scheduled(event)
            case RequestArrived():
                self._arrived(event)
            case RequestFinishedByCaller():
                self._finished_by_caller(event)
            case KVBlockChecked():
                self._kv_checked(event)
            case KVImportEnded():
                self._transfers.counted(event)
            case EngineStarted():
                self._lost(event)
                self._started(event)
            case EngineLost():
                self._lost(event)
            case _:
                return
        self._load.count(self._num_running, len(self._sequences) - self._num_running)

    append = observe
    """As an EventLog has it."""

    def sequence(self, name: str) -> Journey | None:
        """One that is here, by its name here."""
        return self._sequences.get(name)

    # ------------------------------------------------------------------ events

    def _lost(self, event: EngineStarted | EngineLost) -> None:
        """Whoever is still there was run by a process that died; of pools it goes on elsewhere."""
        for name in list(self._sequences):
            if is_of_pool(event.process):
                self._leave(name)
            else:
                self._end(name, FinishReason.ERROR, event.time_s)

    def _started(self, event: EngineStarted) -> None:
        self._starts.add(1)
        self._load.started(event)
        self._slo.started(event)

    def _arrived(self, event: RequestArrived) -> None:
        journey = self._journeys.taken_in(event, self)
        if journey is not None:
            self._sequences[event.request_id] = journey

    def _scheduled(self, event: StepScheduled) -> None:
        batch = event.batch
        for preemption in batch.preemptions:
            self._preemptions.add(1)
            self._set_running(preemption.request_id, False)
        for admitted in batch.admitted:
            self._admitted(admitted, event.time_s)
        self._load.decided(batch)
        self._drafts.decided(batch)
        if batch.kv_moves is not None:
            self._moved(batch.kv_moves)
        if not batch.is_empty:
            self._step_tokens.observe(batch.num_tokens)

    def _moved(self, moves: KVMoves) -> None:
        for copies, move in ((moves.stores, "stored"), (moves.loads, "loaded"), (moves.prefetches, "prefetched")):
            self._offloaded.add(len(copies), move)

    def _admitted(self, admitted: AdmittedRequest, time_s: float) -> None:
        sequence = self._set_running(admitted.request_id, True)
        if sequence is None or sequence.times.scheduled_s is not None:
            return
        sequence.times.scheduled_s = time_s
        sequence.num_cached_tokens = admitted.num_cached_tokens
        if admitted.cache_end not in (CacheEnd.DISABLED, CacheEnd.NOT_READ):
            self._cache_queries.add(admitted.num_tokens)
            self._cache_hits.add(admitted.num_cached_tokens)
            self._load.looked_up(admitted.num_tokens, admitted.num_cached_tokens)

    def _committed(self, event: StepCommitted) -> None:
        now_s, sequences = event.time_s, self._sequences
        gaps: defaultdict[tuple[float, int], int] = defaultdict(int)
        """The same for nearly everybody: observed once for all."""
        num_tokens = 0
        ended: list[tuple[str, FinishReason]] = []
        for commit in event.commits:
            sequence = sequences.get(commit.request_id)
            if sequence is None:  # it ended while this step ran, or arrived before the first event
                continue
            num_new = commit.num_tokens
            if num_new:
                num_tokens += num_new
                token_times_s = sequence.times.token_times_s
                if token_times_s:
                    gaps[now_s - token_times_s[-1], num_new] += 1
                else:
                    self._first_token(sequence, now_s)
                token_times_s.extend([now_s] * num_new)
            if commit.finish_reason is not None:
                ended.append((commit.request_id, commit.finish_reason))
        for (gap_s, num_new), times in gaps.items():
            self._latencies.gap.observe(gap_s, times)
            self._latencies.itl.observe(gap_s / num_new, times * num_new)
        self._steps.add(1)
        self._drafts.committed(event.commits)
        self._generation_tokens.add(num_tokens)
        self._load.generated(num_tokens, now_s)
        for name, reason in ended:
            if reason is FinishReason.LENGTH and sequences[name].arrival.lend_as is not None:
                self._leave(name)
            else:
                self._end(name, reason, None)

    def _first_token(self, sequence: Journey, now_s: float) -> None:
        self._latencies.ttft.observe(now_s - sequence.times.arrival_s)
        self._prompt_tokens.add(sequence.num_prompt_tokens)
        self._cached_tokens.add(sequence.num_cached_tokens)

    def _finished_by_caller(self, event: RequestFinishedByCaller) -> None:
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            return
        is_told = sequence.told is not None or event.reason is not FinishReason.ABORT
        if is_told or not is_of_pool(event.process):
            self.forget(event.request_id)
            sequence.end_as(event)
        else:  # the gateway would have said so before, if nobody were to go on with it
            self._leave(event.request_id)

    def _kv_checked(self, event: KVBlockChecked) -> None:
        self._kv_checks.counted(event)
        self._load.quarantined(sum(block_id is not None for block_id in event.quarantined))
        for sequence_id in event.suspects.started_over:
            sequence = self._set_running(sequence_id, False)
            if sequence is not None:
                sequence.times.scheduled_s = None
        for sequence_id in event.suspects.ended:
            if sequence_id in self._sequences:
                self._end(sequence_id, FinishReason.ERROR, event.time_s)

    # ------------------------------------------------------------------ sequences

    def _set_running(self, name: str, is_running: bool) -> Journey | None:
        sequence = self._sequences.get(name)
        if sequence is not None and sequence.is_running != is_running:
            sequence.is_running = is_running
            self._num_running += 1 if is_running else -1
        return sequence

    def _end(self, name: str, reason: FinishReason, finish_s: float | None) -> None:
        """A sequence that is here has ended."""
        sequence = self._sequences[name]
        self.forget(name)
        self.count_end(sequence, finish_s, reason)

    def _leave(self, name: str) -> None:
        """A sequence that is here goes on elsewhere."""
        sequence = self._sequences[name]
        self.forget(name)
        sequence.leave()

    def forget(self, name: str) -> None:
        """See Counter."""
        self._set_running(name, False)
        del self._sequences[name]
        self._load.count(self._num_running, len(self._sequences) - self._num_running)

    def count_end(self, journey: Journey, finish_s: float | None, reason: FinishReason) -> None:
        """See Counter."""
        journey.times.finish_s = finish_s
        num_output_tokens = len(journey.times.token_times_s)
        self._ended.add(1, reason)
        self._sizes.sequence_ended(journey.num_prompt_tokens, num_output_tokens)
        if num_output_tokens:
            self._latencies.ended(journey.times)
            self._slo.ended(journey.times)
        size = self._journeys.ended(journey)
        if size is not None:
            self._sizes.request_ended(size.num_sequences, journey.max_tokens, size.most_output_tokens)


# ---------------------------------------------------------------------- all engines


class FleetMetrics:
    """Gives each event to whoever counts its process; processes that came one after the other are counted as one.

    Args:
        model_name: what clients call the model.
        appeared: hears of a process that is new.
    """

    def __init__(self, model_name: str, appeared: Callable[[EngineMetrics], object]) -> None:
        self._model_name = model_name
        self._appeared = appeared
        self._journeys = Journeys()
        self._by_place: dict[str, EngineMetrics] = {}

    def of(self, place: str) -> EngineMetrics:
        """Those of one place, which is a label of theirs: "prefill-0"; an engine that is one process is "0"."""
        if place not in self._by_place:
            label = "0" if place == ENGINE else place
            self._by_place[place] = EngineMetrics(self._model_name, label, self._journeys)
            self._appeared(self._by_place[place])
        return self._by_place[place]

    def observe(self, event: Event) -> None:
        """Counts one event; those of one process come in order."""
        place = place_of(event.process)
        if place != GATEWAY:
            self.of(place).observe(event)
        elif isinstance(event, RequestFinishedByCaller):
            self._journeys.ended_from_outside(event)
