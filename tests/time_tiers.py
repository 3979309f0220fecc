"""`make test-time`: how long `make test` and CI take on this machine, beside the limits that they are held to.

Each is run so many times: `make test` in this checkout, `.ci/run` in a clone of its last commit. The seconds and counts
become benchmarks/results/test-tiers.json; runs of some tests alone (`--only`) are shown, not saved.

    python tests/time_tiers.py [test] [ci] [--runs 3] [--only PATH]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twostroke.measure.report import BenchResult, save

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIMITS_S: Mapping[str, float] = {"test": 6 * 60.0, "ci": 40 * 60.0}
"""The most seconds of `make test` and of `.ci/run`.

CI's limit was 30 minutes for the families of models that there were when the tests were split into tiers. It is 40 with
the families that came since (experts, states, latent attention): each adds cases in every format to the second tier.
"""

_SUMMARY = re.compile(r"\bin \d+(?:\.\d+)?s\b")
"""Of the line with which pytest ends: `7 passed, 1 skipped in 2.31s`."""
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of what is timed."""

    seconds: float
    exit_code: int
    passed: int
    failed: int
    """Tests that failed or could not be run."""
    skipped: int


def main(words: Sequence[str]) -> int:
    """Run what is asked for in turn, show each run, and save all of them.

    Returns:
        1 where a run failed, had no test, or took longer than its limit.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LIMITS_S)}; default: test")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="tests of `make test`, such as a path; nothing is saved")
    asked = parser.parse_args(words)
    names: list[str] = asked.names or ["test"]
    if not set(names) <= set(LIMITS_S) or asked.runs < 1 or (asked.only and "ci" in names):
        parser.error(f"names are {', '.join(LIMITS_S)}, runs at least 1, and --only is for test alone")
    found: dict[str, list[Run]] = {}
    for name in names:
        for _ in range(asked.runs):
            run = timed(name, asked.only)
            found.setdefault(name, []).append(run)
            kept = "within" if keeps(name, run) else "NOT within"
            print(f"{name}: {kept} {LIMITS_S[name]:.0f} s and without a failure; {run}", flush=True)
    if not asked.only:
        print(f"saved {save(result_of(found, asked.runs), RESULTS).relative_to(ROOT)}")
    return int(not all(keeps(name, run) for name, runs in found.items() for run in runs))


def timed(name: str, only: str) -> Run:
    """Run it once, with its output on ours; a clone is made before the clock starts."""
    with tempfile.TemporaryDirectory() as folder:
        place, command = ROOT, ["make", "test", f"ARGS={only}"]
        if name == "ci":
            place, command = Path(folder) / "checkout", [".ci/run"]
            subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
        begin_s = time.monotonic()
        with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            assert child.stdout is not None
            counts = counts_of(echoed(child.stdout))
        seconds = round(time.monotonic() - begin_s, 1)
    return Run(seconds, child.returncode, counts["passed"], counts["failed"] + counts["error"], counts["skipped"])


def echoed(lines: Iterable[str]) -> Iterable[str]:
    """Pass lines on, each also to our own output."""
    for line in lines:
        print(line, end="", flush=True)
        yield line


def counts_of(lines: Iterable[str]) -> Counter[str]:
    """Return how many tests passed, failed, were errors and were skipped, over every summary of pytest's."""
    found: Counter[str] = Counter()
    for line in lines:
        if _SUMMARY.search(line):
            found.update({kind.removesuffix("s"): int(count) for count, kind in _COUNT.findall(line)})
    return found


def claims_of(name: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what a result claims of the runs, in the form of every result with goals."""
    slowest, limit_s = max(run.seconds for run in runs), LIMITS_S[name]
    failed = sum(run.failed or not passes(run) for run in runs)
    form: dict[str, Any] = {"predicted": None}
    return [
        form | {"what": f"{name}, s", "measured": slowest, "rule": f"<= {limit_s:.0f}", "holds": slowest <= limit_s},
        form | {"what": f"{name}, tests that fail", "measured": failed, "rule": "<= 0", "holds": failed == 0},
    ]


def passes(run: Run) -> bool:
    """Return whether tests ran, and all passed."""
    return run.exit_code == 0 and run.passed > 0 and run.failed == 0


def keeps(name: str, run: Run) -> bool:
    """Return whether tests passed in time."""
    return passes(run) and run.seconds <= LIMITS_S[name]


def result_of(found: Mapping[str, Sequence[Run]], num_runs: int) -> BenchResult:
    """Return the result file's content."""
    claims = [claim for name, runs in found.items() for claim in claims_of(name, runs)]
    runs = {name: [asdict(run) for run in of_name] for name, of_name in found.items()}
    command = f'make test-time ARGS="{" ".join(found)} --runs {num_runs}"'
    return BenchResult.now(
        "test-tiers", command, config={}, workload={}, results={"claims": claims, "runs": runs}, repeats=num_runs
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
