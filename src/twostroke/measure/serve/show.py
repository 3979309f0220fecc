"""Load on a server for people: tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.measure.figure import MEASURED, PREDICTED
from twostroke.measure.offline import cost_line
from twostroke.tables import print_table

_QUANTILES = ("p50", "p90", "p95", "p99", "mean")


def print_serve(results: Mapping[str, Any], console: Console | None = None) -> None:
    """The figures of a run, or of a frontier."""
    console = console or Console()
    if "points" in results:
        _print_frontier(results, console)
    else:
        _print_run(results, console)
    for remark in results["remarks"]:
        console.print(f"[yellow]{remark}[/]", highlight=False)


def _print_run(results: Mapping[str, Any], console: Console) -> None:
    rates, failed, generator = results["throughput"], results["failures"], results["generator"]
    console.print(
        f"{results['num_completed']} of {results['num_requests']} requests in {results['duration_s']:.2f} s: "
        f"{rates['requests_per_s']:.2f} requests/s, output {rates['output_tok_s']:,.0f} tok/s, "
        f"prompts {rates['prompt_tok_s']:,.0f} tok/s; {results['num_cached_tokens']:,} prompt tokens from the cache",
        highlight=False,
    )
    if results["cost"] is not None:
        console.print(cost_line(results["cost"]), highlight=False)
    goodput = results["goodput"]
    if goodput["slo_ms"]:
        slo = ", ".join(f"{name} <= {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        missed = ", ".join(f"{name} {count}" for name, count in goodput["missed"].items()) or "none"
        console.print(
            f"goodput ({slo}): {goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.0%}; missed: {missed}",
            highlight=False,
        )
    rows = {
        **results["latency"],
        "refusal_latency_s": failed["refusal_latency_s"],
        "retry_after_s": failed["retry_after_s"],
    }
    print_table(_latency_table({**rows, "generator_lateness_s": generator["lateness_s"]}), console)
    if failed["by_kind"]:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in failed["by_kind"].items())
        console.print(f"failed: {kinds}; {failed['num_with_retry_after']} with Retry-After", highlight=False)
        for message in failed["messages"]:
            console.print(f"  {message[:300]}", style="dim", highlight=False, markup=False)
    if generator["cpu_us_per_token"] is not None:
        console.print(f"load generator: {generator['cpu_us_per_token']:.1f} us of processor a token", highlight=False)


def _latency_table(latency: Mapping[str, Mapping[str, float]]) -> Table:
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ms", *_QUANTILES):
        rows.add_column(name, justify="left" if name == "ms" else "right")
    for name, of in latency.items():
        if of:
            rows.add_row(name.removesuffix("_s").replace("_", " "), *(f"{1000 * of[q]:,.2f}" for q in _QUANTILES))
    return rows


def _print_frontier(results: Mapping[str, Any], console: Console) -> None:
    rows = Table(box=None, pad_edge=False, header_style="bold")
    points = _points(results)
    is_priced = any(point["cost"] is not None for point in points)
    priced = ("per M tokens out",) if is_priced else ()
    columns = ("rate", "done/s", "tok/s", "goodput", "TTFT p50", "p99", "TPOT p50", "p99", "refused", "errors")
    for name in (*columns, *priced):
        rows.add_column(name, justify="right")
    for point in points:
        latency, failed = point["latency"], point["failures"]
        rows.add_row(
            "all at once" if point["request_rate"] is None else f"{point['request_rate']:.3g}",
            f"{point['throughput']['requests_per_s']:.3g}",
            f"{point['throughput']['output_tok_s']:,.0f}",
            f"{point['goodput']['requests_per_s']:.3g}",
            *(_ms(latency[name], q) for name in ("ttft_s", "tpot_s") for q in ("p50", "p99")),
            str(failed["num_refused"]),
            str(failed["num_errors"]),
            *([_cost(point["cost"])] if is_priced else []),
        )
    print_table(rows, console)


def _cost(cost: Mapping[str, Any]) -> str:
    value = cost["per_million_output_tokens"]
    return "" if value is None else f"{value:,.4g}"


def _points(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    saturated: list[Mapping[str, Any]] = [] if results["saturated"] is None else [results["saturated"]]
    return [*results["points"], *saturated]


def _ms(of: Mapping[str, float], quantile: str) -> str:
    return f"{1000 * of[quantile]:,.1f}" if of else ""


def draw_run(figure: Any, results: Mapping[str, Any]) -> None:
    """Requests under way and output tokens per second, over time."""
    series = results["over_time"]
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.step(series["end_s"], series["under_way"], color=PREDICTED, where="pre")
    top.set_ylabel("requests under way")
    bottom.step(series["end_s"], series["output_tok_s"], color=MEASURED, where="pre")
    bottom.set_ylabel("output tokens per second")
    bottom.set_xlabel("seconds")
    _finish((top, bottom))


def draw_frontier(figure: Any, results: Mapping[str, Any]) -> None:
    """Latency over throughput, a point for each load; the requests that arrive and those that are served well."""
    points = results["points"]
    left, middle, right = figure.subplots(1, 3)
    for axes, name in ((left, "ttft_s"), (middle, "tpot_s")):
        for quantile, style, colour in (("p50", "o-", PREDICTED), ("p99", "o-", MEASURED)):
            kept = [p for p in points if p["latency"][name]]
            throughput = [p["throughput"]["output_tok_s"] for p in kept]
            axes.plot(
                throughput, [1000 * p["latency"][name][quantile] for p in kept], style, color=colour, label=quantile
            )
        axes.set_xlabel("output tokens per second")
        axes.set_ylabel(f"{name.removesuffix('_s').upper()}, ms")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    rates = [p["request_rate"] for p in points]
    right.plot(rates, rates, ":", color=PREDICTED, label="arriving")
    right.plot(rates, [p["throughput"]["requests_per_s"] for p in points], "o-", color=PREDICTED, label="completed")
    right.plot(rates, [p["goodput"]["requests_per_s"] for p in points], "o-", color=MEASURED, label="within the SLO")
    right.set_xlabel("requests per second")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8, frameon=False)
    _finish((left, middle, right))


def _finish(axes_of_all: Sequence[Any]) -> None:
    for axes in axes_of_all:
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
