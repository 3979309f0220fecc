"""Printed output of `twostroke plan`; with --measured the run follows the plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rich.console import Console
from rich.table import Table

from twostroke.config.kv_format import kv_format_warning
from twostroke.plain_words import deviation, multiple
from twostroke.planner.after_run import PlanComparison
from twostroke.planner.back_test import errors
from twostroke.planner.memory import KVKind, MemoryPlan
from twostroke.planner.plan import MAX_VERIFIED_DRAFTS, Plan, RequestedUsers
from twostroke.planner.prompt_cost import PromptCost
from twostroke.planner.show_replay import cells, table_of
from twostroke.planner.what_if import Change, PlanFigures
from twostroke.planner.words import binary, milliseconds, significant
from twostroke.tables import plain_table, print_line, print_table


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print memory, times, the frontier, and the effects of changes."""
    console = console or Console()
    say = partial(print_line, console=console)
    memory, machine = plan.memory, plan.machine
    dealt = " with whole experts" if memory.splits_by_expert else ""
    ranks = "" if memory.num_ranks == 1 else f", {memory.num_ranks} ranks{dealt} (memory is each rank's)"
    form = memory.dtype if memory.quantization is None else f"{memory.quantization}, {memory.dtype}"
    parameters = f"{memory.num_parameters / 1e6:,.1f} M parameters"
    if memory.experts:
        parameters += f", {memory.num_active_parameters / 1e6:,.1f} M of them for a token"
    title = f"{memory.model} ({memory.architecture}, {parameters}, {form})"
    rates = significant(machine.limits.flops_per_s / 1e12), significant(machine.limits.bytes_per_s / 1e9)
    limits = "{} TFLOP/s, {} GB/s".format(*rates)
    say(f"{title} on {machine.name}: {limits}, {_how(plan)}{ranks}")
    for line in _experts(plan):
        say(line)
    if plan.prompt is not None:
        say(f"\n{_prompt(plan, plan.prompt)}\n")
    print_table(_memory(plan), console)
    if plan.asked is not None:
        say(_users(plan, plan.asked))
    if memory.kv_limit:
        say(f"KV cache: {memory.kv_limit}")
    for remark in memory.remarks:
        say(f"note: {remark}")
    if plan.ttft:
        say(f"\nprompts, computed alone in steps of {memory.max_tokens_per_step} tokens")
        print_table(_prompts(plan), console)
    if plan.too_long_prompts:
        say(f"{'' if plan.ttft else chr(10)}{_too_long(plan)}")
    say(f"\ndecoding, {plan.context} tokens of context each, up to {plan.most_requests} requests")
    print_table(_frontier(plan), console)
    requests = "1 request" if plan.verified_batch == 1 else f"{plan.verified_batch} requests"
    end = "" if len(plan.verification) > MAX_VERIFIED_DRAFTS else "; more drafts exceed --max-num-batched-tokens"
    say(f"\na decode step of {requests} that verifies drafts, {plan.context} tokens of context each{end}")
    print_table(_verification(plan), console)
    say("\nwhat a change would do (GB of weights, requests by their blocks, x: times what it is)")
    print_table(_changes(plan), console)
    for line in advice(plan):
        say(line)


