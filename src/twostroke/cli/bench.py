"""`twostroke bench`: measure an engine, and reproduce results of the field."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from benchmarks.compare.options import CompareOptions
from benchmarks.drill.run import DrillOptions, print_drill, run_drill
from benchmarks.fleet import print_fleets
from benchmarks.handover.run import HandoverOptions, run_handover
from benchmarks.handover.show import print_handover
from benchmarks.measured.render import put_into, read_page, render
from benchmarks.prediction import PredictionOptions, print_prediction, run_prediction
from benchmarks.ranks import RanksOptions, print_ranks, run_ranks
from benchmarks.reproduce.claim import ReproduceOptions
from benchmarks.router import RouterOptions, print_router, run_router
from benchmarks.spec.run import SpecOptions, run_spec
from benchmarks.spec.show import print_spec
from twostroke.cli.event_logs import read_run
from twostroke.cli.flags import CacheFlags, LoadByFlags, LoadFlags, SchedulerFlags
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.price import check_price_per_hour
from twostroke.engine.event_sinks import one_history
from twostroke.errors import InvalidParameter
from twostroke.measure.from_log import prompt_tokens_of, run_of_log
from twostroke.measure.offline import OfflineOptions, cost_of, print_summary, run_offline
from twostroke.measure.operators.run import KernelOptions, print_kernels, run_kernels
from twostroke.measure.quality.run import QualityOptions, run_quality
from twostroke.measure.quality.show import print_quality
from twostroke.measure.report import DEFAULT_FOLDER, print_comparison
from twostroke.measure.report import compare as compare_results
from twostroke.measure.report import load as load_result
from twostroke.measure.serve.options import ServeOptions
from twostroke.measure.start import StartOptions, print_starts, run_start
from twostroke.measure.summary import summarize as summary_of
from twostroke.measure.sweep.run import SweepOptions, run_sweep
from twostroke.measure.sweep.show import print_sweep

app = App(name="bench", help="Measure: results are JSON with commit, hardware and configuration.")


@app.command
def offline(
    *,
    options: Annotated[OfflineOptions, Parameter(name="*", group="Workload")] = OfflineOptions(),
    load: LoadFlags = LoadByFlags(),
    scheduler: SchedulerFlags = SchedulerConfig(),
    cache: CacheFlags = CacheConfig(),
) -> None:
    """Throughput of each stroke, TTFT, TPOT and ITL percentiles, and what limited each step, for a seeded workload."""
    print_summary(run_offline(options, load, scheduler, cache).results)


@app.command
def serve(*, options: Annotated[ServeOptions, Parameter(name="*", group="Load")] = ServeOptions()) -> None:
    """Load on a server of OpenAI's API, ours or any: TTFT, TPOT, ITL, goodput under an SLO, refusals, the frontier.

    Requests are sent when they are due, whatever became of those before, and latencies count from then. The exit code
    is 1 when none was answered.
    """
    from twostroke.measure.serve.run import run_serve
    from twostroke.measure.serve.show import print_serve

    found = run_serve(options).results
    print_serve(found)
    if not any(part["num_completed"] for part in found.get("points", [found])):
        sys.exit(1)


@app.command
def quality(
    *,
    options: Annotated[QualityOptions, Parameter(name="*", group="Quality")] = QualityOptions(),
) -> None:
    """Perplexity, bits per byte and retrieval at a distance over formats of weights and KV, beside the model as it is.

    And the distance of each from float32 on the same weights: mean and maximal KL, top-1 agreement, perplexity. The
    exit code is 1 when the embedded model on its held-out text rises above a limit, or llama.cpp gives no figures.
    """
    found = run_quality(options)
    print_quality(found)
    if not found.holds:
        sys.exit(1)


@app.command
def start(
    *,
    options: Annotated[StartOptions, Parameter(name="*", group="Start")] = StartOptions(),
) -> None:
    """Seconds from the start of a process to its first token, and the memory of its own that it takes at most."""
    print_starts(run_start(options))


@app.command
def router(
    *,
    options: Annotated[RouterOptions, Parameter(name="*", group="Router")] = RouterOptions(),
) -> None:
    """Processor time of a routing decision between two pools of up to 10,000 members, and of their reports.

    And what fleets of these sizes would take in front of them, worked out from it.
    """
    rows, tables = run_router(options)
    print_router(rows)
    print_fleets(tables)


@app.command
def ranks(*, options: Annotated[RanksOptions, Parameter(name="*", group="Ranks")] = RanksOptions()) -> None:
    """All-gathers between two ranks through shared memory and sockets, and two ranks beside two threads of one."""
    print_ranks(run_ranks(options))


@app.command
def drill(*, options: Annotated[DrillOptions, Parameter(name="*", group="Drill")] = DrillOptions()) -> None:
    """Streams through two pools whose processes are killed and frozen: none may differ from the undisturbed."""
    print_drill(run_drill(options))


@app.command
def prediction(
    *, options: Annotated[PredictionOptions, Parameter(name="*", group="Prediction")] = PredictionOptions()
) -> None:
    """How far predicted TTFT, TPOT and throughput are off, on workloads that the calibration has not seen."""
    found = run_prediction(options)
    print_prediction(found)
    if not found["holds"]:
        sys.exit(1)


@app.command
def reproduce(
    *names: str,
    options: Annotated[ReproduceOptions, Parameter(name="*", group="Reproduction")] = ReproduceOptions(),
) -> None:
    """Results of the field, predicted first, then measured.

    Parameters
    ----------
    names
        r1, occupancy, r2, r3, r4, r5, r6, r7, r10, r11, r13, r14, step-content, paging-price, engine-time,
        vs-transformers, long-prompt, hostile-files, hostile-bodies, server-throughput, overload,
        two-tenants, what-if, doctor, doctor-loads, background, pinned-prefixes,
        pools, chaos, card, or all (also when none is given).
    """
    from benchmarks.reproduce.run import reproduce as run

    if not all(reproduction.holds for reproduction in run(names or ("all",), options)):
        sys.exit(1)


@app.command
def compare(*, options: Annotated[CompareOptions, Parameter(name="*", group="Comparison")] = CompareOptions()) -> None:
    """Twostroke beside other engines on this machine: the same weights, threads and work, in turn.

    Nothing is installed: each peer is looked for in the environment whose Python is given (--env vllm=PYTHON). One that
    is missing or fails has a row that says why.
    """
    from benchmarks.compare.run import run_compare
    from benchmarks.compare.show import print_compared

    found = run_compare(options).results
    print_compared(found)
    if found["engines"]["twostroke"]["failure"] is not None:
        sys.exit(1)


@app.command
def kernels(*, options: Annotated[KernelOptions, Parameter(name="*", group="Kernels")] = KernelOptions()) -> None:
    """Each operator by itself on each backend: checked against the reference, timed beside the machine's limits."""
    found = run_kernels(options).results
    print_kernels(found)
    if not all(kernel["is_right"] for kernel in found["kernels"]):
        sys.exit(1)


