"""What `twostroke replay` prints of a trace."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from twostroke.plain_words import counted
from twostroke.planner.replay import figures
from twostroke.planner.show_replay import cells, say_speed_and_what_ifs, table_of, what_if_columns, what_if_json
from twostroke.planner.trace_replay import TraceReplayed
from twostroke.tables import print_table


def print_replayed_trace(found: TraceReplayed, console: Console | None = None) -> None:
    """What ran and what did not, where the times come from, and what came out."""
    console = console or Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(f"{found.trace}: {counted(found.num_requests, 'request')}, {found.num_prompt_tokens:,} prompt tokens")
    memory = found.memory
    for number, why in (
        (found.num_beyond_context, f"the {found.max_context:,} tokens that a request may have"),
        (found.num_beyond_kv, f"the {memory.max_model_len:,} tokens that all of the KV memory holds"),
    ):
        if number:
            say(f"note: {number:,} more are left out: longer than {why}")
    say(f"step times of {found.model} on {found.machine}: {found.predicted_by}")
    say(f"KV memory: {memory.num_blocks:,} blocks of {memory.layout.block_words}, {memory.kv_bytes:,} bytes")
    num_cached = figures(found.predicted.run)["num_cached_tokens"]
    say(f"prefix cache: {num_cached:,} prompt tokens found, {num_cached / found.num_prompt_tokens:.1%} of all")
    say_speed_and_what_ifs(say, found.predicted, found.what_ifs)
    columns = {"by floors" if found.are_floors else "predicted": cells(figures(found.predicted.run))}
    print_table(table_of({**columns, **what_if_columns(found.what_ifs)}), console)


def replayed_trace_json(found: TraceReplayed) -> dict[str, Any]:
    """The same for programs; times in seconds."""
    return {
        "trace": found.trace,
        "model": found.model,
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
