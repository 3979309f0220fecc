"""Output of `twostroke plan --search`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.batch import Limit
from twostroke.cost.price import cost_per_million_tokens
from twostroke.plain_words import counted, multiple
from twostroke.planner.placement import CandidateResult, PlacementOutcome
from twostroke.planner.search import SearchResult
from twostroke.planner.words import milliseconds, significant
from twostroke.tables import plain_table, print_line, print_table

_Cell = Callable[[CandidateResult, PlacementOutcome], str]
_SCHEDULER_LIMITS = {Limit.TOKENS: "the token budget", Limit.SEQS: "slots (max_num_seqs)", Limit.KV: "KV blocks"}


def print_search(found: SearchResult, console: Console | None = None) -> None:
    """Print the winner, the runners-up, and whether a split pays."""
    console = console or Console()
    say = partial(print_line, console=console)
    workload, limits, ranking = found.workload, found.limits, found.ranking
    num_requests, span_s = len(workload.requests), workload.span_s
    rate = "all at once" if span_s <= 0 else f"{significant((num_requests - 1) / span_s)} requests/s"
    say(
        f"{workload.name}: {counted(num_requests, 'request')}, {rate}, {workload.num_prompt_tokens:,} prompt and "
        f"{workload.num_output_tokens:,} output tokens"
    )
    say(
        f"limits: {limits.attainment:.4g} of the requests with TTFT <= {milliseconds(limits.ttft_target_s)} and TPOT "
        f"<= {milliseconds(limits.tpot_target_s)}"
    )
    say(f"step times of {found.model} on {found.machine}: {found.predicted_by}")
    tried = f"{counted(len(found.space.candidates), 'candidate')}, {counted(len(found.space.rate_factors), 'rate')}"
    skipped = f"{counted(ranking.num_skipped, 'candidate')} ruled out by a bound"
    say(f"{tried}: {counted(ranking.num_simulations, 'run')} simulated, {skipped}")
    if found.price_per_device_hour is not None:
        say(f"price: {significant(found.price_per_device_hour)} an hour for each {found.device}")
    for note in _notes(found):
        say(f"note: {note}")
    for table in _tables(found):
        print_table(table, console)
    for line in conclusions(found):
        say(line)


def conclusions(found: SearchResult) -> list[str]:
    """Return the conclusions that the table does not show, one sentence per line."""
    winner, unsplit = found.ranking.places[0], found.ranking.unsplit
    lines = [f"best: {winner.candidate}; {binds(winner)}"]
    replicas = num_replicas(found, winner)
    if replicas is not None:
        num_devices = replicas * winner.candidate.num_devices
        lines.append(f"the workload's own rate takes {replicas} of it, {counted(num_devices, found.device)}")
    if not any(one.is_split for one in found.space.candidates):
        return lines
    if not winner.candidate.is_split:
        lines.append("the split does not pay: one process carries more requests per " + found.device)
    elif unsplit is None:
        lines.append("the split pays: no single process keeps the limits")
    else:
        gain = multiple(winner.goodput_per_device / unsplit.goodput_per_device)
        lines.append(f"the split pays: {gain} times the goodput per {found.device} of the best single process")
    return lines


def binds(found: CandidateResult) -> str:
    """Return the limit that keeps a candidate from more goodput."""
    if found.missed is None:
        return "it keeps the limits at every rate that was tried (add faster --rate-factors)"
    missed, worse = found.missed, found.missed.worse
    kept = worse.num_within / missed.num_requests
    words = (
        f"{worse.name} binds: at {missed.rate_factor:g} times the rate {kept:.1%} keep it, p99 "
        f"{milliseconds(worse.p99_s)} of {milliseconds(worse.limit_s)}"
    )
    scheduler = _SCHEDULER_LIMITS.get(missed.scheduler_limit)
    return words if scheduler is None else f"{words}; its steps were limited most by {scheduler}"


def num_replicas(found: SearchResult, of: CandidateResult) -> int | None:
    """Return how many copies of a candidate the workload's own rate needs; None where all requests arrive at once."""
    if found.workload.span_s <= 0 or of.best is None:
        return None
    return math.ceil(1 / of.best.rate_factor)


def price_per_million(found: SearchResult, of: CandidateResult) -> float | None:
    """Return the price of a million output tokens at the candidate's best rate; None without a price."""
    if found.price_per_device_hour is None or of.best is None:
        return None
    per_hour = found.price_per_device_hour * of.candidate.num_devices
    return cost_per_million_tokens(per_hour, of.best.output_tokens_per_s)


