"""`python -m benchmarks`: reproduce this project's own results. Not part of the installed package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from benchmarks.claim import ReproduceOptions
from benchmarks.compare.options import CompareOptions
from benchmarks.compare.random_gguf import random_gguf
from benchmarks.compare.servers import ServersOptions, print_servers, run_servers
from benchmarks.drill import DrillOptions, print_drill, run_drill
from benchmarks.handover.run import HandoverOptions, print_handover, run_handover
from benchmarks.measured.render import put_into, read_page, render, render_short
from benchmarks.path.run import PathOptions, run_path
from benchmarks.prediction import PredictionOptions, print_prediction, run_prediction
from benchmarks.ranks import RanksOptions, print_ranks, run_ranks
from benchmarks.router import RouterOptions, print_fleets, print_router, run_router
from benchmarks.spec.run import SpecOptions, print_spec, run_spec
from twostroke.cli.flags import LoadFlags, LoadFromFlags
from twostroke.cli.numbers import convert_numbers
from twostroke.cli.other_programs import run_command_line
from twostroke.errors import InvalidParameter
from twostroke.measure.report import DEFAULT_FOLDER

RouterFlags = Annotated[RouterOptions, Parameter(name="*", group="Router")]
RanksFlags = Annotated[RanksOptions, Parameter(name="*", group="Ranks")]
DrillFlags = Annotated[DrillOptions, Parameter(name="*", group="Drill")]
PredictionFlags = Annotated[PredictionOptions, Parameter(name="*", group="Prediction")]
ReproduceFlags = Annotated[ReproduceOptions, Parameter(name="*", group="Reproduction")]
CompareFlags = Annotated[CompareOptions, Parameter(name="*", group="Comparison")]
ServersFlags = Annotated[ServersOptions, Parameter(name="*", group="Servers")]
SpecFlags = Annotated[SpecOptions, Parameter(name="*", group="Speculation")]
HandoverFlags = Annotated[HandoverOptions, Parameter(name="*", group="Hand-over")]
PathFlags = Annotated[PathOptions, Parameter(name="*", group="Path")]

README, MEASUREMENTS = Path("README.md"), Path("docs/measurements.md")
"""The pages with tables: a short one of the comparisons, and all of them."""

app = App(
    name="python -m benchmarks",
    help="Reproduce this project's own results, each beside what was predicted, and compare engines.",
    config=(convert_numbers,),
)


app.command(random_gguf)


@app.command
def router(*, options: RouterFlags = RouterOptions()) -> None:
    """Measure the processor time of a routing decision between two pools of up to 10,000 members, and of their reports.

    Also computes what fleets of these sizes would need for routing.
    """
    rows, tables = run_router(options)
    print_router(rows)
    print_fleets(tables)


@app.command
def ranks(*, options: RanksFlags = RanksOptions()) -> None:
    """Measure all-gathers between two ranks through shared memory and sockets, and two ranks against two threads of
    one."""
    print_ranks(run_ranks(options))


@app.command
def drill(*, options: DrillFlags = DrillOptions()) -> None:
    """Check that streams through two pools whose processes are killed and frozen equal undisturbed ones."""
    print_drill(run_drill(options))


@app.command
def prediction(*, options: PredictionFlags = PredictionOptions()) -> None:
    """Measure the errors of predicted TTFT, TPOT and throughput, on workloads that the calibration has not seen."""
    found = run_prediction(options)
    print_prediction(found)
    if not found["holds"]:
        sys.exit(1)


@app.command
def reproduce(*names: str, options: ReproduceFlags = ReproduceOptions()) -> None:
    """Reproduce results of the field: predicted first, then measured.

    Parameters
    ----------
    names
        r1, occupancy, r2, r3, r4, r5, r6, r7, r10, r11, r13, r14, step-content, paging-price, engine-time,
        vs-transformers, long-prompt, hostile-files, hostile-bodies, server-throughput, overload, two-tenants, what-if,
        doctor, doctor-loads, background, pools, chaos, schedules, card, or all (also when none is given).
    """
    from benchmarks.reproduce.run import reproduce as run

    if not all(reproduction.holds for reproduction in run(names or ("all",), options)):
        sys.exit(1)


@app.command
def compare(*, options: CompareFlags = CompareOptions()) -> None:
    """Compare Twostroke with other engines on this machine: the same weights, threads and work, alternating.

    Nothing is installed: each peer is imported in the environment whose Python is given (--env vllm=PYTHON). A peer
    that is missing or fails gets a row with the reason.
    """
    from benchmarks.compare.run import print_compared, run_compare

    found = run_compare(options).results
    print_compared(found)
    if found["engines"]["twostroke"]["failure"] is not None:
        sys.exit(1)


@app.command
def servers(*, options: ServersFlags = ServersOptions()) -> None:
    """Compare our server with others of the same model, each started by its own command line: the same load,
    alternating."""
    print_servers(run_servers(options))


@app.command
def spec(*, options: SpecFlags = SpecOptions(), load: LoadFlags = LoadFromFlags()) -> None:
    """Compare drafts with none, alternating: measured and predicted speed-up, and whether the gate ever loses.

    Also shows how many drafts are accepted, and the number accepted with probability min(1, p/q).
    """
    print_spec(run_spec(options, load).results)


@app.command
def handover(*, options: HandoverFlags = HandoverOptions()) -> None:
    """Measure the KV hand-over of a prompt between processes, by each transport: whole, and layer by layer.

    The exit code is 1 if the number of transferred bytes differs from the formula.
    """
    found = run_handover(options).results
    print_handover(found)
    if not all(row["is_exact"] for row in found["handovers"]):
        sys.exit(1)


@app.command
def path(*, options: PathFlags = PathOptions()) -> None:
    """Count the functions, files and lines of code on a plain request's path, and compare with the committed figures.

    The exit code is 1 if a path has become longer.
    """
    if not run_path(options):
        sys.exit(1)


@app.command
def table(
    *, results: Path = DEFAULT_FOLDER, page: Path | None = None, write: bool = False, check: bool = False
) -> None:
    """Print the tables of measurements, or put them into README.md (in short) and docs/measurements.md.

    Parameters
    ----------
    results
        Folder of results.
    page
        Another page that holds the tables between two marks, for --write and --check.
    write
        Write them into these pages, instead of printing them.
    check
        Only compare: the exit code is 1 if a page has other tables.
    """
    if write and check:
        raise InvalidParameter("check", True, "cannot be given beside --write", "Give one of the two.")
    if page is not None and not (write or check):
        raise InvalidParameter("page", str(page), "changes nothing by itself", "Give --write or --check as well.")
    if not any(results.glob("*.json")):
        raise InvalidParameter("results", str(results), "is no folder of results (*.json)", "Give one that is.")
    rendered = render(results)
    if not (write or check):
        print(rendered, end="")
        return
    pages = {page: rendered} if page else {README: render_short(results), MEASUREMENTS: rendered}
    changed = {path: put_into(read_page(path), tables, path) for path, tables in pages.items()}
    old = [path for path, text in changed.items() if text != read_page(path)]
    for path in old:
        if write:
            path.write_text(changed[path], encoding="utf-8")
        else:
            print(f"{path} has other tables; run `make figures` (python -m benchmarks table --write)", file=sys.stderr)
    if check and old:
        sys.exit(1)


if __name__ == "__main__":
    run_command_line(app, sys.argv[1:], "python -m benchmarks")
