"""`twostroke bench serve`: load on any server of OpenAI's API, measured at the client; one load, or a range of loads.

The load generator is this process; the server is another one. It sends each request when it is due, regardless of
the others, and counts latencies from that time. Its own lateness is reported too.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.errors import SetupError
from twostroke.measure.figure import MEASURED, PREDICTED, save_figure, style_axes
from twostroke.measure.offline import cost_line
from twostroke.measure.report import BenchResult, check_folder, model_name, record, settings
from twostroke.measure.serve.figures import figures_of
from twostroke.measure.serve.load import HttpClient, LoadRun, Origin, run_load, run_loop
from twostroke.measure.serve.options import ServeOptions
from twostroke.measure.serve.target import ServerQueries, ServerTarget, candidate_texts, one_token_words
from twostroke.measure.workload import RESERVED_TOKEN_IDS, SyntheticSpec, Workload, synthetic
from twostroke.measure.workload_options import WorkloadOptions
from twostroke.model.model_files import find_model
from twostroke.tables import plain_table, print_table

_QUANTILES = ("p50", "p90", "p95", "p99", "mean")


def print_serve(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the figures of a run or of a frontier."""
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
        console.print(f"load generator: {generator['cpu_us_per_token']:.1f} us of CPU time per token", highlight=False)


def _latency_table(latency: Mapping[str, Mapping[str, float]]) -> Table:
    rows = plain_table(("ms",), _QUANTILES)
    for name, of in latency.items():
        if of:
            rows.add_row(name.removesuffix("_s").replace("_", " "), *(f"{1000 * of[q]:,.2f}" for q in _QUANTILES))
    return rows


def _print_frontier(results: Mapping[str, Any], console: Console) -> None:
    points = _points(results)
    is_priced = any(point["cost"] is not None for point in points)
    priced = ("per M tokens out",) if is_priced else ()
    columns = ("rate", "done/s", "tok/s", "goodput", "TTFT p50", "p99", "TPOT p50", "p99", "refused", "errors")
    rows = plain_table((), (*columns, *priced))
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
    """Draw requests in flight and output tokens per second over time."""
    series = results["over_time"]
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.step(series["end_s"], series["under_way"], color=PREDICTED, where="pre")
    bottom.step(series["end_s"], series["output_tok_s"], color=MEASURED, where="pre")
    for axes in (top, bottom):
        axes.locator_params(axis="x", nbins=4)
    style_axes(top, legend=False, ylabel="requests in flight")
    style_axes(bottom, legend=False, xlabel="seconds", ylabel="output tokens per second")


def draw_frontier(figure: Any, results: Mapping[str, Any]) -> None:
    """Draw latency over throughput, one point for each load, and the rates of arriving, completed and good requests."""
    points = results["points"]
    left, middle, right = figure.subplots(1, 3)
    for axes, name in ((left, "ttft_s"), (middle, "tpot_s")):
        for quantile, style, colour in (("p50", "o-", PREDICTED), ("p99", "o-", MEASURED)):
            kept = [p for p in points if p["latency"][name]]
            throughput = [p["throughput"]["output_tok_s"] for p in kept]
            axes.plot(
                throughput, [1000 * p["latency"][name][quantile] for p in kept], style, color=colour, label=quantile
            )
        ylabel = f"{name.removesuffix('_s').upper()}, ms"
        style_axes(axes, xlabel="output tokens per second", ylabel=ylabel, ylim=(0, None))
    rates = [p["request_rate"] for p in points]
    right.plot(rates, rates, ":", color=PREDICTED, label="arriving")
    right.plot(rates, [p["throughput"]["requests_per_s"] for p in points], "o-", color=PREDICTED, label="completed")
    right.plot(rates, [p["goodput"]["requests_per_s"] for p in points], "o-", color=MEASURED, label="within the SLO")
    style_axes(right, xlabel="requests per second", ylim=(0, None))
    for axes in (left, middle, right):
        axes.locator_params(axis="x", nbins=4)


_POINT_FIGURES = (
    "duration_s",
    "num_requests",
    "num_completed",
    "throughput",
    "goodput",
    "cost",
    "latency",
    "failures",
    "generator",
)
"""Figures of each load of a frontier."""


def run_serve(options: ServeOptions) -> BenchResult:
    """Run the load, and save JSON and PNG.

    Raises:
        InvalidParameter: the trace cannot be read, the results folder is not writable, or the tokenizer has too few
        one-token words.
        SetupError: there is no server, it answers no warm-up request, or matplotlib is missing although plots are
        requested.
    """
    check_folder(options.results)
    _allow_many_connections()
    target, workload, results = run_loop(_run(options))
    result = record(
        "twostroke bench serve",
        options,
        config={"server": _server_settings(options), "model": model_name(target.model)},
        workload={
            **workload.description,
            "prompts": options.prompt_form,
            "prompt_tokens": workload.num_prompt_tokens,
            "max_concurrency": options.max_concurrency,
        },
        results=results,
        warmup=options.warmup,
    )
    if options.plots:
        draw = draw_frontier if options.loads else draw_run
        save_figure(lambda figure: draw(figure, results), options.results / f"{options.name}.png", size=(8, 5))
    return result


