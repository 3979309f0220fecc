"""What a change would do, beside how it is now: pure comparisons of plans that were made.

Two pools hide the transfer of a prompt's KV behind its prefill where the link carries the bytes of a token in the time
that prefill takes for one:

    link bytes/s  >=  KV bytes per token x prefill tokens/s
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What a plan comes to, in the few figures that changes are compared by."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    max_model_len: int
    num_requests: int
    """Of the context that is asked about, that fit at once."""
    tpot_floor_s: float
    """Of one request alone."""
    most_tokens_per_s: float
    """Of output, with as many requests as there are blocks and slots for."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change, and what becomes of it."""

    name: str
    outcome: PlanFigures | None
    """None: it cannot be had."""
    why_not: str = ""
    is_published: bool = False
    """Whether its times come from a data sheet: they are floors, however this machine was measured."""

    def factor(self, base: PlanFigures, figure: str) -> float | None:
        """A figure of `PlanFigures` after the change, over that before; None where it cannot be said.

        >>> plan = PlanFigures(weight_bytes=8, kv_bytes_per_token=4, num_blocks=2, max_model_len=9, num_requests=1,
        ...                tpot_floor_s=0.1, most_tokens_per_s=10.0)
        >>> Change("nothing", plan).factor(plan, "num_blocks")
        1.0
        """
        before = getattr(base, figure)
        return None if self.outcome is None or not before else getattr(self.outcome, figure) / before


@dataclass(frozen=True, slots=True)
class TwoPools:
    """What prefill in processes of its own asks of the link between them."""

    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    is_predicted: bool
    """Whether the rate of prefill is a prediction, or the most there can be: then so is the link's."""
    link_bytes_per_s: float | None = None
    """What there is; None: nothing is known of it."""

    @property
    def needed_bytes_per_s(self) -> float:
        """With which the transfer hides behind the prefill."""
        return self.kv_bytes_per_token * self.prefill_tokens_per_s

    @property
    def is_hidden(self) -> bool | None:
        """Whether it does; None: nothing is known of the link."""
        return None if self.link_bytes_per_s is None else self.link_bytes_per_s >= self.needed_bytes_per_s
