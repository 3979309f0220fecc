"""The gauges: how many run and wait, what for, how full the KV memory is, how fast it goes."""

from __future__ import annotations

from collections import deque

from twostroke.batch import Limit, ScheduledBatch
from twostroke.events import EngineStarted
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments

THROUGHPUT_WINDOW_S = 1.0
RECENT_ADMISSIONS = 100

_REASONS = {Limit.SEQS: "slots", Limit.TOKENS: "tokens", Limit.KV: "kv", Limit.NONE: "step"}


class LoadGauges:
    """What is the case now; the last decision and what has come and gone since."""

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
        """By the last decision."""
        self._admissions: deque[tuple[int, int]] = deque(maxlen=RECENT_ADMISSIONS)
        self._window_begin_s: float | None = None
        self._window_tokens = 0
        self.count(num_running=0, num_waiting=0)

    def started(self, event: EngineStarted) -> None:
        """Another engine: nobody is there."""
        self._num_blocks, self._num_quarantined = event.num_blocks, 0
        self._quarantined.set(0)
        self._limit, self._num_left_waiting = Limit.NONE, 0
        described = (event.layout["block_size"], event.num_blocks, event.layout["kv_format"])
        caches = event.cache["enable_prefix_caching"]
        self._cache_config.clear()
        self._cache_config.set(1, *map(str, (*described, caches)))

    def decided(self, batch: ScheduledBatch) -> None:
        """A step was decided."""
        self._num_left_waiting, self._limit = batch.num_waiting, batch.limited_by
        num_usable = self._num_blocks - self._num_quarantined
        if num_usable:
            self._kv_usage.set(1 - batch.num_free_blocks / num_usable)

    def quarantined(self, num_blocks: int) -> None:
        """More blocks are out of use."""
        self._num_quarantined += num_blocks
        self._quarantined.set(self._num_quarantined)

    def looked_up(self, num_asked: int, num_found: int) -> None:
        """Tokens of a prompt in the prefix cache."""
        self._admissions.append((num_asked, num_found))
        num_asked_lately = sum(asked for asked, _ in self._admissions)
        self._cache_hit_rate.set(sum(found for _, found in self._admissions) / num_asked_lately)

    def generated(self, num_tokens: int, time_s: float) -> None:
        """A step gave its tokens."""
        if self._window_begin_s is None:
            self._window_begin_s = time_s
            return
        self._window_tokens += num_tokens
        elapsed_s = time_s - self._window_begin_s
        if elapsed_s >= THROUGHPUT_WINDOW_S:
            self._gen_throughput.set(self._window_tokens / elapsed_s)
            self._window_begin_s, self._window_tokens = time_s, 0

    def count(self, num_running: int, num_waiting: int) -> None:
        """Who is there, after any event."""
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
