"""Named faults: rules over the figures of a history, each with its observation and remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twostroke.planner.constraint import Binding, own_limit_s, stalls
from twostroke.planner.signals import Signals
from twostroke.planner.words import milliseconds

_STALLED = 8.0
"""Factor on the usual step time above which a step is a fault and not just slow."""
_LONG_CHUNK = 128
"""Fewest prompt tokens of one request in a step that make a long prompt."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem that does not depend on the load."""

    name: str
    seen: str
    remedy: str


_Rule = Callable[[Signals], Fault | None]


def faults_of(found: Signals, constraint: Binding) -> tuple[Fault, ...]:
    """Return all faults that apply.

    Stalls count only where they are the constraint: idle and compute-bound servers also have some, without a fault.
    """
    rules = (*_RULES, _stalls) if constraint is Binding.PROMPTS else _RULES
    return tuple(fault for rule in rules if (fault := rule(found)) is not None)


def _thrash(found: Signals) -> Fault | None:
    share = found.num_recomputed_tokens / max(1, found.num_prompt_tokens)
    if found.num_preemptions < 3 or share < 0.1:
        return None
    seen = f"{found.num_preemptions} preemptions; {share:.0%} of all prompt tokens were computed again after one"
    remedy = "Give more KV memory, or fewer slots (--max-num-seqs)"
    has_floats = found.started is not None and found.started.layout["kv_format"] in ("bf16", "f16", "f32")
    return Fault("preemption thrash", seen, f"{remedy}, or KV in 8 bits." if has_floats else f"{remedy}.")


def _evicted(found: Signals) -> Fault | None:
    if found.evicted_again < 3:
        return None
    seen = f"a prefix that prompts share was evicted and computed again {found.evicted_again} times"
    return Fault(
        "eviction of a hot prefix", seen, "Give more KV memory, so that it lasts from one request to the next."
    )


def _stalls(found: Signals) -> Fault | None:
    if found.largest_chunk < _LONG_CHUNK or found.started is None or not stalls(found, _STALLED):
        return None
    usual_s, stalled_s = found.decode_step["p99"], found.stalled_itl["p99"]
    chunk = f"a chunk of {found.largest_chunk:,} tokens"
    seen = f"{chunk}: {milliseconds(stalled_s)} where others take {milliseconds(usual_s)}"
    return Fault("long-prompt stalls", seen, _remedy_of_stalls(found, found.started.scheduler))


def _remedy_of_stalls(found: Signals, scheduler: dict[str, Any]) -> str:
    """Return the remedy: limits tighter than those that are set, and nothing that is already on."""
    if not (scheduler["enable_chunked_prefill"] and scheduler["mixing"] == "mixed"):
        return "Leave out --no-enable-chunked-prefill and --mixing."
    own_s = own_limit_s(found)
    limit = "" if own_s is None else f" below {own_s * 1e3:g}ms"
    fewer = found.largest_chunk // 2
    return f"Limit the time between tokens (--itl-slo{limit}), or give --max-num-batched-tokens {fewer}."


def _growth(found: Signals) -> Fault | None:
    if found.blocks_slope <= 0 or found.most_blocks_used < 0.5:
        return None
    left = (1 - found.most_blocks_used) * found.num_blocks
    full_s = left / found.blocks_slope
    if full_s > found.duration_s:
        return None
    seen = f"{found.blocks_slope:,.1f} blocks more are held every second, {found.most_blocks_used:.0%} at the end"
    return Fault("KV growth", seen, f"Full in {full_s:,.0f} s: limit max_tokens, or the rate of requests.")


def _fragmentation(found: Signals) -> Fault | None:
    if found.started is None or found.started.cache["kv_reservation"] != "contiguous":
        return None
    seen = "memory is reserved for the longest request, whatever a request needs"
    return Fault("fragmentation", seen, "Leave out --kv-reservation contiguous.")


def _flooding(found: Signals) -> Fault | None:
    total = sum(found.waiting_by_tenant.values())
    if len(found.waiting_by_tenant) < 2 or total < 10 or found.started is None:
        return None
    tenant, count = max(found.waiting_by_tenant.items(), key=lambda item: item[1])
    if count < 0.8 * total or found.started.scheduler["policy"] == "fair":
        return None
    seen = f"{count} of {total} requests are those of {tenant or 'one tenant'!r}; the queue is first come, first served"
    return Fault("tenant flooding", seen, "Use --policy fair.")


def _corruption(found: Signals) -> Fault | None:
    if not found.num_corrupt:
        return None
    seen = f"{found.num_corrupt} cached blocks differed when they were computed again"
    return Fault("corrupt KV memory", seen, "Test the machine's memory; its blocks are out of use.")


def _leak(found: Signals) -> Fault | None:
    """Find a memory leak: growth by a twentieth or more in an hour.

    In a week such a process would be nine times as large.
    """
    an_hour = found.memory_growth * 3600
    if not found.memory_bytes or an_hour < max(0.05 * found.memory_bytes, 32 << 20):
        return None
    seen = (
        f"the process grows by {an_hour / 1e6:,.0f} MB an hour beside its KV blocks; it takes "
        f"{found.memory_bytes / 1e6:,.0f} MB"
    )
    return Fault("host leak", seen, "Restart it before memory runs out, and report this bug with the log.")


def _lost(found: Signals) -> Fault | None:
    if not found.num_lost:
        return None
    return Fault("engine deaths", f"the engine died {found.num_lost} times", "Read the server's log before each death.")


_RULES: tuple[_Rule, ...] = (_thrash, _evicted, _growth, _fragmentation, _flooding, _corruption, _leak, _lost)
