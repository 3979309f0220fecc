"""Share of the processors that other processes take during a measurement, from the kernel's accounting.

    others  = (busy time of the processors - processor time of the measured processes) / (processors x time)
    stolen  = time in which the hypervisor ran another guest / (processors x time)

Interrupts count for no process: the kernel does not report which process they serve.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from twostroke.engine.clock import monotonic_clock

SHORTEST_S = 2.0
"""Shortest interval, in seconds. The kernel counts in ticks of 10 ms, so the share of a shorter interval is inexact."""

_PROC = Path("/proc")
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
"""Indices of a processor's fields in /proc/stat, after its name."""
_OWN_FIELDS = slice(11, 15)
"""Fields of /proc/PID/stat after the command's name: user and system time, and those of ended children."""


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """One reading, in seconds since a fixed moment, summed over all processors that this process may use."""

    at_s: float
    busy_s: float
    """Busy time for all processes."""
    stolen_s: float
    own_s: float
    """Processor time of the measured processes."""


@dataclass(frozen=True, slots=True)
class UsedShare:
    """One interval; shares of the processors' time, from 0 to 1."""

    begin_s: float
    end_s: float
    others: float
    stolen: float

    @property
    def share(self) -> float:
        """Share of the processors' time that was not available to the measured processes."""
        return self.others + self.stolen


def read_processor_times(pids: Iterable[int], proc: Path = _PROC) -> ProcessorTimes | None:
    """Read the kernel's account.

    Args:
        pids: the measured processes; ended ones are ignored.
        proc: folder of the kernel's account.

    Returns:
        None if there is no such account.
    """
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    try:
        fields = [_fields_of(proc, number) for number in sorted(os.sched_getaffinity(0))]
    except (OSError, AttributeError, ValueError, KeyError):
        return None
    return ProcessorTimes(
        at_s=monotonic_clock(),
        busy_s=sum(f[_USER] + f[_NICE] + f[_SYSTEM] for f in fields) / ticks_per_s,
        stolen_s=sum(f[_STEAL] for f in fields) / ticks_per_s,
        own_s=sum(_ticks_of(proc, pid) for pid in pids) / ticks_per_s,
    )


def used_shares(readings: Sequence[ProcessorTimes], num_processors: int) -> list[UsedShare]:
    """Return the intervals between readings, each at least SHORTEST_S long.

    Args:
        readings: in order of time.
        num_processors: number of processors that the readings are summed over.

    >>> first, last = ProcessorTimes(0.0, 50.0, 1.0, 20.0), ProcessorTimes(10.0, 65.0, 1.2, 30.0)
    >>> used_shares([first, last], 2)
    [UsedShare(begin_s=0.0, end_s=10.0, others=0.25, stolen=0.01)]
    """
    kept: list[ProcessorTimes] = []
    for reading in readings:
        if not kept or reading.at_s - kept[-1].at_s >= SHORTEST_S:
            kept.append(reading)
    found: list[UsedShare] = []
    for earlier, later in pairwise(kept):
        time_s = num_processors * (later.at_s - earlier.at_s)
        own_s = max(0.0, later.own_s - earlier.own_s)  # a process that ended no longer counts
        others_s = max(0.0, later.busy_s - earlier.busy_s - own_s)
        stolen_s = max(0.0, later.stolen_s - earlier.stolen_s)
        found.append(UsedShare(earlier.at_s, later.at_s, round(others_s / time_s, 6), round(stolen_s / time_s, 6)))
    return found


def worst_of_parts(intervals: Sequence[UsedShare], begin_s: float, end_s: float, num_parts: int) -> list[float | None]:
    """Return the largest share of any interval that overlaps each of the equal parts of a time; None where none does.

    >>> worst_of_parts([UsedShare(0, 4, 0.1, 0.0), UsedShare(4, 9, 0.3, 0.1)], 0, 12, 3)
    [0.1, 0.4, 0.4]
    """
    width_s = (end_s - begin_s) / num_parts
    found: list[float | None] = []
    for part in range(num_parts):
        first_s, last_s = begin_s + part * width_s, begin_s + (part + 1) * width_s
        shares = [i.share for i in intervals if i.end_s > first_s and i.begin_s < last_s]
        found.append(max(shares, default=None))
    return found


def _fields_of(proc: Path, processor: int) -> list[int]:
    """Return the numbers of a processor's line."""
    lines = (proc / "stat").read_text(encoding="utf-8").splitlines()
    found = {name: rest for name, _, rest in (line.partition(" ") for line in lines)}
    numbers = [int(number) for number in found[f"cpu{processor}"].split()]
    if len(numbers) <= _STEAL or not any(numbers):
        raise ValueError(f"{proc / 'stat'} has no account of processor {processor}")
    return numbers


def _ticks_of(proc: Path, pid: int) -> int:
    """Return the processor time of a process; 0 once it has ended."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return sum(map(int, text.rpartition(")")[2].split()[_OWN_FIELDS]))
