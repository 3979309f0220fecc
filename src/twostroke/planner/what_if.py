"""Effects of a change: pure comparisons of plans.

Two pools hide the transfer of a prompt's KV behind its prefill if the link carries the bytes of a token in the time
that prefill takes for one:

    link bytes/s  >=  KV bytes per token x prefill tokens/s
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Figures of a plan by which changes are compared."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    max_model_len: int
    num_requests: int
    """Number of requests of the planned context that fit at once."""
    tpot_floor_s: float
    """Step floor of a single request."""
    most_tokens_per_s: float
    """Output tokens per second with as many requests as blocks and slots allow."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change and its outcome."""

    name: str
    outcome: PlanFigures | None
    """Figures with the change; None: it is not possible."""
    why_not: str = ""
    is_published: bool = False
    """Whether its times come from a data sheet: they are floors, however this machine was measured."""

    def factor(self, base: PlanFigures, figure: str) -> float | None:
        """Return a figure of `PlanFigures` with the change, relative to that without it; None where not known.

        >>> plan = PlanFigures(weight_bytes=8, kv_bytes_per_token=4, num_blocks=2, max_model_len=9, num_requests=1,
        ...                tpot_floor_s=0.1, most_tokens_per_s=10.0)
        >>> Change("nothing", plan).factor(plan, "num_blocks")
        1.0
        """
        before = getattr(base, figure)
        return None if self.outcome is None or not before else getattr(self.outcome, figure) / before


@dataclass(frozen=True, slots=True)
class TwoPools:
    """Bandwidth that prefill in separate processes needs from the link to the decode processes."""

    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    is_predicted: bool
    """Whether the prefill rate is a prediction. Otherwise it is the highest possible rate, and so is the needed
    bandwidth."""
    link_bytes_per_s: float | None = None
    """Bandwidth of the link; None: not known."""

    @property
    def needed_bytes_per_s(self) -> float:
        """Bandwidth at which the transfer hides behind the prefill."""
        return self.kv_bytes_per_token * self.prefill_tokens_per_s

    @property
    def is_hidden(self) -> bool | None:
        """Whether the transfer hides behind the prefill; None: the link's bandwidth is not known."""
        return None if self.link_bytes_per_s is None else self.link_bytes_per_s >= self.needed_bytes_per_s