@app.command
def spec(
    *,
    options: Annotated[SpecOptions, Parameter(name="*", group="Speculation")] = SpecOptions(),
    load: LoadFlags = LoadByFlags(),
) -> None:
    """Drafts against none, in turn: the speed-up beside the predicted one, and whether the gate ever loses.

    And how many drafts stand, beside how many would if they were accepted with probability min(1, p/q).
    """
    print_spec(run_spec(options, load).results)


@app.command
def handover(
    *,
    options: Annotated[HandoverOptions, Parameter(name="*", group="Hand-over")] = HandoverOptions(),
) -> None:
    """The KV of a prompt from one process to another, by each transport: whole, and layer by layer beside its prefill.

    The exit code is 1 when the bytes that went over are not those of the formula.
    """
    found = run_handover(options).results
    print_handover(found)
    if not all(row["is_exact"] for row in found["handovers"]):
        sys.exit(1)


@app.command
def sweep(
    *,
    options: Annotated[SweepOptions, Parameter(name="*", group="Sweep")] = SweepOptions(),
    load: LoadFlags = LoadByFlags(),
    cache: CacheFlags = CacheConfig(),
) -> None:
    """TTFT over prompts with its fit, TPOT over context, throughput over batch size; how near to the floor they are."""
    print_sweep(run_sweep(options, load, cache).results)


@app.command
def table(
    *, results: Path = DEFAULT_FOLDER, page: Path | None = None, write: bool = False, check: bool = False
) -> None:
    """README's tables of measurements, made from the saved results.

    Parameters
    ----------
    results
        The folder of results.
    page
        The page that holds the tables between two marks, for --write and --check; default: README.md.
    write
        Put them there, instead of printing them.
    check
        Only compare: the exit code is 1 when the page has other tables.
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
    page = page or Path("README.md")
    text = read_page(page)
    changed = put_into(text, rendered, page)
    if write:
        page.write_text(changed, encoding="utf-8")
    elif changed != text:
        print(f"{page} has other tables; run `make figures` (twostroke bench table --write)", file=sys.stderr)
        sys.exit(1)


@app.command
def diff(before: Path, after: Path) -> None:
    """Two saved results, figure by figure, and what else differs between them."""
    print_comparison(compare_results(load_result(before), load_result(after)))


@app.command
def summarize(event_log: Path, *, price_per_hour: float | None = None) -> None:
    """Report the figures of a run that wrote an event log (--event-log): throughput, latencies, limits.

    Parameters
    ----------
    event_log
        The file.
    price_per_hour
        Of the machine, in any money: also says what a million tokens cost.
    """
    check_price_per_hour(price_per_hour)
    events = read_run((event_log,))
    with one_history((event_log,)):
        run = run_of_log(events)
    cost = cost_of(run, price_per_hour, prompt_tokens_of(events))
    print_summary({**summary_of(run), "cost": cost})