def searched_json(found: SearchResult) -> dict[str, Any]:
    """Return the results as JSON for programs; times in seconds."""
    workload, ranking = found.workload, found.ranking
    return {
        "model": found.model,
        "machine": found.machine,
        "step_times": {"are_floors": found.are_floors, "by": found.predicted_by},
        "workload": {
            "name": workload.name,
            "num_requests": len(workload.requests),
            "num_prompt_tokens": workload.num_prompt_tokens,
            "num_output_tokens": workload.num_output_tokens,
            "span_s": workload.span_s,
            "left_out": {"too_long": workload.num_too_long, "without_tokens": workload.num_without_tokens},
        },
        "limits": asdict(found.limits),
        "link_bytes_per_s": found.link_bytes_per_s,
        "num_candidates": len(found.space.candidates),
        "rate_factors": list(found.space.rate_factors),
        "num_simulations": ranking.num_simulations,
        "num_skipped": ranking.num_skipped,
        "device": found.device,
        "price_per_device_hour": found.price_per_device_hour,
        "places": [_place_json(found, one) for one in ranking.places],
        "best_single_process": None if ranking.unsplit is None else _place_json(found, ranking.unsplit),
        "split_pays": ranking.places[0].candidate.is_split,
        "notes": [*_notes(found)],
    }


def _place_json(found: SearchResult, one: CandidateResult) -> dict[str, Any]:
    assert one.best is not None, "a candidate with a place keeps the limits"
    candidate = one.candidate
    return {
        "prefill": candidate.prefill,
        "decode": candidate.decode,
        "threads": candidate.threads,
        "tensor_parallel_size": candidate.ranks,
        "max_num_batched_tokens": candidate.max_num_batched_tokens,
        "num_devices": candidate.num_devices,
        "goodput_requests_per_s": one.goodput,
        "goodput_per_device": one.goodput_per_device,
        "rate_factor": one.best.rate_factor,
        "replicas_for_the_workload": num_replicas(found, one),
        "share_within_limits": one.best.share,
        "ttft_p50_s": one.best.ttft.p50_s,
        "ttft_p99_s": one.best.ttft.p99_s,
        "tpot_p50_s": one.best.tpot.p50_s,
        "tpot_p99_s": one.best.tpot.p99_s,
        "output_tokens_per_s": one.best.output_tokens_per_s,
        "price_per_million_tokens": price_per_million(found, one),
        "binds": None if one.missed is None else one.missed.worse.option,
        "why": binds(one),
    }


def _notes(found: SearchResult) -> list[str]:
    notes: list[str] = []
    for number, why in (
        (found.workload.num_too_long, "they are longer than a worker takes"),
        (found.workload.num_without_tokens, "they ended before their first token"),
    ):
        if number:
            notes.append(f"{number:,} more requests are left out: {why}")
    if found.link_is_assumed and any(one.is_split for one in found.space.candidates):
        rate = found.link_bytes_per_s / 1e9
        notes.append(f"the link between workers is taken to carry {rate:g} GB/s each (--link-bytes-per-s)")
    if found.device == "core" and any(one.is_split for one in found.space.candidates):
        notes.append(
            "each worker's steps are predicted as if it had the machine to itself; in fact workers share the bandwidth "
            "of its memory, so splits look better than they are"
        )
    return [*notes, *found.notes]


def _tables(found: SearchResult) -> Iterator[Table]:
    """Yield a table of the places with their throughput, then one of their times; each fits into 80 columns."""
    candidates: dict[str, _Cell] = {"P:D": lambda one, _: _split(one)}
    if len({one.threads for one in found.space.candidates}) > 1:
        candidates["threads"] = lambda one, _: f"{one.candidate.threads}"
    if len({one.ranks for one in found.space.candidates}) > 1:
        candidates["ranks"] = lambda one, _: f"{one.candidate.ranks}"
    candidates |= {
        "budget": lambda one, _: f"{one.candidate.max_num_batched_tokens}",
        f"{found.device}s": lambda one, _: f"{one.candidate.num_devices}",
        "good/s": lambda one, _: significant(one.goodput),
        f"per {found.device}": lambda one, _: significant(one.goodput_per_device),
        "rate": lambda _, best: f"x{best.rate_factor:g}",
        "binds": lambda one, _: "rates" if one.missed is None else one.missed.worse.name,
    }
    if found.price_per_device_hour is not None:
        candidates["per M"] = lambda one, _: significant(price_per_million(found, one) or 0)
    yield _table(found, candidates)
    yield _table(
        found,
        {
            "TTFT p50 ms": lambda _, best: significant(best.ttft.p50_s * 1e3),
            "TTFT p99 ms": lambda _, best: significant(best.ttft.p99_s * 1e3),
            "TPOT p50 ms": lambda _, best: significant(best.tpot.p50_s * 1e3),
            "TPOT p99 ms": lambda _, best: significant(best.tpot.p99_s * 1e3),
        },
    )


def _table(found: SearchResult, columns: Mapping[str, _Cell]) -> Table:
    """Return a row for each place and for the best single process."""
    table = plain_table((), ("#", *columns), gap=1)
    rows = list(found.ranking.places)
    if found.ranking.unsplit is not None and found.ranking.unsplit not in rows:
        rows.append(found.ranking.unsplit)
    for i, one in enumerate(rows, 1):
        if one.best is not None:
            number = f"{i}" if one in found.ranking.places else "-"
            table.add_row(number, *(cell(one, one.best) for cell in columns.values()))
    return table


def _split(found: CandidateResult) -> str:
    candidate = found.candidate
    return f"{candidate.prefill}:{candidate.decode}" if candidate.is_split else "one"
