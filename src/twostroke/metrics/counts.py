"""Groups of an engine's metrics: each holds its instruments and updates them.

engine_metrics.py passes them an engine's events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from twostroke.batch import Commit, DraftReason, Limit, ScheduledBatch
from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import EngineStarted, KVBlockChecked, KVImportEnded
from twostroke.kv_check import Verdict
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments
from twostroke.outputs import RequestTimes, num_accepted
from twostroke.scheduler.step_budget import QUANTILE


class KVCheckCounts:
    """Number, time and verdicts of KV checks; `LoadGauges` counts the quarantined blocks."""

    def __init__(self, instruments: Instruments) -> None:
        self._checks = instruments.number(families.KV_CHECKS)
        self._seconds = instruments.number(families.KV_CHECK_SECONDS)
        self._largest = instruments.number(families.KV_LARGEST_NUMERIC_DIFFERENCE)
        self._most = 0.0
        for verdict in Verdict:
            self._checks.set(0, verdict)

    def count_event(self, event: KVBlockChecked) -> None:
        """Count a block that was recomputed and compared."""
        self._checks.add(1, event.verdict)
        self._seconds.add(event.time_s - event.begin_s)
        if event.verdict is Verdict.NUMERICS and event.largest_difference is not None:
            self._most = max(self._most, event.largest_difference)
            self._largest.set(self._most)


# ---------------------------------------------------------------------- drafts


class DraftCounts:
    """Counts of drafts and their acceptance."""

    def __init__(self, instruments: Instruments) -> None:
        self._rounds = instruments.number(families.SPEC_DECODE_NUM_DRAFTS)
        self._drafted = instruments.number(families.SPEC_DECODE_NUM_DRAFT_TOKENS)
        self._accepted = instruments.number(families.SPEC_DECODE_NUM_ACCEPTED_TOKENS)
        self._accepted_at = instruments.number(families.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS)

        self._decisions = instruments.number(families.SPEC_DECODE_DECISIONS)
        for reason in DraftReason:
            self._decisions.set(0, reason)

    def decided(self, batch: ScheduledBatch) -> None:
        """Count the draft decision of a step that is about to run."""
        if batch.drafts is not None:
            self._decisions.add(1, batch.drafts.reason)

    def committed(self, commits: Sequence[Commit]) -> None:
        """Count the draft tokens that a step verified and accepted."""
        for commit in commits:
            if commit.num_draft_tokens:
                num_accepted_tokens = num_accepted(commit.num_tokens, commit.num_draft_tokens)
                self._rounds.add(1)
                self._drafted.add(commit.num_draft_tokens)
                self._accepted.add(num_accepted_tokens)
                for position in range(num_accepted_tokens):
                    self._accepted_at.add(1, str(position))


# ---------------------------------------------------------------------- KV from other processes


COMPLETE, FAILED = "complete", "failed"

_CATEGORIES = (
    ("no room", ("no room",)),
    ("not wanted", ("nobody waits", "given up")),
    ("silent", ("has said nothing",)),
    ("lease", ("lease", "its request", "its time was over")),
    ("refused", ("numerics", "version", "differ")),
)
"""Reason labels, with the words in a problem's text that identify them."""
_OTHER = "broken"


class TransferCounts:
    """Bytes, seconds and outcomes of KV hand-overs."""

    def __init__(self, instruments: Instruments) -> None:
        self._bytes = instruments.number(families.KV_FETCHED_BYTES)
        self._handovers = instruments.number(families.KV_HANDOVERS)
        self._seconds = instruments.distribution(families.KV_FETCH_SECONDS)
        self._handovers.set(0, COMPLETE, "")

    def count_event(self, event: KVImportEnded) -> None:
        """Count a hand-over that ended, successful or not."""
        self._bytes.add(event.num_bytes)
        if event.problem:
            self._handovers.add(1, FAILED, category_of(event.problem))
            return
        self._handovers.add(1, COMPLETE, "")
        if event.first_byte_s:
            self._seconds.observe(event.done_s - event.first_byte_s)


def category_of(problem: str) -> str:
    """Return a short reason label for the text of a problem.

    >>> category_of("nobody waits for it any more"), category_of("x: the other side has closed the connection.")
    ('not wanted', 'broken')
    """
    return next((name for name, parts in _CATEGORIES if any(part in problem for part in parts)), _OTHER)


