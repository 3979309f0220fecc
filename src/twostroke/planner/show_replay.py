"""Printed output of `twostroke replay`, for an event log and for a trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.plain_words import counted, deviation
from twostroke.planner.back_test import LIMIT, errors, unreliable
from twostroke.planner.replay import Predicted, ReplayResult, figures
from twostroke.planner.trace_replay import TraceReplayResult
from twostroke.planner.words import significant
from twostroke.tables import plain_table, print_line, print_table

_TIMES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "itl_max")
_RATES = ("output_tok_s", "requests_per_s", "duration_s")
_COUNTS = ("num_steps", "num_preemptions", "num_cached_tokens")


def print_replayed(found: ReplayResult, console: Console | None = None) -> None:
    """Print whether decisions are the same, the errors of predictions, and the figures with other settings."""
    console = console or Console()
    say = partial(print_line, console=console, markup=True)
    if found.difference is None:
        say(f"decided again: all {found.num_steps:,} steps come out the same, block by block")
    else:
        step = found.difference.recorded.step
        say(f"decided again: step {step} comes out differently; the log is of another version, or was changed")
    quality = found.step_quality
    source = "fitted to them" if found.fitted_here else "as calibrated"
    errors_off = (deviation(error).removeprefix("+") for error in (quality.median_error, quality.p95_error))
    say(
        f"step times, {source}: {' off in the median, '.join(errors_off)} at the 95th percentile of "
        f"{quality.num_steps} kinds of steps"
    )
    if found.unfinished:
        say(f"note: {found.unfinished} requests had not ended; they are taken to end with the tokens they had")
    print_speed_and_what_ifs(say, found.back_test, found.what_ifs)
    withheld = [name for name in (*_TIMES, *_RATES, *_COUNTS) if name in _withheld(found)]
    if found.what_ifs and withheld:
        told = ", ".join(map(_label, withheld))
        say(f"note: no what-if of {told}: the back-test is off by more than {LIMIT:.0%} there")
    if found.refusal:
        say(f"[bold red]refused[/]: no what-if is answered from this log: {found.refusal}")
    print_table(_table(found), console)


def print_speed_and_what_ifs(say: Callable[[str], None], predicted: Predicted, what_ifs: Sequence[Predicted]) -> None:
    """Print the speed of the simulation, and the settings of each what-if column."""
    say(f"simulated {significant(predicted.run.duration_s)} s in {significant(predicted.wall_s)} s")
    for i, other in enumerate(what_ifs):
        say(f"what if {chr(ord('A') + i)}: {other.what_if.words}")
        if other.hand_overs is not None:
            say(f"  {_words_of_pools(other)}")


def replayed_json(found: ReplayResult) -> dict[str, Any]:
    """Return the replay as JSON for programs; times in seconds."""
    measured, predicted = figures(found.measured), figures(found.back_test.run)
    return {
        "decides_alike": found.difference is None,
        "num_steps": found.num_steps,
        "step_times": {
            "fitted_here": found.fitted_here,
            "median_error": found.step_quality.median_error,
            "p95_error": found.step_quality.p95_error,
        },
        "measured": measured,
        "back_test": {**predicted, "error": errors(predicted, measured), "speed": found.back_test.speed},
        "what_if": [what_if_json(predicted, _withheld(found)) for predicted in found.what_ifs],
        "refusal": found.refusal,
        "unfinished": found.unfinished,
    }


def _withheld(found: ReplayResult) -> list[str]:
    """Return the figures that are withheld from what-ifs."""
    return unreliable(figures(found.back_test.run), figures(found.measured))


def what_if_json(predicted: Predicted, withheld: Collection[str] = ()) -> dict[str, Any]:
    """Return one what-if as JSON for programs; withheld figures are null."""
    settings = dict(predicted.what_if.settings)
    pools = {} if predicted.hand_overs is None else {"hand_overs": asdict(predicted.hand_overs)}
    told = figures(predicted.run) | dict.fromkeys(withheld)
    return {"settings": settings, **told, **pools, "speed": predicted.speed}


def _words_of_pools(predicted: Predicted) -> str:
    """Return the assumptions about the processes, and the transfers between them, in words."""
    factor = predicted.what_if.step_time_factor
    pace = "as fast as the one process above" if factor == 1 else f"with steps {factor:g} times as long as above"
    moved = predicted.hand_overs
    assert moved is not None, "a single process hands nothing over"
    num_prompts, num_lost = len(predicted.run.requests), moved.num_requests - moved.num_fetched
    went = f"{moved.num_fetched:,} of {num_prompts:,} prompts were handed over, {moved.num_bytes:,} bytes"
    lost = f" ({num_lost:,} more did not get there)" if num_lost else ""
    return f"each process on a machine of its own, {pace}; {went}{lost}"


def _table(found: ReplayResult) -> Table:
    measured, back_test = figures(found.measured), figures(found.back_test.run)
    off_by = {name: deviation(error) for name, error in errors(back_test, measured).items()}
    columns = {"measured": cells(measured), "predicted": cells(back_test), "off by": off_by}
    return table_of({**columns, **what_if_columns(found.what_ifs, _withheld(found))})


def what_if_columns(what_ifs: Sequence[Predicted], withheld: Collection[str] = ()) -> dict[str, dict[str, str]]:
    """Return one column per what-if, lettered; "-" for withheld figures."""
    return {
        f"what if {chr(ord('A') + i)}": cells(figures(predicted.run) | dict.fromkeys(withheld))
        for i, predicted in enumerate(what_ifs)
    }


def table_of(columns: Mapping[str, Mapping[str, str]]) -> Table:
    """Return a table with a row for each figure; cells that a column lacks stay empty."""
    table = plain_table(("",), tuple(columns))
    for name in (*_TIMES, *_RATES, *_COUNTS):
        table.add_row(_label(name), *(column.get(name, "") for column in columns.values()))
    return table


def cells(of_run: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures as printed."""
    return {name: _cell(name, value) for name, value in of_run.items()}


