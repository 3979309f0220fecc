"""Counts of requests within the server's limits of time (--ttft-slo, --itl-slo). Goodput is the rate of requests that
keep both."""

from __future__ import annotations

from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import EngineStarted
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments
from twostroke.request_times import RequestTimes
from twostroke.scheduler.step_budget import QUANTILE


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
