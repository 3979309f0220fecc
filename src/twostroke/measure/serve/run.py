"""`twostroke bench serve`: load on any server of OpenAI's API, as its clients see it; once, or over a range of loads.

The sender is this process and has no part in the server's. It sends each request when it is due, whatever became of the
others, and counts latencies from then; how late it was itself stands beside them.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, fields, replace
from typing import Any

from twostroke.errors import SetupError
from twostroke.measure.command import command_line, model_name, settings
from twostroke.measure.figure import save_figure
from twostroke.measure.report import BenchResult, check_folder, save
from twostroke.measure.serve.figures import figures_of
from twostroke.measure.serve.http_connection import HttpClient, Origin
from twostroke.measure.serve.load import LoadRun, run_load, run_loop
from twostroke.measure.serve.options import ServeOptions
from twostroke.measure.serve.prompts import candidate_texts, one_token_words
from twostroke.measure.serve.show import draw_frontier, draw_run
from twostroke.measure.serve.target import Questions, Target
from twostroke.measure.workload import RESERVED_TOKEN_IDS, SyntheticSpec, Workload, synthetic
from twostroke.measure.workload_options import WorkloadOptions
from twostroke.model.model_files import find_model

_OF_A_POINT = (
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
"""Figures that each load of a frontier has."""


def run_serve(options: ServeOptions) -> BenchResult:
    """Runs the load, saves JSON and PNG.

    Raises:
        InvalidParameter: a trace that cannot be read, a folder that results cannot be written to, a tokenizer that has
            too few words.
        SetupError: no server, one that answers none of the warm-up's requests, or matplotlib is missing while plots are
            wanted.
    """
    check_folder(options.results)
    _allow_many_connections()
    target, workload, results = run_loop(_run(options))
    result = BenchResult.now(
        options.name,
        command_line("twostroke bench serve", options),
        config={"server": _server_settings(options), "model": model_name(target.model)},
        workload={
            **workload.description,
            "prompts": options.prompts_of,
            "prompt_tokens": workload.num_prompt_tokens,
            "max_concurrency": options.max_concurrency,
        },
        results=results,
        warmup=options.warmup,
    )
    save(result, options.results)
    if options.plots:
        draw = draw_frontier if options.loads else draw_run
        save_figure(lambda figure: draw(figure, results), options.results / f"{options.name}.png", size=(8, 5))
    return result


async def _run(options: ServeOptions) -> tuple[Target, Workload, dict[str, Any]]:
    client = HttpClient(Origin.parse(options.url))
    questions = Questions(client, options.api_key)
    try:
        target = await _target(options, questions)
        # words stand behind the ids that are kept for special tokens
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


async def _target(options: ServeOptions, questions: Questions) -> Target:
    model = options.model or await questions.first_model()
    words: list[str] = []
    if options.prompts_of == "text":
        candidates = candidate_texts()
        if options.tokenizer is None:
            counts = await questions.count_tokens(model, candidates)
        else:
            tokenizer = find_model(options.tokenizer, with_weights=False).tokenizer()
            counts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in candidates]
        words = one_token_words(counts)
    return Target(
        origin=Origin.parse(options.url),
        model=model,
        endpoint=options.endpoint,
        api_key=options.api_key,
        words=tuple(words),
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        token_counts=options.token_counts,
        more_fields=options.more_fields,
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs on one server."""

    options: ServeOptions
    client: HttpClient
    target: Target
    vocab_size: int

    async def warm_up(self) -> None:
        """Small runs.

        Raises:
            SetupError: no request was answered well; the others would not be either.
        """
        for i in range(self.options.warmup):
            # other tokens than the workload's: a warm-up must not fill the prefix cache with what is measured
            seed = self.options.seed + 10**9 + i
            workload = synthetic(SyntheticSpec(num_requests=4, vocab_size=self.vocab_size, seed=seed)).cut_outputs(8)
            run = await self._run(workload, None)
            if all(e.failure is not None for e in run.exchanges):
                first = run.exchanges[0]
                raise SetupError(f"no request of the warm-up was answered ({first.failure}): {first.message[:500]}")

    async def once(self) -> dict[str, Any]:
        """The load as the options say it."""
        run = await self._run(self.options.workload(self.vocab_size), self.options.name)
        return figures_of(run, self.options.slo, self.options.price_per_hour)

    async def frontier(self) -> dict[str, Any]:
        """Every load in turn, after all requests at once where there is no rate to take multiples of."""
        options, saturated = self.options, None
        base = options.request_rate
        if base is None:
            run = await self._run(options.workload(self.vocab_size), f"{options.name}, all at once")
            saturated = _point(figures_of(run, options.slo, options.price_per_hour), None)
            base = saturated["throughput"]["requests_per_s"]
            if not base:
                raise SetupError("no request was answered when all came at once, so there is no rate to sweep around")
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
    return {"request_rate": rate, **{name: figures[name] for name in _OF_A_POINT}, "remarks": remarks}


def _server_settings(options: ServeOptions) -> dict[str, Any]:
    """What was asked of the server, without the workload, which describes itself, and without the key."""
    of_the_workload = {field.name for field in fields(WorkloadOptions)}
    left_out = of_the_workload | {"api_key", "results", "name", "plots", "max_concurrency", "model"}
    return {name: value for name, value in settings(options).items() if name not in left_out}


def _allow_many_connections() -> None:
    """As many open sockets as the system lets this process have: overload is no reason to stop at 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