async def _run(options: ServeOptions) -> tuple[ServerTarget, Workload, dict[str, Any]]:
    client = HttpClient(Origin.parse(options.url))
    questions = ServerQueries(client, options.api_key)
    try:
        target = await _target(options, questions)
        # words follow the ids reserved for special tokens
        vocab_size = len(target.words) + RESERVED_TOKEN_IDS if target.words else options.vocab_size
        bench = _Bench(options, client, target, vocab_size)
        await bench.warm_up()
        before = await questions.metrics() if options.server_metrics else None
        found = await (bench.frontier() if options.loads else bench.once())
        after = await questions.metrics() if before is not None else None
        found["server_metrics"] = after.since(before) if before is not None and after is not None else None
        return target, options.workload(vocab_size), found
    finally:
        await client.close()


async def _target(options: ServeOptions, questions: ServerQueries) -> ServerTarget:
    model = options.model or await questions.first_model()
    words: list[str] = []
    if options.prompt_form == "text":
        candidates = candidate_texts()
        if options.tokenizer is None:
            counts = await questions.count_tokens(model, candidates)
        else:
            tokenizer = find_model(options.tokenizer, with_weights=False).tokenizer()
            counts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in candidates]
        words = one_token_words(counts)
    return ServerTarget(
        origin=Origin.parse(options.url),
        model=model,
        endpoint=options.endpoint,
        api_key=options.api_key,
        words=tuple(words),
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        token_counts=options.token_counts,
        extra_fields=options.extra_fields,
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """Benchmark runs against one server."""

    options: ServeOptions
    client: HttpClient
    target: ServerTarget
    vocab_size: int

    async def warm_up(self) -> None:
        """Run small workloads before the measurement.

        Raises:
            SetupError: no request succeeded, so the measured ones would fail too.
        """
        for i in range(self.options.warmup):
            # tokens that the workload does not use, so that the warm-up fills the prefix cache with none of its prompts
            seed = self.options.seed + 10**9 + i
            workload = synthetic(SyntheticSpec(num_requests=4, vocab_size=self.vocab_size, seed=seed)).cut_outputs(8)
            run = await self._run(workload, None)
            if all(e.failure is not None for e in run.exchanges):
                first = run.exchanges[0]
                raise SetupError(f"no request of the warm-up succeeded ({first.failure}): {first.message[:500]}")

    async def once(self) -> dict[str, Any]:
        """Run the load that the options describe."""
        run = await self._run(self.options.workload(self.vocab_size), self.options.name)
        return figures_of(run, self.options.slo, self.options.price_per_hour)

    async def frontier(self) -> dict[str, Any]:
        """Run every load in turn; without a base rate, first send all requests at once to find one."""
        options, saturated = self.options, None
        base = options.request_rate
        if base is None:
            run = await self._run(options.workload(self.vocab_size), f"{options.name}, all at once")
            saturated = _point(figures_of(run, options.slo, options.price_per_hour), None)
            base = saturated["throughput"]["requests_per_s"]
            if not base:
                raise SetupError("no request succeeded when all were sent at once, so there is no base rate to sweep")
        points: list[dict[str, Any]] = []
        for load in options.loads:
            rate = base * load
            workload = replace(options, request_rate=rate, frontier="").workload(self.vocab_size)
            run = await self._run(workload, f"{options.name}, {rate:.3g}/s")
            points.append(_point(figures_of(run, options.slo, options.price_per_hour), rate))
        return {"saturated": saturated, "points": points, "remarks": [r for p in points for r in p["remarks"]]}

    async def _run(self, workload: Workload, title: str | None) -> LoadRun:
        return await run_load(
            self.client,
            self.target.plan(workload),
            timeout_s=self.options.timeout,
            max_concurrency=self.options.max_concurrency,
            progress=title,
        )


def _point(figures: dict[str, Any], rate: float | None) -> dict[str, Any]:
    at = "all at once" if rate is None else f"{rate:.3g}/s"
    remarks = [f"{at}: {remark}" for remark in figures["remarks"]]
    return {"request_rate": rate, **{name: figures[name] for name in _POINT_FIGURES}, "remarks": remarks}


def _server_settings(options: ServeOptions) -> dict[str, Any]:
    """Return the options about the server, without those of the workload and without the key."""
    of_the_workload = {field.name for field in fields(WorkloadOptions)}
    left_out = of_the_workload | {"api_key", "results", "name", "plots", "max_concurrency", "model"}
    return {name: value for name, value in settings(options).items() if name not in left_out}


def _allow_many_connections() -> None:
    """Raise the limit of open sockets to the hard limit, so that overload runs are not limited to 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
