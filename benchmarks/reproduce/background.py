"""Background work: its effect on interactive requests, and the share of the idle time that it uses.

alone       interactive requests, at a load that leaves the engine idle for part of the time
beside      the same requests at the same times, and more background work than the idle time can take
all of it   the background requests as if they were interactive: the engine's throughput with them alone

share = background tokens until the last interactive arrival / (tokens a second of all of it x idle seconds alone)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.alternating import medians
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import FittedSteps, serve_and_simulate
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import StepTimeModel
from twostroke.measure.figure import bar_chart
from twostroke.measure.report import percentiles
from twostroke.measure.workload import Workload, with_arrivals
from twostroke.model.model_files import find_model
from twostroke.served_run import Run, ServedRequest

SLOTS = 24
BUSY = 0.4
"""Busy share of the time, with interactive requests alone."""
OUTPUTS = 16
"""Tokens of an interactive answer."""
BACKGROUND = (64, 48)
"""Tokens of prompt and output of each background request."""
_LATENCIES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
_DRAWN = ("ttft_p99_s ratio", "itl_p99_s ratio", "share")


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measure all three, round by round."""
    context = find_model(options.model).config().max_context
    prompt = min(1024, context - OUTPUTS) if options.full else 256
    count, rounds = (40, 5) if options.full else (6, 1)
    config = SchedulerConfig(max_num_seqs=SLOTS)
    step_times = FittedSteps.measured(options, config).model

    found: list[dict[str, float]] = []
    predicted: list[dict[str, float]] = []
    seen: dict[str, list[ServedRequest]] = {"alone": [], "beside": []}
    for _ in range(rounds):
        every_s = _every_s(
            options, config, prompt, step_times
        )  # a machine's clock varies: set the load for the current speed
        interactive = with_arrivals(
            options.workload_of_lengths([(prompt, OUTPUTS)] * count),
            [i * every_s for i in range(count)],
        )
        measured, guessed = _round(options, config, interactive, (count - 1) * every_s, step_times, seen)
        found.append(measured | {"every_s": every_s})
        predicted.append(guessed)
    middle, guess = medians(found), medians(predicted)
    # a round has few samples beyond its 99th percentile, some of them outliers: take all rounds together
    was, is_now = _latencies(seen["alone"]), _latencies(seen["beside"])
    middle |= was | {f"{key} ratio": value / was[key] for key, value in is_now.items()}
    claims = (
        Claim.at_most("p99 TTFT, beside / alone", 1.10, middle["ttft_p99_s ratio"], guess["ttft_p99_s ratio"]),
        Claim.at_most("p99 ITL, beside / alone", 1.10, middle["itl_p99_s ratio"], guess["itl_p99_s ratio"]),
        Claim.at_least("share of the idle time made use of", 0.8, middle["share"], guess["share"]),
        Claim.reported("median TTFT, beside / alone", middle["ttft_p50_s ratio"], guess["ttft_p50_s ratio"]),
        Claim.reported("median ITL, beside / alone", middle["itl_p50_s ratio"], guess["itl_p50_s ratio"]),
        Claim.reported("idle, of the time, alone", middle["idle"], guess["idle"]),
        Claim.reported("background tokens/s", middle["tok_s"], guess["tok_s"]),
        Claim.reported("tokens/s of the same without other requests", middle["most_tok_s"], guess["most_tok_s"]),
        *(
            Claim.reported(f"{key.removesuffix('_s')} ms, alone", middle[key] * 1e3, guess[key] * 1e3)
            for key in _LATENCIES
        ),
    )
    return Reproduction(
        claims=tuple(claim.judged(options.full) if claim.holds is not None else claim for claim in claims),
        config={"model": options.model_name, "slots": SLOTS, "flex_slowdown": config.flex_slowdown},
        workload={
            "interactive": {"requests": count, "prompt": prompt, "outputs": OUTPUTS, "busy": BUSY},
            "background": {"prompt": BACKGROUND[0], "outputs": BACKGROUND[1]},
        },
        details={"medians": middle, "predicted": guess, "rounds": found},
        draw=bar_chart(
            ["p99 TTFT,\nbeside / alone", "p99 ITL,\nbeside / alone", "share of the\nidle time"],
            {name: [of[key] for key in _DRAWN] for name, of in (("predicted", guess), ("measured", middle))},
            "",
            lines=(1.1, 0.8),
        ),
        repeats=rounds,
    )


