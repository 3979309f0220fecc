"""`make run-time`: how long a stranger waits for the first answer of `make run`, and of a second `make run`.

Each round clones the last commit, with a home folder of its own that holds nothing but pip's settings, and runs
`make run` twice. The clock starts with the command and stops at the first character of the chat answer. The seconds
become benchmarks/results/first-run.json. How long a first run takes depends on how fast the packages arrive, too.

    python tests/time_first_run.py [--runs 3] [--port 8000]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from time_tiers import RESULTS, ROOT
from twostroke.measure.report import BenchResult, save

LIMITS_S: Mapping[str, float] = {"first": 4 * 60.0, "second": 15.0}
"""The most seconds until an answer is seen."""
QUESTION = "> Explain"
"""How the line begins behind which the answer comes."""
KEPT_BACK = ("PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME", "PIP_CACHE_DIR")
"""Variables that a stranger's machine does not have."""


def main(words: Sequence[str]) -> int:
    """Time so many pairs of runs, show them, and save them.

    Returns:
        1 if an answer came too late.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args(words)
    if asked.runs < 1:
        parser.error("--runs is at least 1")
    found: dict[str, list[float]] = {name: [] for name in LIMITS_S}
    for _ in range(asked.runs):
        for name, seconds in timed_pair(asked.port).items():
            found[name].append(seconds)
            print(f"{name} run: an answer after {seconds:.1f} s, of at most {LIMITS_S[name]:.0f} s", flush=True)
    result = result_of(found)
    print(f"saved {save(result, RESULTS).relative_to(ROOT)}")
    return int(not all(claim["holds"] for claim in result.results["claims"]))


def timed_pair(port: int) -> dict[str, float]:
    """Run `make run` twice in a new clone. Seconds until each answer."""
    with tempfile.TemporaryDirectory() as folder:
        place, home = Path(folder) / "checkout", Path(folder) / "home"
        subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
        home.mkdir()
        for settings in (".config/pip", ".pip"):
            if (Path.home() / settings).is_dir():
                shutil.copytree(Path.home() / settings, home / settings)
        without = [word for name in KEPT_BACK for word in ("-u", name)]
        command = ["env", *without, f"HOME={home}", "make", "run", f"PORT={port}"]
        return {name: seconds_until_answer(command, place) for name in LIMITS_S}


def seconds_until_answer(command: Sequence[str], place: Path) -> float:
    """Start the command, wait for the answer, and end it as Ctrl-C does.

    Raises:
        SystemExit: it ended before it answered.
    """
    begin_s = time.monotonic()
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        answered = has_answer(iter(lambda: child.stdout.read(1) if child.stdout else "", ""))
        seconds = round(time.monotonic() - begin_s, 1)
        os.killpg(child.pid, signal.SIGINT)
        child.stdout.read()
    if not answered:
        sys.exit(f"{' '.join(command)} ended with {child.returncode} and without an answer")
    return seconds


def has_answer(characters: Iterable[str]) -> bool:
    """Read until the first character of an answer. False: the text ended before."""
    line, is_asked = "", False
    for character in characters:
        if is_asked and not character.isspace():
            return True
        is_asked = is_asked or (character == "\n" and line.startswith(QUESTION))
        line = "" if character == "\n" else line + character
    return False


def result_of(found: Mapping[str, Sequence[float]]) -> BenchResult:
    """Return the result file's content."""
    claims: list[dict[str, Any]] = [
        {
            "what": f"{name} run, s until the first character of an answer",
            "predicted": None,
            "measured": max(seconds),
            "rule": f"<= {LIMITS_S[name]:.0f}",
            "holds": max(seconds) <= LIMITS_S[name],
        }
        for name, seconds in found.items()
    ]
    num_runs = len(found["first"])
    return BenchResult.now(
        "first-run",
        f'make run-time ARGS="--runs {num_runs}"',
        config={},
        workload={},
        results={"claims": claims, "seconds": {name: list(seconds) for name, seconds in found.items()}},
        repeats=num_runs,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
