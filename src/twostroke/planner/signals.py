"""Figures of an engine's history: use of time and memory, waits, and stalls.

Times are in seconds; shares are of the time in which the engine worked. read_signals.py computes them from events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twostroke.batch import Limit
from twostroke.events import EngineStarted


@dataclass(slots=True)
class Signals:
    """Figures of one history."""

    started: EngineStarted | None = None
    """Start event. With several processes, the one of the process whose steps ran longest."""
    begin_s: float = 0.0
    """Time of the first arrival or step; before there is one, time of the first event."""
    end_s: float = 0.0
    busy_s: float = 0.0
    """Seconds in which a step ran, summed over all processes."""
    busiest_s: float = 0.0
    """Seconds in which a step ran, of the process whose steps ran longest."""
    num_processes: int = 0
    """Number of processes that ran steps."""
    own_s: float = 0.0
    """Seconds of busy_s outside of the model's operators."""
    compute_s: float = 0.0
    """Seconds of compute-bound steps."""
    memory_s: float = 0.0
    """Seconds of memory-bound steps."""
    prompt_s: float = 0.0
    """Seconds of compute-bound steps that mostly compute prompts for the first time."""
    weight_bytes: float = 0.0
    """Bytes of the weights that the largest step read; 0: the machine was not measured."""
    floor_s: float = 0.0
    """Least seconds that the machine could take for these steps."""
    waiting_s: dict[Limit, float] = field(default_factory=dict[Limit, float])
    """Seconds of steps while requests waited, by the limit that kept them waiting."""
    slots_used: float = 0.0
    """Mean share of max_num_seqs that ran."""
    blocks_used: float = 0.0
    """Mean share of the KV blocks that were held."""
    most_blocks_used: float = 0.0
    num_steps: int = 0
    num_requests: int = 0
    """Number of sequences that ended, aborted ones excluded; each counts once, on whichever processes it ran."""
    num_served: int = 0
    """Number of sequences with a token, including those whose arrival a gap in the log has dropped."""
    num_outputs: int = 0
    num_prompt_tokens: int = 0
    """Tokens computed in prefills, recomputed ones included."""
    num_recomputed_tokens: int = 0
    """Prompt tokens computed after preemptions."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_evicted_hits: int = 0
    """Number of admissions whose prefix had been cached and was evicted."""
    evicted_again: int = 0
    """Largest number of those admissions whose prompts have the same beginning; first admissions only."""
    ttft: dict[str, float] = field(default_factory=dict[str, float])
    queue: dict[str, float] = field(default_factory=dict[str, float])
    itl: dict[str, float] = field(default_factory=dict[str, float])
    decode_step: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of steps without prompt tokens."""
    stalled_itl: dict[str, float] = field(default_factory=dict[str, float])
    """Gaps between tokens in steps that computed prompt tokens of other requests."""
    longest_ttft: tuple[float, str] = (0.0, "")
    """Seconds, and id of the request."""
    longest_itl: tuple[float, str] = (0.0, "")
    largest_chunk: int = 0
    decodes_per_step: float = 0.0
    """Mean number of decoding requests in steps with any."""
    waiting_by_tenant: dict[str, int] = field(default_factory=dict[str, int])
    """Number of requests that arrived, by tenant."""
    blocks_slope: float = 0.0
    """Growth of the fullest process's held blocks over the last half of the history, in blocks a second."""
    num_blocks: int = 0
    """Number of blocks of this process."""
    link_s: float = 0.0
    """Seconds of waiting for KV from other processes."""
    link_busy_s: float = 0.0
    link_bytes: int = 0
    has_pools: bool = False
    """Whether prefill workers compute prompts."""
    num_corrupt: int = 0
    memory_growth: float = 0.0
    """Growth in bytes a second of the process that grew most over the last half of the history, excluding KV blocks
    used for the first time. 0: not known, or no steady growth."""
    memory_bytes: int = 0
    """Bytes of this process at the end."""
    num_lost: int = 0
    num_errors: int = 0
    num_aborted: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last event; before the first request an engine has nothing to do."""
        return max(self.end_s - self.begin_s, 1e-9)

    @property
    def busy(self) -> float:
        """Share of the time in which a step ran, in the busiest process."""
        return min(1.0, self.busiest_s / self.duration_s)

    def waited(self, limit: Limit) -> float:
        """Return the share of the working time in which requests waited for this limit."""
        return self.waiting_s.get(limit, 0.0) / self.busy_s if self.busy_s else 0.0


def plain_signals(found: Signals) -> dict[str, Any]:
    """Return all figures for JSON, without the settings."""
    names = [name for name in Signals.__slots__ if name != "started"]
    return {name: getattr(found, name) for name in names} | {
        "waiting_s": {k.value: v for k, v in found.waiting_s.items()}
    }
