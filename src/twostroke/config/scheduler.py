"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostroke.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step, and how much of them."""

    max_num_batched_tokens: int = 512
    """Token budget of a step, shared by prefill chunks and decodes."""
    max_num_seqs: int = 64
    """Most requests running at once."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the queue: first come first served, or by priority (lower value first) with ageing."""
    ageing_s: float = 10.0
    """Under the priority policy one level of priority is worth this many seconds of waiting."""
    enable_chunked_prefill: bool = True
    """Baseline switch: False computes each prompt in one step, over the budget when it must."""
    batching: Literal["continuous", "static"] = "continuous"
    """Baseline switch: 'static' admits a batch only when the last one has ended as a whole."""
    mixing: Literal["mixed", "prefill_first"] = "mixed"
    """Baseline switch: 'prefill_first' never puts both strokes into one pass; prompts go before decodes."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, getattr(self, name), "must be at least 1")
        if not self.ageing_s > 0:
            raise InvalidParameter("ageing_s", self.ageing_s, "must be more than 0")