def advice(plan: Plan) -> list[str]:
    """Return remarks that are not in the tables, one sentence per line."""
    lines = [f"{change.name}: not possible; {change.why_not}" for change in plan.changes if change.outcome is None]
    if plan.memory.experts:
        lines.append(
            "experts read: those of a layer that a batch is expected to hit, as if each token chose at random; a step "
            "reads no others"
        )
    warning = kv_format_warning("int4")
    if warning is not None and any(change.name == "KV in int4" and change.outcome for change in plan.changes):
        lines.append(warning)
    pools = plan.two_pools
    if pools is not None:
        rate = "predicted" if pools.is_predicted else "highest possible"
        line = (
            f"two pools: the KV of a prompt ({pools.kv_bytes_per_token:,} bytes a token) hides behind its prefill on a "
            f"link of {significant(pools.needed_bytes_per_s / 1e9)} GB/s or more (at the {rate} "
            f"{pools.prefill_tokens_per_s:,.0f} prompt tokens/s)"
        )
        if pools.is_hidden is not None:
            line += f"; yours {'does' if pools.is_hidden else 'does not'}"
        lines.append(line)
    lines += [
        f"speculation by {choice.drafter.words}, {choice.num_drafts} drafts: {multiple(choice.gain)} times the "
        f"tokens/s of one request, as calibrated ({choice.drafter.acceptance:.0%} of its drafts accepted)"
        for choice in plan.drafting
    ]
    if plan.is_predicted:
        beside = f"{_floor(plan)}s from operations and bytes"
        lines.append(f"times are predicted by measured steps ({plan.predicted_by}), beside {beside}")
    else:
        lines.append(f"no times are predicted: {plan.predicted_by}")
        if plan.machine.limits.is_estimate:
            lines.append(
                "other processes ran while this machine was measured, or its rates varied: floors are estimates, and "
                "may be too high"
            )
        else:
            lines.append("times are floors of operations and bytes: real steps take longer")
    if plan.memory.utilization is not None:
        lines.append(
            "the largest step of a card is predicted here; the engine measures it at start, and subtracts the "
            "memory of other processes and of the CUDA context from the KV cache"
        )
    return lines


def _how(plan: Plan) -> str:
    """Return where the limits come from, in words."""
    how = "published" if plan.machine.is_published else "measured now"
    if plan.machine.limits.is_estimate:
        how = "an estimate, measured while other processes ran or rates varied"
    return f"{how}; {plan.raised}" if plan.raised else how


def _floor(plan: Plan) -> str:
    """Return the word for a time from the machine's rates: not a floor if the rates may be too low."""
    return "estimate" if plan.machine.limits.is_estimate else "floor"


def _prompt(plan: Plan, prompt: PromptCost) -> str:
    """Return the figures of one request, in lines."""
    seconds = prompt.ttft_floor_s if prompt.ttft_predicted_s is None else prompt.ttft_predicted_s
    form = "as one message by the chat template" if prompt.is_chat else "as a completion"
    kv = f"{prompt.kv_bytes:,} bytes of KV ({binary(prompt.kv_bytes)})"
    blocks = f"with {prompt.max_tokens:,} output tokens {prompt.kv_block_bytes:,} in whole blocks"
    times = f"TTFT {milliseconds(seconds)}, all {prompt.max_tokens:,} tokens in {milliseconds(prompt.total_s)}"
    lines = [
        f"prompt {form}: {prompt.num_prompt_tokens:,} tokens, {kv}; {blocks}",
        f"{times} ({prompt.basis}), alone on the machine",
    ]
    if prompt.max_tokens < prompt.asked_max_tokens:
        lines.append(
            f"--max-tokens {prompt.asked_max_tokens:,} is cut to {prompt.max_tokens:,}: prompt and output together "
            f"have at most {plan.memory.max_model_len:,} tokens (--max-model-len)"
        )
    if prompt.price is None:
        lines.append("price: give --price-per-hour")
    else:
        lines.append(f"price {significant(prompt.price)} at {plan.machine.price_per_hour:g} an hour ({prompt.basis})")
    return "\n".join(lines)


def _users(plan: Plan, asked: RequestedUsers) -> str:
    """Return whether the requested number of users fits, in words, with the limit."""
    memory = plan.memory
    more = "" if asked.most_of_all is None else f", {asked.most_of_all:,} at 100%"
    what = f"{asked.num_requests:,} requests of {memory.max_model_len:,} tokens"
    line = f"{what} {'fit' if asked.fits else 'do not fit'}: at most {asked.most:,} do{_decided_by(memory)}{more}"
    if asked.fits and asked.num_requests > memory.max_num_seqs:
        line += f"; only {memory.max_num_seqs:,} run at once (--max-num-seqs)"
    return line


def _too_long(plan: Plan) -> str:
    """Return which of the requested prompt lengths are left out, with the limit."""
    lengths = ", ".join(f"{length:,}" for length in plan.too_long_prompts)
    return (
        f"left out: prompts of {lengths} tokens; a request has at most {plan.memory.max_model_len:,} (--max-model-len)"
    )


