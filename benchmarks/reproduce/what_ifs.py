"""What-ifs on a recorded run, and then the runs that they predict.

One run is recorded with the default settings. From its log alone, each what-if is predicted as `twostroke replay LOG
--set …` does: step times fitted to the log's own steps, the scheduler in simulated time. Then each is really run.
"""

from __future__ import annotations

from typing import Any

from benchmarks.claim import Claim, NotOnThisMachine, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import recorded, with_values
from benchmarks.side_by_side import medians
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import Event
from twostroke.measure.figure import bars
from twostroke.measure.from_log import run_of_log
from twostroke.measure.report import median
from twostroke.measure.workload import Lengths, Workload
from twostroke.planner.replay import figures, replay_log
from twostroke.simulation.settings import WhatIf

SLOTS = 16
WHAT_IFS: dict[str, dict[str, Any]] = {
    "as recorded": {},
    "budget 128": {"max_num_batched_tokens": 128},
    "budget 2048": {"max_num_batched_tokens": 2048},
    "4 slots": {"max_num_seqs": 4},
    "little KV": {"num_kv_blocks": 160},
    "no chunks": {"enable_chunked_prefill": False},
    "static": {"batching": "static"},
}
COMPARED = {"itl_p99": "p99 ITL ms", "output_tok_s": "tokens/s", "ttft_p50": "median TTFT ms"}
GOAL = 0.2
"""For p99 ITL and throughput."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Records, predicts, runs, round by round."""
    count, rounds = (96, 3) if options.full else (16, 1)
    # all at once, so that throughput is the engine's
    workload = options.drawn(count, Lengths.uniform(16, 480), Lengths.uniform(8, 96))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WHAT_IFS}
    predicted: dict[str, list[dict[str, Any]]] = {name: [] for name in WHAT_IFS}
    speeds: list[float] = []
    refusals: list[str] = []
    for round_number in range(1, rounds + 1):
        log = _run(options, workload, {})
        asked = [WhatIf(settings=settings) for settings in WHAT_IFS.values()]
        replayed = replay_log(log, asked)
        assert replayed.difference is None, f"a batch was decided differently: {replayed.difference}"
        if replayed.refusal:
            refusals.append(f"round {round_number} was left out: {replayed.refusal}")
            continue
        for name, guess in zip(WHAT_IFS, replayed.what_ifs, strict=True):
            predicted[name].append(figures(guess.run))
            speeds.append(guess.speed)
        for name, settings in WHAT_IFS.items():
            found[name].append(figures(run_of_log(_run(options, workload, settings))))
    if len(refusals) == rounds:
        raise NotOnThisMachine(refusals[-1])
    middle, guesses = ({name: medians(runs, COMPARED) for name, runs in of.items()} for of in (found, predicted))
    return Reproduction(
        claims=(*_claims(middle, guesses, full=options.full), Claim.reported("simulated s in a s", median(speeds))),
        config={"model": options.model_name, "slots": SLOTS, "what_ifs": WHAT_IFS},
        workload=dict(workload.description),
        details={"measured": middle, "predicted": guesses, "rounds": found},
        draw=lambda figure: _draw(figure, middle, guesses),
        figure_size=(10.0, 4.0),
        repeats=rounds,
        remarks=tuple(refusals),
    )


def _run(options: ReproduceOptions, workload: Workload, settings: dict[str, Any]) -> list[Event]:
    scheduler, cache = with_values(
        settings,
        SchedulerConfig(max_num_seqs=SLOTS),
        CacheConfig(enable_prefix_caching=False, num_kv_blocks=SLOTS * 36),
    )
    return recorded(options, scheduler, cache, workload, max_model_len=576)


def _claims(middle: dict[str, dict[str, float]], guesses: dict[str, dict[str, float]], *, full: bool) -> list[Claim]:
    claims: list[Claim] = []
    for name in WHAT_IFS:
        for key, words in COMPARED.items():
            scale = 1.0 if key == "output_tok_s" else 1e3
            guess, measured = guesses[name][key] * scale, middle[name][key] * scale
            claim = Claim.within(f"{words}, {name}", guess, measured, GOAL)
            claims.append(claim.judged(full and key != "ttft_p50"))
    return claims


def _draw(figure: Any, middle: dict[str, dict[str, float]], guesses: dict[str, dict[str, float]]) -> None:
    for place, (key, words) in enumerate(COMPARED.items(), 1):
        axes = figure.add_subplot(1, len(COMPARED), place)
        scale = 1.0 if key == "output_tok_s" else 1e3
        both = {"predicted": guesses, "measured": middle}
        groups = {name: [of[key] * scale for of in figures.values()] for name, figures in both.items()}
        bars(axes, [name.replace(" ", "\n") for name in middle], groups, words)
        axes.tick_params(axis="x", labelsize=6)