# ---------------------------------------------------------------------- limits of time
#
# --ttft-slo and --itl-slo. Goodput is the rate of requests that keep both.


class SloCounts:
    """Counters of ended sequences by limit; a limit that is not set counts nothing."""

    def __init__(self, instruments: Instruments) -> None:
        self._counts = instruments.number(families.SLO_REQUESTS)
        self._ttft_s: float | None = None
        self._itl_s: float | None = None

    def started(self, event: EngineStarted) -> None:
        """Take over the limits of an engine that has started."""
        config = SchedulerConfig(**event.scheduler)
        self._ttft_s, self._itl_s = config.ttft_slo_s, config.itl_slo_s
        for limit in self._limits():
            for kept in ("true", "false"):
                self._counts.add(0, limit, kept)

    def ended(self, times: RequestTimes) -> None:
        """Count an ended sequence that received a token."""
        keeps = {
            "ttft": self._ttft_s is None or times.ttft_s <= self._ttft_s,
            "itl": self._itl_s is None or keeps_itl(times, self._itl_s),
        }
        keeps["all"] = all(keeps.values())
        for limit in self._limits():
            self._counts.add(1, limit, "true" if keeps[limit] else "false")

    def _limits(self) -> list[str]:
        """Return the names of the limits that are set, and `all` for keeping every one of them."""
        given = {"ttft": self._ttft_s, "itl": self._itl_s}
        limits = [name for name, value in given.items() if value is not None]
        return [*limits, "all"] if limits else []


def keeps_itl(times: RequestTimes, limit_s: float) -> bool:
    """Return whether 99 of 100 gaps between a sequence's tokens are within the limit, as a step's budget promises.

    >>> keeps_itl(RequestTimes(0.0, token_times_s=[1.0, 1.1, 1.5]), 0.2)
    False
    """
    gaps = times.itl_s
    return sum(gap > limit_s for gap in gaps) <= (1 - QUANTILE) * len(gaps)


# ---------------------------------------------------------------------- times and sizes of what has ended


class Latencies:
    """Latency histograms; the durations are those of RequestTimes."""

    def __init__(self, instruments: Instruments) -> None:
        self.ttft = instruments.distribution(families.TIME_TO_FIRST_TOKEN)
        self.itl = instruments.distribution(families.INTER_TOKEN_LATENCY)
        self.gap = instruments.distribution(families.OUTPUT_GAP)
        self._tpot = instruments.distribution(families.TIME_PER_OUTPUT_TOKEN)
        self._e2e = instruments.distribution(families.E2E_LATENCY)
        self._queue_time = instruments.distribution(families.QUEUE_TIME)
        self._prefill_time = instruments.distribution(families.PREFILL_TIME)
        self._decode_time = instruments.distribution(families.DECODE_TIME)
        self._inference_time = instruments.distribution(families.INFERENCE_TIME)

    def ended(self, times: RequestTimes) -> None:
        """Observe an ended sequence that has at least one token."""
        self._e2e.observe(times.e2e_s)
        self._decode_time.observe(times.e2e_s - times.ttft_s)
        if times.tpot_s is not None:
            self._tpot.observe(times.tpot_s)
        if times.scheduled_s is not None:
            self._queue_time.observe(times.queue_time_s)
            self._prefill_time.observe(times.ttft_s - times.queue_time_s)
            self._inference_time.observe(times.e2e_s - times.queue_time_s)


