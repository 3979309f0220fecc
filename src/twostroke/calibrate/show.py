"""What `twostroke calibrate` prints."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from twostroke.cost.calibration import Calibration, best_exit_layer, choices_of, recommended


def print_calibration(found: Calibration, console: Console | None = None) -> None:
    """Steps by their size, drafters by what they give, and what to do."""
    console = console or Console()
    plain_s = found.verify_s(1)
    console.print(f"{found.model}, one request, {found.context_tokens} tokens of context", highlight=False)
    steps = _table("query tokens", "step ms", "of one token's")
    for timing in found.step_s:
        steps.add_row(str(timing.size), f"{timing.seconds * 1e3:.3f}", f"{timing.seconds / plain_s:.2f}")
    console.print(steps)
    drafters = _table("drafts", "stand", "found", "draft ms", "+ step ms", "best k", "tok/pass", "tok/s", "gain")
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
    console.print(drafters)
    for line in advice(found):
        console.print(line, highlight=False, soft_wrap=True)


def advice(found: Calibration) -> list[str]:
    """What to do, a sentence a line."""
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


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table
