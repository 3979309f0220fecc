"""Requests within the limits of time that the server was given (--ttft-slo, --itl-slo): goodput is the rate of those
that keep both."""

from __future__ import annotations

from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import EngineStarted
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments
from twostroke.request_times import RequestTimes
from twostroke.scheduler.step_budget import QUANTILE


class SloCounts:
    """Counts ended sequences by limit; nothing is counted for a limit that is not set."""

    def __init__(self, instruments: Instruments) -> None:
        self._counts = instruments.number(families.SLO_REQUESTS)
        self._ttft_s: float | None = None
        self._itl_s: float | None = None

    def started(self, event: EngineStarted) -> None:
        """An engine has started, with its limits."""
        config = SchedulerConfig(**event.scheduler)
        self._ttft_s, self._itl_s = config.ttft_slo_s, config.itl_slo_s
        for limit in self._limits():
            for kept in ("true", "false"):
                self._counts.add(0, limit, kept)

    def ended(self, times: RequestTimes) -> None:
        """A sequence that got a token has ended."""
        keeps = {
            "ttft": self._ttft_s is None or times.ttft_s <= self._ttft_s,
            "itl": self._itl_s is None or keeps_itl(times, self._itl_s),
        }
        keeps["all"] = all(keeps.values())
        for limit in self._limits():
            self._counts.add(1, limit, "true" if keeps[limit] else "false")

    def _limits(self) -> list[str]:
        """Those that are set, and all of them together."""
        given = {"ttft": self._ttft_s, "itl": self._itl_s}
        limits = [name for name, value in given.items() if value is not None]
        return [*limits, "all"] if limits else []


def keeps_itl(times: RequestTimes, limit_s: float) -> bool:
    """Whether 99 of 100 gaps between a sequence's tokens are within the limit, as a step's budget promises.

    >>> keeps_itl(RequestTimes(0.0, token_times_s=[1.0, 1.1, 1.5]), 0.2)
    False
    """
    gaps = times.itl_s
    return sum(gap > limit_s for gap in gaps) <= (1 - QUANTILE) * len(gaps)
