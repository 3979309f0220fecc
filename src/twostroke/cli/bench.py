"""`twostroke bench`: measure an engine, a server, a model or this machine, and read the results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from twostroke.cli.event_logs import read_run
from twostroke.cli.flags import CacheFlags, LoadFlags, LoadFromFlags, SchedulerFlags, group
from twostroke.cli.short_help import command_list, short_help
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.price import check_price_per_hour
from twostroke.engine.event_sinks import consistent_events
from twostroke.errors import ClientError
from twostroke.measure.from_log import count_prompt_tokens, run_from_log
from twostroke.measure.offline import OfflineOptions, print_summary, run_cost, run_offline
from twostroke.measure.operators.run import KernelOptions, print_kernels, run_kernels
from twostroke.measure.quality.run import QualityOptions, print_quality, run_quality
from twostroke.measure.report import compare as compare_results
from twostroke.measure.report import load as load_result
from twostroke.measure.report import print_comparison
from twostroke.measure.serve.options import ServeOptions
from twostroke.measure.start import StartOptions, print_starts, run_start
from twostroke.measure.summary import summarize as summary_of
from twostroke.measure.sweep.run import SweepOptions, print_sweep, run_sweep

app = App(
    name="bench",
    help="Measure a server, a model or this machine. Results are JSON with commit, hardware and configuration.",
    **command_list("twostroke bench", {}),
)

_IN_A_CLONE = ("compare", "drill", "handover", "prediction", "ranks", "reproduce", "router", "spec", "table")
"""Former commands that reproduce this project's own results. They have moved to the repository's benchmarks folder."""


def _moved(name: str) -> Callable[..., None]:
    def command(*_: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        raise ClientError(
            f"`twostroke bench {name}` reproduces this project's own results and is not part of the package. In a "
            f"clone of the repository, run: python -m benchmarks {name}, with the same flags."
        )

    return command


for _name in _IN_A_CLONE:
    app.command(_moved(_name), name=_name, show=False, help_flags=())  # --help prints the same message


@app.command(**short_help("bench offline"))
def offline(
    *,
    options: Annotated[OfflineOptions, Parameter(name="*", group=group("Workload"))] = OfflineOptions(),
    load: LoadFlags = LoadFromFlags(),
    scheduler: SchedulerFlags = SchedulerConfig(),
    cache: CacheFlags = CacheConfig(),
) -> None:
    """Measure an engine without a server: throughput, TTFT, TPOT, ITL, and what limited each step."""
    print_summary(run_offline(options, load, scheduler, cache).results)


@app.command(**short_help("bench serve"))
def serve(*, options: Annotated[ServeOptions, Parameter(name="*", group="Load")] = ServeOptions()) -> None:
    """Put load on a server of OpenAI's API, ours or any: TTFT, TPOT, ITL, goodput under an SLO, refusals, the frontier.

    Each request is sent when it is due, even if earlier ones have not ended. Latencies count from that time. The exit
    code is 1 when no request was answered.
    """
    from twostroke.measure.serve.run import print_serve, run_serve

    found = run_serve(options).results
    print_serve(found)
    if not any(part["num_completed"] for part in found.get("points", [found])):
        sys.exit(1)


@app.command(**short_help("bench quality"))
def quality(
    *,
    options: Annotated[QualityOptions, Parameter(name="*", group="Quality")] = QualityOptions(),
) -> None:
    """Measure what smaller formats of weights and KV cost: perplexity, bits per byte, retrieval at a distance.

    Each format is also compared with float32 on the same weights: mean and maximal KL, top-1 agreement, perplexity. The
    exit code is 1 when the embedded model exceeds a limit on its held-out text, or when llama.cpp reports no figures.
    """
    found = run_quality(options)
    print_quality(found)
    if not found.holds:
        sys.exit(1)


@app.command(**short_help("bench start"))
def start(
    *,
    options: Annotated[StartOptions, Parameter(name="*", group="Start")] = StartOptions(),
) -> None:
    """Measure a start: seconds until the first token, and the peak memory of the process."""
    print_starts(run_start(options))


@app.command(**short_help("bench kernels"))
def kernels(*, options: Annotated[KernelOptions, Parameter(name="*", group="Kernels")] = KernelOptions()) -> None:
    """Check each operator of each backend against the reference; compare its time with the machine's limits."""
    found = run_kernels(options).results
    print_kernels(found)
    if not all(kernel["is_right"] for kernel in found["kernels"]):
        sys.exit(1)


@app.command(**short_help("bench sweep"))
def sweep(
    *,
    options: Annotated[SweepOptions, Parameter(name="*", group="Sweep")] = SweepOptions(),
    load: LoadFlags = LoadFromFlags(),
    cache: CacheFlags = CacheConfig(),
) -> None:
    """Measure TTFT over prompt length, TPOT over context, throughput over batch size, each with its predicted floor."""
    print_sweep(run_sweep(options, load, cache).results)


@app.command(**short_help("bench diff"))
def diff(before: Path, after: Path) -> None:
    """Compare two saved results figure by figure, and list all other differences between them."""
    print_comparison(compare_results(load_result(before), load_result(after)))


@app.command(**short_help("bench summarize"))
def summarize(event_log: Path, *, price_per_hour: float | None = None) -> None:
    """Report the figures of a run that wrote an event log (--event-log): throughput, latencies, limits.

    Parameters
    ----------
    event_log
        The event log.
    price_per_hour
        Price of the machine per hour, in any currency; the report then includes the cost of a million tokens.
    """
    check_price_per_hour(price_per_hour)
    events = read_run((event_log,))
    with consistent_events((event_log,)):
        run = run_from_log(events)
    cost = run_cost(run, price_per_hour, count_prompt_tokens(events))
    print_summary({**summary_of(run), "cost": cost})