def _every_s(options: ReproduceOptions, config: SchedulerConfig, prompt: int, step_times: StepTimeModel) -> float:
    """Return the seconds between two requests for the wanted load."""
    few = options.workload_of_lengths([(prompt, OUTPUTS)] * 4)
    measured, _ = serve_and_simulate(options, replace(config, max_num_seqs=1), few, step_times)
    return measured.duration_s / len(few) / BUSY


def _round(
    options: ReproduceOptions,
    config: SchedulerConfig,
    interactive: Workload,
    last_s: float,
    step_times: StepTimeModel,
    seen: dict[str, list[ServedRequest]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return measured and predicted figures; add the measured latencies to those of all rounds."""
    some = options.workload_of_lengths([BACKGROUND] * (4 * SLOTS), seed=1)
    most = serve_and_simulate(options, config, some, step_times)
    alone = serve_and_simulate(options, config, interactive, step_times)
    rate = most[0].num_output_tokens / most[0].duration_s
    count = 2 * SLOTS + round(1.3 * rate * _idle_s(alone[0], interactive, last_s) / BACKGROUND[1])
    work = options.workload_of_lengths([BACKGROUND] * count, seed=2)
    both = sorted(
        (*interactive.requests, *(replace(request, background=True) for request in work.requests)),
        key=lambda request: request.arrival_s,
    )
    num_blocks = sum(-(-r.num_tokens // 16) + 1 for r in interactive.requests[:SLOTS])
    beside = serve_and_simulate(options, config, Workload(tuple(both)), step_times, num_blocks)
    is_background = [request.background for request in both]
    seen["alone"] += alone[0].requests
    seen["beside"] += [request for request in beside[0].requests if not is_background[_place(request)]]
    measured, guessed = (
        _figures(of_alone, of_beside, of_most, is_background, interactive, last_s)
        for of_alone, of_beside, of_most in zip(alone, beside, most, strict=True)
    )
    return measured, guessed


def _idle_s(alone: Run, interactive: Workload, last_s: float) -> float:
    """Return the idle seconds until the last arrival; all requests keep the engine busy for equally long."""
    busy_s = sum(step.wall_s for step in alone.steps)
    return last_s - busy_s * (len(interactive) - 1) / len(interactive)


def _figures(
    alone: Run, beside: Run, most: Run, is_background: list[bool], interactive: Workload, last_s: float
) -> dict[str, float]:
    kinds = [(r, is_background[_place(r)]) for r in beside.requests]
    theirs = [r for r, is_work in kinds if not is_work]
    made = [at for r, is_work in kinds if is_work for at in r.times.token_times_s]
    was, is_now = _latencies(alone.requests), _latencies(theirs)
    idle_s = _idle_s(alone, interactive, last_s)
    tok_s = sum(at <= last_s for at in made) / last_s
    most_tok_s = most.num_output_tokens / most.duration_s
    return {
        **was,
        **{f"{key} beside": value for key, value in is_now.items()},
        **{f"{key} ratio": value / was[key] for key, value in is_now.items()},
        "idle": idle_s / last_s,
        "tok_s": tok_s,
        "most_tok_s": most_tok_s,
        "share": tok_s * last_s / (most_tok_s * idle_s),
        "work_lasted": max(made) / last_s,
    }


def _place(request: ServedRequest) -> int:
    """Return the request's index in the workload: a log is ordered by ends, but request ids end with the index."""
    return int(request.request_id.rpartition("-")[2])


def _latencies(requests: Sequence[ServedRequest]) -> dict[str, float]:
    """Return latencies in seconds, by _LATENCIES."""
    ttft = percentiles([request.times.ttft_s for request in requests])
    itl = percentiles([gap for request in requests for gap in request.times.itl_s])
    return {f"{name}_{q}_s": of[q] for name, of in (("ttft", ttft), ("itl", itl)) for q in ("p50", "p99")}