def _label(name: str) -> str:
    if name in _TIMES:
        kind, quantile = name.split("_")
        return f"{kind.upper()} {quantile} ms"
    return {"output_tok_s": "output tokens/s", "requests_per_s": "requests/s", "duration_s": "seconds"}.get(
        name, name.removeprefix("num_").replace("_", " ")
    )


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in _TIMES:
        return significant(value * 1e3)
    return significant(value) if name in _RATES else f"{value:,}"


def print_replayed_trace(found: TraceReplayResult, console: Console | None = None) -> None:
    """Print what ran and what was left out, the source of the times, and the figures."""
    console = console or Console()
    say = partial(print_line, console=console)
    say(f"{found.trace}: {counted(found.num_requests, 'request')}, {found.num_prompt_tokens:,} prompt tokens")
    memory = found.memory
    for number, why in (
        (found.num_beyond_context, f"the {found.max_context:,} tokens that a request may have"),
        (found.num_beyond_kv, f"the {memory.max_model_len:,} tokens that all of the KV memory holds"),
    ):
        if number:
            say(f"note: {number:,} more are left out: longer than {why}")
    say(f"step times of {memory.model} on {found.machine}: {found.predicted_by}")
    say(f"KV memory: {memory.num_blocks:,} blocks of {memory.layout.block_description}, {memory.kv_bytes:,} bytes")
    num_cached = figures(found.predicted.run)["num_cached_tokens"]
    say(f"prefix cache: {num_cached:,} prompt tokens found, {num_cached / found.num_prompt_tokens:.1%} of all")
    print_speed_and_what_ifs(say, found.predicted, found.what_ifs)
    columns = {"by floors" if found.are_floors else "predicted": cells(figures(found.predicted.run))}
    print_table(table_of({**columns, **what_if_columns(found.what_ifs)}), console)


def replayed_trace_json(found: TraceReplayResult) -> dict[str, Any]:
    """Return the replay of a trace as JSON for programs; times in seconds."""
    return {
        "trace": found.trace,
        "model": found.memory.model,
        "machine": found.machine,
        "step_times": {"are_floors": found.are_floors, "by": found.predicted_by},
        "num_requests": found.num_requests,
        "num_prompt_tokens": found.num_prompt_tokens,
        "left_out": {"beyond_context": found.num_beyond_context, "beyond_kv": found.num_beyond_kv},
        "max_context": found.max_context,
        "max_model_len": found.memory.max_model_len,
        "num_kv_blocks": found.memory.num_blocks,
        "block_size": found.memory.layout.block_size,
        "predicted": {**figures(found.predicted.run), "speed": found.predicted.speed},
        "what_if": [what_if_json(predicted) for predicted in found.what_ifs],
    }
