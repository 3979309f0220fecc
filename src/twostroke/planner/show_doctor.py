"""Printed output of `twostroke doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from twostroke.plain_words import counted, multiple
from twostroke.planner.constraint import Binding, limit_lines
from twostroke.planner.doctor import REFUSED, Diagnosis
from twostroke.planner.levers import Lever
from twostroke.planner.signals import plain_signals
from twostroke.planner.words import milliseconds, significant
from twostroke.tables import print_line

_MIN_SHOWN_COST = 1.05
"""Factor on a figure above which a cost is printed."""
_WITHOUT_LEVERS = (Binding.NONE, Binding.COMPUTE)
"""Constraints that no setting relieves. For the others, a lever was tried, or none is known to help."""


_OF_LEVER = ("name", "flags", "settings", "metric", "is_exact", "before", "after", "gain")


def print_diagnosis(found: Diagnosis, console: Console | None = None) -> None:
    """Print the constraint, the evidence for it, and the remedies."""
    say = partial(print_line, console=console or Console(), markup=True)
    signals = found.signals
    where = f" in the busiest of {signals.num_processes} processes" if signals.num_processes > 1 else ""
    say(
        f"{counted(signals.num_requests, 'request')}, {counted(signals.num_outputs, 'token')}, "
        f"{counted(signals.num_steps, 'step')} in "
        f"{signals.duration_s:,.1f} s, of which steps ran in {signals.busy:.0%}{where}"
    )
    say(f"[bold]bound by[/] {found.constraint.value}")
    for line in found.evidence:
        say(f"  {line}")
    for line in limit_lines(signals):
        say(f"[bold]limit[/]    {line}")
    for line in _lever_lines(found):
        say(line)
    for fault in found.faults:
        say(f"[bold red]fault[/]    {fault.name}: {fault.seen}")
        say(f"  {fault.remedy}")
    if found.example:
        say(f"see      twostroke explain '{found.example}', the request that was hit most")
    if found.remark:
        say(f"[yellow]note[/]     {found.remark}")


def _lever_lines(found: Diagnosis) -> Iterator[str]:
    """Yield lines about levers with their predicted effects, then about those that have to be measured."""
    for i, lever in enumerate(found.levers):
        yield f"{'  or    ' if i else '[bold]advice[/]  '} {lever.name}: {lever.flags}"
        yield from (f"  {line}" for line in _effects(lever))
    if not found.levers:
        yield f"[bold]advice[/]   {_without_lever(found)}"
    for lever in found.to_measure:
        yield f"measure  {lever.name}: {lever.flags}"
        yield f"  not predicted: {lever.measure}"


def _without_lever(found: Diagnosis) -> str:
    """Return the text that is printed when there is no lever."""
    is_refused = found.remark.startswith(REFUSED) or not (found.has_predictions or found.constraint in _WITHOUT_LEVERS)
    is_open = is_refused or found.to_measure or limit_lines(found.signals)
    return "none whose effect can be predicted" if is_open else "nothing to do"


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON for programs."""
    return {
        "constraint": found.constraint.value,
        "evidence": list(found.evidence),
        "limits": list(limit_lines(found.signals)),
        "levers": [
            {name: getattr(lever, name) for name in _OF_LEVER}
            | {"costs": {name: {"before": b, "after": a} for name, (b, a) in lever.costs.items()}}
            for lever in found.levers
        ],
        "to_measure": [
            {"name": lever.name, "flags": lever.flags, "is_exact": lever.is_exact, "measure": lever.measure}
            for lever in found.to_measure
        ],
        "faults": [asdict(fault) for fault in found.faults],
        "example": found.example,
        "signals": plain_signals(found.signals),
        "remark": found.remark,
    }


def _effects(lever: Lever) -> Iterator[str]:
    """Yield lines about the predicted effects of a lever."""
    if lever.before is not None and lever.after is not None:
        yield f"predicted: {_words(lever)}"
    for name, (before, after) in lever.costs.items():
        if after > _MIN_SHOWN_COST * before:
            yield f"it costs: {name.replace('_', ' ').upper()} {milliseconds(before)} to {milliseconds(after)}"
    if not lever.is_exact:
        yield "answers would differ a little: see twostroke bench quality"


def _words(lever: Lever) -> str:
    name = {"output_tok_s": "output tokens/s"}.get(lever.metric, lever.metric.replace("_", " ").upper())
    form = significant if lever.metric == "output_tok_s" else milliseconds
    before, after = (form(value or 0.0) for value in (lever.before, lever.after))
    where = ", with a second machine as fast as this one" if "link_bytes_per_s" in lever.settings else ""
    return f"{name} {before} to {after}, {multiple(lever.gain)} times as good{where}"
