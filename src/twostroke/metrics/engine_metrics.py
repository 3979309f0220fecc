"""EngineMetrics: the event log, counted. What each number means is said in families.py."""

from __future__ import annotations

from collections import defaultdict

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
from twostroke.explain.names import is_of_pool
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments
from twostroke.metrics.journeys import Journey, Journeys
from twostroke.metrics.kv_checks import KVCheckCounts
from twostroke.metrics.latencies import Latencies, SizeHistograms
from twostroke.metrics.load import LoadGauges
from twostroke.metrics.slo import SloCounts
from twostroke.metrics.speculation import DraftCounts
from twostroke.metrics.transfers import TransferCounts
from twostroke.request import FinishReason


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
