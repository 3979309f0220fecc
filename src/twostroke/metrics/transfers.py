"""KV that came from other processes, counted."""

from __future__ import annotations

from twostroke.events import KVImportEnded
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments

COMPLETE, FAILED = "complete", "failed"

_CATEGORIES = (
    ("no room", ("no room",)),
    ("not wanted", ("nobody waits", "given up")),
    ("silent", ("has said nothing",)),
    ("lease", ("lease", "its request", "its time was over")),
    ("refused", ("numerics", "version", "differ")),
)
"""What a problem is called, by what its sentence has in it."""
_OTHER = "broken"


class TransferCounts:
    """How much, how long, and how it came out."""

    def __init__(self, instruments: Instruments) -> None:
        self._bytes = instruments.number(families.KV_FETCHED_BYTES)
        self._handovers = instruments.number(families.KV_HANDOVERS)
        self._seconds = instruments.distribution(families.KV_FETCH_SECONDS)
        self._handovers.set(0, COMPLETE, "")

    def counted(self, event: KVImportEnded) -> None:
        """A prefix has come, or will not."""
        self._bytes.add(event.num_bytes)
        if event.problem:
            self._handovers.add(1, FAILED, category_of(event.problem))
            return
        self._handovers.add(1, COMPLETE, "")
        if event.first_byte_s:
            self._seconds.observe(event.done_s - event.first_byte_s)


def category_of(problem: str) -> str:
    """A word for a sentence, so that there are few of them.

    >>> category_of("nobody waits for it any more"), category_of("x: the other side has closed the connection.")
    ('not wanted', 'broken')
    """
    return next((name for name, parts in _CATEGORIES if any(part in problem for part in parts)), _OTHER)
