"""Settings of a pool's autoscaler."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.checks import number, whole_number
from twostroke.errors import InvalidParameter

MAX_REPLICAS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """How large one pool may be, and when it changes. Each pool has its own."""

    min_replicas: int = 1
    max_replicas: int = 1
    ttft_target_s: float = 1.0
    """Of requests that are handed over; the prefill pool's."""
    tpot_target_s: float = 0.05
    """The decode pool's."""
    queue_share: float = 0.5
    """Of the TTFT target, what waiting may take; the rest is the prompt's own prefill."""
    up_utilization: float = 0.8
    """Members that would be busier than that are too few."""
    down_utilization: float = 0.6
    """Members are taken away only if those that stay are no busier than that. Less than up_utilization: between the two
    nothing changes."""
    max_step_up: int = 4
    """Members that one decision adds at most."""
    hold_intervals: int = 6
    """As many intervals in a row have to speak for fewer members before one goes."""

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        whole_number("min_replicas", self.min_replicas, 1, MAX_REPLICAS)
        limit = f"at least min_replicas, {self.min_replicas}, and at most {MAX_REPLICAS}"
        whole_number("max_replicas", self.max_replicas, self.min_replicas, MAX_REPLICAS, limit=limit)
        for name in ("ttft_target_s", "tpot_target_s"):
            number(name, getattr(self, name), 0, 1e6, "more than 0 and at most 1000000 seconds", low_open=True)
        for name in ("queue_share", "up_utilization", "down_utilization"):
            number(name, getattr(self, name), 0, 1, "more than 0 and at most 1", low_open=True)
        for name in ("max_step_up", "hold_intervals"):
            whole_number(name, getattr(self, name), 1)
        if self.down_utilization >= self.up_utilization:
            limit = f"must be less than up_utilization, {self.up_utilization:g}, or the pool grows and shrinks in turn"
            raise InvalidParameter("down_utilization", self.down_utilization, limit)
