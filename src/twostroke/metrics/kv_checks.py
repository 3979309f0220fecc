"""The self-check of cached blocks, counted."""

from __future__ import annotations

from twostroke.events import KVBlockChecked
from twostroke.kv_check import Verdict
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments


class KVCheckCounts:
    """How often, how long, and how it came out. What is out of use is a matter of load (LoadGauges)."""

    def __init__(self, instruments: Instruments) -> None:
        self._checks = instruments.number(families.KV_CHECKS)
        self._seconds = instruments.number(families.KV_CHECK_SECONDS)
        self._largest = instruments.number(families.KV_LARGEST_NUMERIC_DIFFERENCE)
        self._most = 0.0
        for verdict in Verdict:
            self._checks.set(0, verdict)

    def counted(self, event: KVBlockChecked) -> None:
        """A block was computed again."""
        self._checks.add(1, event.verdict)
        self._seconds.add(event.time_s - event.begin_s)
        if event.verdict is Verdict.NUMERICS and event.largest_difference is not None:
            self._most = max(self._most, event.largest_difference)
            self._largest.set(self._most)
