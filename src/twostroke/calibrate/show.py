"""Printed output of `twostroke calibrate`."""

from __future__ import annotations

import itertools
import json

from rich.console import Console

from twostroke.cost.calibration import Calibration, best_exit_layer, choices_of, recommended
from twostroke.cost.step_model import StepTimeModel
from twostroke.tables import plain_table, print_line, print_table


def print_calibration(found: Calibration, console: Console | None = None) -> None:
    """Print the step-time model, steps by size, drafters by speed, and the advice."""
    console = console or Console()
    if found.step_times is not None:
        _print_step_times(found.step_times, console)
    plain_s = found.verify_s(1)
    console.print(f"{found.model}, one request, {found.context_tokens} tokens of context", highlight=False)
    steps = plain_table(("query tokens",), ("step ms", "x 1 token"))
    for timing in found.step_s:
        steps.add_row(str(timing.size), f"{timing.seconds * 1e3:.3f}", f"{timing.seconds / plain_s:.2f}")
    print_table(steps, console)
    if not found.drafters and not found.left_out:
        return
    figures = ("accepted", "found", "draft ms", "+ step ms", "best k", "tok/pass", "tok/s", "gain")
    drafters = plain_table(("drafts",), figures)
    for choice in choices_of(found):
        drafter, last = choice.drafter, choice.drafter.draft_s[-1]
        drafters.add_row(
            drafter.words,
            f"{drafter.acceptance:.2f}",
            f"{drafter.share:.2f}",
            f"{last.seconds / last.size * 1e3:.3f}",
            f"{drafter.extra_s * 1e3:.3f}",
            str(choice.num_drafts),
            f"{choice.tokens_per_pass:.2f}",
            f"{choice.tokens_per_s:.0f}",
            f"{choice.gain:.2f}",
        )
    print_table(drafters, console)
    for line in advice(found):
        print_line(line, console, markup=True)


def _print_step_times(model: StepTimeModel, console: Console) -> None:
    """Print the two curves, and the cost of context."""
    table = plain_table(("of a step: tokens",), ("layers ms", "rows of logits", "head ms"))
    columns = itertools.zip_longest(
        *(zip(curve.counts, curve.seconds, strict=True) for curve in (model.layers, model.head)), fillvalue=None
    )
    for layers, head in columns:
        cells = [cell for pair in (layers, head) for cell in (("", "") if pair is None else _timing(*pair))]
        table.add_row(*cells)
    print_table(table, console)
    seen_us, pair_ns = model.seen_s * 1e6, model.pair_s * 1e9
    line = f"a decode: + {seen_us:.3f} us for each token and layer it sees; a chunk: + {pair_ns:.2f} ns for each pair"
    console.print(line, highlight=False)
    if model.quality is not None:
        quality = model.quality
        line = f"off by {quality.median_error:.1%} in the median of {quality.num_steps} kinds of steps"
        console.print(f"{line}, {quality.p95_error:.1%} at the 95th percentile", highlight=False)


def _timing(count: int, seconds: float) -> tuple[str, str]:
    return str(count), f"{seconds * 1e3:.3f}"


def advice(found: Calibration) -> list[str]:
    """Return the recommended settings, one sentence a line."""
    lines = [f"{method}: left out; {why}" for method, why in found.left_out.items()]
    layer = best_exit_layer(found)
    if layer is not None:
        lines.append(f"best early exit: after layer {layer}")
    best = recommended(found)
    if best is None:
        return [*lines, "recommended: no drafts; none makes tokens faster here"]
    auto, fixed = (json.dumps(best.speculative_config(is_fixed=is_fixed)) for is_fixed in (False, True))
    lines.append(f"recommended: --speculative-config '{auto}'")
    lines.append(f"one request at a time, with a fixed number: --speculative-config '{fixed}'")
    return lines