def _decided_by(memory: MemoryPlan) -> str:
    """Return what sized the KV cache, in words; empty where free memory does."""
    if memory.utilization is not None:
        return f" at {memory.utilization:.0%} of the card"
    given = {"--num-kv-blocks": memory.cache.num_kv_blocks, "--kv-cache-memory": memory.cache.kv_cache_memory}
    return "".join(f" with {flag} {value}" for flag, value in given.items() if value is not None)


def _verification(plan: Plan) -> Table:
    step = f"step {_floor(plan)}"
    table = plain_table(("drafts each",), ("operations/byte", step, "per token, all accepted", "bound by"))
    for point in plan.verification:
        times = milliseconds(point.floor_s), milliseconds(point.least_tpot_s)
        table.add_row(str(point.num_drafts), significant(point.intensity), *times, point.bound)
    return table


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = plain_table(("memory",), ("bytes",))
    table.add_column()
    used = "" if memory.utilization is None else f"{memory.utilization:.0%} of them may be in use"
    table.add_row("there is", f"{memory.memory_bytes:,}", used)
    if memory.others_bytes:
        table.add_row("other processes", f"{memory.others_bytes:,}", "")
    table.add_row("weights", f"{memory.weight_bytes:,}", _share(memory.weight_bytes, memory.memory_bytes))
    if memory.draft_weight_bytes:
        table.add_row("drafts", f"{memory.draft_weight_bytes:,}", "")
    table.add_row("largest step", f"{memory.step_bytes:,}", "")
    table.add_row("tables of the context", f"{memory.context_bytes:,}", "")
    if memory.reserve_bytes:
        table.add_row("reserve", f"{memory.reserve_bytes:,}", "with recorded passes")
    blocks = f"{memory.num_blocks:,} blocks of {memory.layout.block_description}, {memory.layout.kv_format}"
    table.add_row("KV cache", f"{memory.kv_bytes:,}", blocks)
    kinds = ", ".join(_kind(kind) for kind in memory.kinds)
    table.add_row("KV per token", f"{memory.kv_bytes_per_token:,}", kinds)
    for num_tokens in dict.fromkeys((plan.context, memory.max_model_len)):
        num_bytes = num_tokens * memory.kv_bytes_per_token * memory.num_ranks
        of_all = "" if memory.num_ranks == 1 else ", of all ranks"
        words = f"{binary(num_bytes)}{of_all}{_held(memory, num_tokens, num_bytes)}"
        table.add_row(f"KV of {num_tokens:,} tokens", f"{num_bytes:,}", words)
    fit = f"of {memory.max_model_len:,} tokens fit at once ({memory.max_num_seqs} slots)"
    table.add_row("longest requests", f"{memory.max_concurrent_requests:,}", fit)
    return table


def _held(memory: MemoryPlan, num_tokens: int, num_bytes: int) -> str:
    """Return the KV that a request holds at once, where windows free the rest; otherwise empty."""
    if all(kind.window is None for kind in memory.kinds) or memory.cache.kv_reservation == "contiguous":
        return ""
    held = memory.blocks_for(num_tokens) * memory.kv_bytes_per_block * memory.num_ranks
    return f"; {binary(held)} of it at once" if held < num_bytes else ""


def _experts(plan: Plan) -> Iterator[str]:
    """Yield lines about a model's experts; none for a dense model."""
    memory = plan.memory
    if memory.bytes_per_expert_weight is None:
        return
    for kind in memory.experts:
        yield f"experts: {kind.num_chosen} of {kind.num_experts} compute a token in each of {kind.num_layers} layers"
    bits = f"{8 * memory.bytes_per_expert_weight:.2f}"
    yield f"each of their weights takes {bits} bits in memory, with scales, biases and padding"
    if not plan.has_measured_experts:
        yield (
            "the experts that several tokens read are an upper bound: routers that prefer some experts read fewer, "
            "and steps may be faster than these floors (--measured LOG counts the experts of a run)"
        )


def _kind(kind: KVKind) -> str:
    sees = "all" if kind.window is None else f"{kind.window:,} tokens"
    return f"{binary(kind.bytes_per_token)} in {kind.num_layers} layers that see {sees}"


