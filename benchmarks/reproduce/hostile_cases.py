"""Reads mutated files one after the other: `python -m benchmarks.reproduce.hostile_cases KIND FIRST NUMBER`.

Each line of the output is a Case as JSON. Whoever started it sees by the lines which file it was that ended the
process, or that it never came back from.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.reproduce.hostile_kinds import KINDS, mutated_copy, outcome_of
from twostroke.engine.clock import monotonic_clock
from twostroke.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from twostroke.tokenizer.template_process import template_process_id

PATIENCE_S = 30.0
"""A file that takes longer is one that never ends."""


class Case(msgspec.Struct, frozen=True):
    """What came of one mutated file."""

    kind: str
    seed: int
    outcome: str
    """See hostile_kinds.outcome_of."""
    seconds: float = 0.0
    num_bytes: int = 0
    """Memory that reading it took at most: beyond what the process had before, and all of a template's process."""


def cases(kind: str, first: int, number: int) -> Iterator[Case]:
    """Read so many mutated files in another process, which is started again when one ends it."""
    seed, end = first, first + number
    while seed < end:
        command = (sys.executable, "-m", "benchmarks.reproduce.hostile_cases", kind, str(seed), str(end - seed))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            while True:
                watch = threading.Timer(PATIENCE_S, process.kill)
                watch.start()
                line = process.stdout.readline()
                watch.cancel()
                if not line:
                    break
                yield msgspec.json.decode(line, type=Case)
                seed += 1
        if seed < end:
            yield Case(kind, seed, f"!ended the process ({process.returncode})")
            seed += 1


def main(kind_name: str, first: int, number: int) -> None:
    """The process: reads them here."""
    logging.disable()
    kind = KINDS[kind_name]
    with tempfile.TemporaryDirectory() as folder:
        sound, copy = Path(folder, "sound"), Path(folder, "copy")
        sound.mkdir()
        kind.write(sound)
        kind.read(sound)  # what is loaded with the first file is no other's
        for seed in range(first, first + number):
            mutated_copy(kind, sound, copy, seed)
            sys.stdout.write(msgspec.json.encode(_case(kind_name, seed, copy)).decode() + "\n")
            sys.stdout.flush()


def _case(kind_name: str, seed: int, copy: Path) -> Case:
    reset_peak()
    before, began_s = resident_bytes(), monotonic_clock()
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    outcome = outcome_of(KINDS[kind_name].read, copy)
    seconds = monotonic_clock() - began_s
    took = peak_resident_bytes() - before
    if pid := template_process_id():
        with contextlib.suppress(OSError, AssertionError):  # it has ended
            took += peak_resident_bytes(pid)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if ended > children:  # one of them took more than any before; of those that took less only so much is known
        took = max(took, ended * 1024)
    return Case(kind_name, seed, outcome[:200], seconds, took)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