class SizeHistograms:
    """Histograms of prompt and output lengths and of request parameters."""

    def __init__(self, instruments: Instruments) -> None:
        self._prompt_tokens = instruments.distribution(families.REQUEST_PROMPT_TOKENS)
        self._generation_tokens = instruments.distribution(families.REQUEST_GENERATION_TOKENS)
        self._longest_generation = instruments.distribution(families.REQUEST_MAX_NUM_GENERATION_TOKENS)
        self._params_n = instruments.distribution(families.REQUEST_PARAMS_N)
        self._params_max_tokens = instruments.distribution(families.REQUEST_PARAMS_MAX_TOKENS)

    def sequence_ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Observe an ended sequence."""
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(num_output_tokens)

    def request_ended(self, num_sequences: int, max_tokens: int, most_output_tokens: int) -> None:
        """Observe a request whose sequences have all ended."""
        self._params_n.observe(num_sequences)
        self._params_max_tokens.observe(max_tokens)
        self._longest_generation.observe(most_output_tokens)


# ---------------------------------------------------------------------- gauges


THROUGHPUT_WINDOW_S = 1.0
RECENT_ADMISSIONS = 100

_REASONS = {Limit.SEQS: "slots", Limit.TOKENS: "tokens", Limit.KV: "kv", Limit.NONE: "step"}


class LoadGauges:
    """Gauges of the present load, from the last decision and the events since."""

    def __init__(self, instruments: Instruments) -> None:
        self._running = instruments.number(families.NUM_REQUESTS_RUNNING)
        self._waiting = instruments.number(families.NUM_REQUESTS_WAITING)
        self._waiting_by_reason = instruments.number(families.NUM_REQUESTS_WAITING_BY_REASON)
        self._kv_usage = instruments.number(families.KV_CACHE_USAGE)
        self._cache_config = instruments.number(families.CACHE_CONFIG_INFO)
        self._gen_throughput = instruments.number(families.GEN_THROUGHPUT)
        self._cache_hit_rate = instruments.number(families.CACHE_HIT_RATE)
        self._quarantined = instruments.number(families.KV_QUARANTINED_BLOCKS)
        self._num_blocks = self._num_quarantined = 0
        self._limit = Limit.NONE
        self._num_left_waiting = 0
        """Requests that the last decision left waiting."""
        self._admissions: deque[tuple[int, int]] = deque(maxlen=RECENT_ADMISSIONS)
        self._window_begin_s: float | None = None
        self._window_tokens = 0
        self._exposed_value: tuple[int, int, Limit, int] | None = None
        """Values that the gauges show now; None if there is no request."""
        self.count(num_running=0, num_waiting=0)

    def started(self, event: EngineStarted) -> None:
        """Reset the gauges for an engine that has started."""
        self._num_blocks, self._num_quarantined = event.num_blocks, 0
        self._quarantined.set(0)
        self._limit, self._num_left_waiting = Limit.NONE, 0
        described = (event.layout["block_size"], event.num_blocks, event.layout["kv_format"])
        caches = event.cache["enable_prefix_caching"]
        self._cache_config.clear()
        self._cache_config.set(1, *map(str, (*described, caches)))

    def decided(self, batch: ScheduledBatch) -> None:
        """Update the gauges after a step was decided."""
        self._num_left_waiting, self._limit = batch.num_waiting, batch.limited_by
        num_usable = self._num_blocks - self._num_quarantined
        if num_usable:
            self._kv_usage.set(1 - batch.num_free_blocks / num_usable)

    def quarantined(self, num_blocks: int) -> None:
        """Add blocks that were taken out of use."""
        self._num_quarantined += num_blocks
        self._quarantined.set(self._num_quarantined)

    def looked_up(self, num_asked: int, num_found: int) -> None:
        """Update the hit rate after a prefix cache lookup."""
        self._admissions.append((num_asked, num_found))
        num_asked_lately = sum(asked for asked, _ in self._admissions)
        self._cache_hit_rate.set(sum(found for _, found in self._admissions) / num_asked_lately)

    def generated(self, num_tokens: int, time_s: float) -> None:
        """Add the tokens of a step to the throughput."""
        if self._window_begin_s is None:
            self._window_begin_s = time_s
            return
        self._window_tokens += num_tokens
        elapsed_s = time_s - self._window_begin_s
        if elapsed_s >= THROUGHPUT_WINDOW_S:
            self._gen_throughput.set(self._window_tokens / elapsed_s)
            self._window_begin_s, self._window_tokens = time_s, 0

    def count(self, num_running: int, num_waiting: int) -> None:
        """Update the numbers of running and waiting requests after an event."""
        now = num_running, num_waiting, self._limit, self._num_left_waiting
        if now == self._exposed_value:
            return
        self._exposed_value = now if num_running or num_waiting else None
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        num_left = min(num_waiting, self._num_left_waiting)
        for limit, reason in _REASONS.items():
            self._waiting_by_reason.set(num_left if limit is self._limit else 0, reason)
        self._waiting_by_reason.add(num_waiting - num_left, _REASONS[Limit.NONE])
        if not num_running and not num_waiting:
            self._kv_usage.set(0)
            self._gen_throughput.set(0)
            self._window_begin_s, self._window_tokens = None, 0