def _prompts(plan: Plan) -> Table:
    predicted = ("predicted",) if plan.is_predicted else ()
    table = plain_table(("prompt tokens",), (f"TTFT {_floor(plan)}", *predicted, "bound by"))
    for point in plan.ttft:
        predicted = () if point.predicted_s is None else (milliseconds(point.predicted_s),)
        table.add_row(f"{point.num_prompt_tokens:,}", milliseconds(point.floor_s), *predicted, point.bound)
    return table


def _frontier(plan: Plan) -> Table:
    predicted = ("predicted", "tok/s") if plan.is_predicted else ()
    priced = ("per M tokens",) if plan.machine.price_per_hour is not None else ()
    read = ()
    if plan.memory.experts:
        read = ("experts read" if plan.has_measured_experts else "experts at most",)
    columns = (f"TPOT {_floor(plan)}", "tok/s at most", *predicted, *priced, *read, "bound by")
    table = plain_table(("batch",), columns)
    for point in plan.frontier:
        row = [str(point.batch), milliseconds(point.tpot_floor_s), f"{point.tokens_per_s_ceiling:,.0f}"]
        if point.tpot_predicted_s is not None and point.tokens_per_s_predicted is not None:
            row += [milliseconds(point.tpot_predicted_s), f"{point.tokens_per_s_predicted:,.0f}"]
        if point.cost_per_million_tokens is not None:
            row.append(significant(point.cost_per_million_tokens))
        if read:
            row.append(significant(point.distinct_experts))
        table.add_row(*row, point.bound)
    return table


def _changes(plan: Plan) -> Table:
    figures = ("GB", "blocks", "requests", f"TPOT {_floor(plan)}", "x", "tok/s", "x")
    table = plain_table(("change",), figures, gap=1)
    table.add_row("as it is", *_figures(plan.base, None, plan.base))
    for change in plan.changes:
        if change.outcome is not None:
            is_floor = change.is_published and plan.machine.limits.is_estimate
            name = f"{change.name} (floor)" if is_floor else change.name
            table.add_row(name, *_figures(change.outcome, change, plan.base))
    return table


def _figures(outcome: PlanFigures, change: Change | None, base: PlanFigures) -> list[str]:
    cells = [significant(outcome.weight_bytes / 1e9), f"{outcome.num_blocks:,}", f"{outcome.num_requests:,}"]
    for name, text in (
        ("tpot_floor_s", milliseconds(outcome.tpot_floor_s)),
        ("most_tokens_per_s", f"{outcome.most_tokens_per_s:,.0f}"),
    ):
        factor = None if change is None else change.factor(base, name)
        cells += [text, "" if factor is None else multiple(factor)]
    return cells


def _share(part: int, whole: int) -> str:
    return f"{significant(100 * part / whole)}%"


def print_after_run(after: PlanComparison, console: Console | None = None) -> None:
    """Print sizes, then times, as planned and as measured."""
    console = console or Console()
    console.print("\nafter the run: sizes, as planned and as the engine had them")
    table = plain_table(("",), ("planned", "measured", "off by"))
    for one in after.sizes:
        off = "exact" if one.planned == one.measured else deviation(one.error)
        table.add_row(one.figure.replace("_", " "), f"{one.planned:,}", f"{one.measured:,}", off)
    print_table(table, console)
    if after.why_not:
        console.print(f"times are not compared: {after.why_not}", highlight=False)
        return
    if after.planned:
        console.print("times of its requests: predictions by calibrated steps, and as measured", highlight=False)
        off_by = {name: deviation(error) for name, error in errors(after.planned, after.measured).items()}
        columns = {"planned": cells(after.planned), "measured": cells(after.measured), "off by": off_by}
        print_table(table_of(columns), console)
        return
    console.print("its steps beside their floors; no step is faster than its floor", highlight=False)
    print_table(_floors(after), console)


def _floors(after: PlanComparison) -> Table:
    table = plain_table(("",), ("steps", "median", "median floor", "floor of time", "nearest"))
    for kind in after.beside_floors:
        times = milliseconds(kind.median_s), milliseconds(kind.median_floor_s)
        shares = (f"{significant(100 * share)}%" for share in (kind.share, kind.nearest))
        table.add_row(kind.kind, f"{kind.num_steps:,}", *times, *shares)
    return table
