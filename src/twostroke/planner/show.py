"""What `twostroke plan` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from twostroke.config.kv_format import kv_format_warning
from twostroke.planner.memory import KVKind
from twostroke.planner.plan import Plan
from twostroke.planner.what_if import Change, Outcome


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Memory, times, the frontier, and what changes would do."""
    console = console or Console()
    memory, machine = plan.memory, plan.machine
    ranks = "" if memory.num_ranks == 1 else f", {memory.num_ranks} ranks (memory is each rank's)"
    form = memory.dtype if memory.quantization is None else f"{memory.quantization}, {memory.dtype}"
    title = f"{memory.model} ({memory.architecture}, {memory.num_parameters / 1e6:,.1f} M parameters, {form})"
    limits = f"{machine.limits.flops_per_s / 1e12:,.3g} TFLOP/s, {machine.limits.bytes_per_s / 1e9:,.4g} GB/s"
    how = "published" if machine.is_published else "measured now"
    _say(console, f"{title} on {machine.name}: {limits}, {how}{ranks}")
    console.print(_memory(plan))
    for remark in memory.remarks:
        _say(console, f"note: {remark}")
    _say(console, f"\nprompts, computed alone in steps of {memory.max_tokens_per_step} tokens")
    console.print(_prompts(plan))
    _say(console, f"\ndecoding, {plan.context} tokens of context each, up to {plan.most_requests} requests")
    console.print(_frontier(plan))
    _say(console, "\nwhat a change would do (GB of weights, requests by their blocks, x: times what it is)")
    console.print(_changes(plan))
    for line in advice(plan):
        _say(console, line)


def advice(plan: Plan) -> list[str]:
    """What tables do not say, a sentence a line."""
    lines = [f"{change.name}: not possible; {change.why_not}" for change in plan.changes if change.outcome is None]
    warning = kv_format_warning("int4")
    if warning is not None and any(change.name == "KV in int4" and change.outcome for change in plan.changes):
        lines.append(warning)
    pools = plan.two_pools
    if pools is not None:
        rate = "predicted" if pools.is_predicted else "highest possible"
        line = (
            f"two pools: the KV of a prompt ({pools.kv_bytes_per_token:,} bytes a token) hides behind its prefill on a "
            f"link of {pools.needed_bytes_per_s / 1e9:,.3g} GB/s or more (at the {rate} "
            f"{pools.prefill_tokens_per_s:,.0f} prompt tokens/s)"
        )
        if pools.is_hidden is not None:
            line += f"; yours {'does' if pools.is_hidden else 'does not'}"
        lines.append(line)
    lines += [
        f"speculation by {choice.drafter.words}, {choice.num_drafts} drafts: {choice.gain:.2f} times the tokens/s of "
        f"one request, as calibrated ({choice.drafter.acceptance:.0%} of its drafts stood)"
        for choice in plan.drafting
    ]
    if plan.is_predicted:
        lines.append(f"times are predicted by measured steps ({plan.predicted_by}), beside floors that nothing beats")
    else:
        lines.append(f"no times are predicted: {plan.predicted_by}")
        lines.append("times are floors of operations and bytes: nothing is faster, everything real is slower")
    if plan.machine.is_published and plan.memory.quantization is not None:
        lines.append(
            "weights are counted as the CPU's kernels pack them; on a GPU, Triton's keep the bits, torch's make floats"
        )
    if not plan.machine.is_published:
        lines.append("rates were measured just now: where others are at work on this machine, real floors are lower")
    if not plan.machine.is_published and plan.memory.quantization is not None:
        lines.append("the rate of arithmetic is that of floats: where compute binds, products of 8 bits may be faster")
    return lines


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = _table("memory", "bytes", "")
    table.add_row("there is", f"{memory.memory_bytes:,}", "")
    table.add_row("weights", f"{memory.weight_bytes:,}", _share(memory.weight_bytes, memory.memory_bytes))
    if memory.draft_weight_bytes:
        table.add_row("drafts", f"{memory.draft_weight_bytes:,}", "")
    table.add_row("largest step", f"{memory.step_bytes:,}", "")
    table.add_row("tables of the context", f"{memory.context_bytes:,}", "")
    blocks = f"{memory.num_blocks:,} blocks of {memory.layout.block_size} tokens, {memory.layout.kv_format}"
    table.add_row("KV cache", f"{memory.kv_bytes:,}", blocks)
    kinds = ", ".join(_kind(kind) for kind in memory.kinds)
    table.add_row("KV per token", f"{memory.kv_bytes_per_token:,}", kinds)
    fit = f"of {memory.max_model_len:,} tokens fit at once ({memory.max_num_seqs} slots)"
    table.add_row("longest requests", f"{memory.max_concurrent_requests:,}", fit)
    return table


def _kind(kind: KVKind) -> str:
    sees = "all" if kind.window is None else f"{kind.window:,} tokens"
    return f"{kind.bytes_per_token:,} in {kind.num_layers} layers that see {sees}"


def _prompts(plan: Plan) -> Table:
    table = _table("prompt tokens", "TTFT floor", *(("predicted",) if plan.is_predicted else ()), "bound by")
    for point in plan.ttft:
        predicted = () if point.predicted_s is None else (_ms(point.predicted_s),)
        table.add_row(f"{point.num_prompt_tokens:,}", _ms(point.floor_s), *predicted, point.bound)
    return table


def _frontier(plan: Plan) -> Table:
    predicted = ("predicted", "tok/s") if plan.is_predicted else ()
    priced = ("per M tokens",) if plan.machine.price_per_hour is not None else ()
    table = _table("batch", "TPOT floor", "tok/s at most", *predicted, *priced, "bound by")
    for point in plan.frontier:
        row = [str(point.batch), _ms(point.tpot_floor_s), f"{point.tokens_per_s_ceiling:,.0f}"]
        if point.tpot_predicted_s is not None and point.tokens_per_s_predicted is not None:
            row += [_ms(point.tpot_predicted_s), f"{point.tokens_per_s_predicted:,.0f}"]
        if point.cost_per_million_tokens is not None:
            row.append(f"{point.cost_per_million_tokens:,.3g}")
        table.add_row(*row, point.bound)
    return table


def _changes(plan: Plan) -> Table:
    table = _table("change", "GB", "blocks", "requests", "TPOT floor", "x", "tok/s", "x", gap=1)
    table.add_row("as it is", *_figures(plan.base, None, plan.base))
    for change in plan.changes:
        if change.outcome is not None:
            table.add_row(change.name, *_figures(change.outcome, change, plan.base))
    return table


def _figures(outcome: Outcome, change: Change | None, base: Outcome) -> list[str]:
    cells = [f"{outcome.weight_bytes / 1e9:,.3f}", f"{outcome.num_blocks:,}", f"{outcome.num_requests:,}"]
    for name, text in (
        ("tpot_floor_s", _ms(outcome.tpot_floor_s)),
        ("most_tokens_per_s", f"{outcome.most_tokens_per_s:,.0f}"),
    ):
        factor = None if change is None else change.factor(base, name)
        cells += [text, "" if factor is None else f"{factor:,.2f}"]
    return cells


def _table(*columns: str, gap: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or not name else "right", no_wrap=True)
    return table


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{2 if seconds >= 1e-3 else 4}f} ms"
