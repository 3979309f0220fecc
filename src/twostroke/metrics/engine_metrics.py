"""`EngineMetrics`: counts of the event log; families.py defines what each number means."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.batch import CacheEnd, KVMoves, ScheduledBatch
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
from twostroke.explain.names import ENGINE, GATEWAY
from twostroke.explain.run_state import EventChanges, PlaceState, RequestState, RunState
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
from twostroke.request import FinishReason


class EngineMetrics:
    """Metrics of one engine, counted from its events.

    For one thread: the scrape (exposition.py) must run in the same one. A token costs about half a microsecond.

    Args:
        model_name: the model's name as clients know it; a label of every sample.
        engine: the engine's name among several; the other label.
    """

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self.labels = {"model_name": model_name, "engine": engine}
        self.instruments = Instruments()
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

    def count(self, event: Event, taken: EventChanges) -> None:
        """Count an event and the changes derived from it."""
        for sequence in taken.ended:
            self.count_end(sequence)
        match event:
            case StepCommitted():
                self._committed(event, taken)
            case StepScheduled():
                self._scheduled(event.batch, taken)
            case KVBlockChecked():
                self._kv_checks.count_event(event)
                self._load.quarantined(sum(block_id is not None for block_id in event.quarantined))
            case KVImportEnded():
                self._transfers.count_event(event)
            case EngineStarted():
                self._starts.add(1)
                self._load.started(event)
                self._slo.started(event)
            case RequestArrived() | RequestFinishedByCaller() | EngineLost():
                pass
            case _:
                return
        self.count_requests(taken.place)

    def count_requests(self, engine: PlaceState) -> None:
        """Update the numbers of running and waiting requests."""
        self._load.count(engine.num_running, engine.num_here - engine.num_running)

    def count_end(self, sequence: RequestState) -> None:
        """Count a sequence that has ended, in the metrics of the engine where it was last."""
        num_output_tokens = len(sequence.times.token_times_s)
        self._ended.add(1, str(sequence.finish_reason))
        self._sizes.sequence_ended(sequence.num_prompt_tokens, num_output_tokens)
        if num_output_tokens:
            self._latencies.ended(sequence.times)
            self._slo.ended(sequence.times)
        if sequence.is_last:
            longest = max(len(one.times.token_times_s) for one in sequence.siblings)
            self._sizes.request_ended(len(sequence.siblings), sequence.max_tokens, longest)

    def _scheduled(self, batch: ScheduledBatch, taken: EventChanges) -> None:
        if batch.preemptions:
            self._preemptions.add(len(batch.preemptions))
        for admitted in taken.admitted:
            if admitted.cache_end not in (CacheEnd.DISABLED, CacheEnd.NOT_READ):
                self._cache_queries.add(admitted.num_tokens)
                self._cache_hits.add(admitted.num_cached_tokens)
                self._load.looked_up(admitted.num_tokens, admitted.num_cached_tokens)
        self._load.decided(batch)
        self._drafts.decided(batch)
        if batch.kv_moves is not None:
            self._moved(batch.kv_moves)
        if not batch.is_empty:
            self._step_tokens.observe(batch.num_tokens)

    def _moved(self, moves: KVMoves) -> None:
        for copies, move in ((moves.stores, "stored"), (moves.loads, "loaded"), (moves.prefetches, "prefetched")):
            self._offloaded.add(len(copies), move)

    def _committed(self, event: StepCommitted, taken: EventChanges) -> None:
        for sequence in taken.first_tokens:
            self._latencies.ttft.observe(event.time_s - sequence.times.arrival_s)
            self._prompt_tokens.add(sequence.num_prompt_tokens)
            self._cached_tokens.add(sequence.num_cached_at_first)
        for (gap_s, num_new), times in taken.gaps:
            self._latencies.gap.observe(gap_s, times)
            self._latencies.itl.observe(gap_s / num_new, times * num_new)
        self._steps.add(1)
        self._drafts.committed(event.commits)
        self._generation_tokens.add(taken.num_tokens)
        self._load.generated(taken.num_tokens, event.time_s)


# ---------------------------------------------------------------------- all engines


class FleetMetrics:
    """Metrics of all engines, each event counted for its process; successive processes in one place count as one.

    Args:
        model_name: the model's name as clients know it.
        on_new_engine: called with the metrics of each new process.
    """

    def __init__(self, model_name: str, on_new_engine: Callable[[EngineMetrics], object]) -> None:
        self._model_name = model_name
        self._appeared = on_new_engine
        self._run = RunState()
        self._by_place: dict[str, EngineMetrics] = {}

    def of(self, place: str) -> EngineMetrics:
        """Return the metrics of one place, whose name is their label, such as "prefill-0"; a single process is "0"."""
        if place not in self._by_place:
            label = "0" if place == ENGINE else place
            self._by_place[place] = EngineMetrics(self._model_name, label)
            self._appeared(self._by_place[place])
        return self._by_place[place]

    def observe(self, event: Event) -> EventChanges:
        """Count an event and return the changes it causes; events of one process must come in order."""
        taken = self._run.take(event)
        place = taken.place.name
        if taken.left is not None:
            self.of(taken.left.name).count_requests(taken.left)
        if place != GATEWAY:
            self.of(place).count(event, taken)
        else:
            for sequence in taken.ended:
                self.of(sequence.place.name).count_end(sequence)
        return taken
