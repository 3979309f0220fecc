"""What a history says of an engine in a few numbers: where its time went, what was full, who disturbed whom.

Times are in seconds, shares of the time in which the engine worked. They are read off events in read_signals.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twostroke.batch import Limit
from twostroke.events import EngineStarted


@dataclass(slots=True)
class Signals:
    """The numbers."""

    started: EngineStarted | None = None
    """Of several processes that whose steps ran longest."""
    begin_s: float = 0.0
    """Time of the first request, or step of one that was there before; until one comes, of the first event."""
    end_s: float = 0.0
    busy_s: float = 0.0
    """While a step ran, of all processes together."""
    busiest_s: float = 0.0
    """The same of the process whose steps ran longest."""
    num_processes: int = 0
    """That ran steps."""
    own_s: float = 0.0
    """Of busy_s, outside of the model's operators."""
    compute_s: float = 0.0
    """Steps that arithmetic binds."""
    memory_s: float = 0.0
    """Steps that memory binds."""
    prompt_s: float = 0.0
    """Seconds of steps that arithmetic binds and that mostly compute prompts for the first time."""
    weight_bytes: float = 0.0
    """Bytes of the weights as the largest step read them; 0: the machine was not measured."""
    floor_s: float = 0.0
    """What the machine would have taken for these steps at best."""
    waiting_s: dict[Limit, float] = field(default_factory=dict[Limit, float])
    """Steps while somebody waited, by what kept them out."""
    slots_used: float = 0.0
    """Mean share of max_num_seqs that ran."""
    blocks_used: float = 0.0
    """Mean share of the KV blocks that somebody held."""
    most_blocks_used: float = 0.0
    num_steps: int = 0
    num_requests: int = 0
    """Sequences that ended, each counted once, whichever processes ran it; those that were aborted are left out."""
    num_served: int = 0
    """Number of sequences with a token, including those whose arrival a gap in the log has dropped."""
    num_outputs: int = 0
    num_prompt_tokens: int = 0
    """Computed in first strokes, what was computed again included."""
    num_recomputed_tokens: int = 0
    """Of these, after preemptions."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_evicted_hits: int = 0
    """Admissions whose prefix had been there and was evicted."""
    evicted_again: int = 0
    """Most often that this happened to prompts that begin alike, when they were first admitted."""
    ttft: dict[str, float] = field(default_factory=dict[str, float])
    queue: dict[str, float] = field(default_factory=dict[str, float])
    itl: dict[str, float] = field(default_factory=dict[str, float])
    decode_step: dict[str, float] = field(default_factory=dict[str, float])
    """Of steps without prompt tokens."""
    stalled_itl: dict[str, float] = field(default_factory=dict[str, float])
    """Gaps between tokens in steps that computed prompt tokens of others."""
    longest_ttft: tuple[float, str] = (0.0, "")
    """Seconds, and whose."""
    longest_itl: tuple[float, str] = (0.0, "")
    largest_chunk: int = 0
    decodes_per_step: float = 0.0
    """Mean requests that decode, in steps in which somebody does."""
    waiting_by_tenant: dict[str, int] = field(default_factory=dict[str, int])
    """Requests that arrived, by tenant."""
    blocks_slope: float = 0.0
    """Blocks that the fullest process holds more, a second, over the last half of the history."""
    num_blocks: int = 0
    """That this process has."""
    link_s: float = 0.0
    """While KV was awaited from other processes, with nothing of it coming."""
    link_busy_s: float = 0.0
    link_bytes: int = 0
    has_pools: bool = False
    """Whether prefill workers compute prompts."""
    num_corrupt: int = 0
    memory_growth: float = 0.0
    """Bytes a second by which the process that grows most grew over the last half of the history, without KV blocks
    used for the first time; 0 where it is not known, or did not grow steadily."""
    memory_bytes: int = 0
    """That this process took in the end."""
    num_lost: int = 0
    num_errors: int = 0
    num_aborted: int = 0

    @property
    def duration_s(self) -> float:
        """From the first request to the last event: before it, an engine has nothing to do."""
        return max(self.end_s - self.begin_s, 1e-9)

    @property
    def busy(self) -> float:
        """Share of the time in which a step ran, in the process that had most to do."""
        return min(1.0, self.busiest_s / self.duration_s)

    def waited(self, limit: Limit) -> float:
        """Share of the working time in which somebody waited for this."""
        return self.waiting_s.get(limit, 0.0) / self.busy_s if self.busy_s else 0.0


def plain_signals(found: Signals) -> dict[str, Any]:
    """For JSON: every number, without the settings."""
    names = [name for name in Signals.__slots__ if name != "started"]
    return {name: getattr(found, name) for name in names} | {
        "waiting_s": {k.value: v for k, v in found.waiting_s.items()}
    }
