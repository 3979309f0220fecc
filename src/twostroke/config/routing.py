"""Settings of the router between two pools."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.checks import number, whole_number

_MOST_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """By what a request's ways are compared, and how much is remembered for it."""

    tpot_target_s: float = 0.05
    """Seconds for an output token that streams are to keep; a prefill beside them makes their tokens late by it."""
    late_token_s: float = 0.005
    """Seconds of one request's first token that one late token of another's is worth; 0: they count for nothing."""
    hand_over_s: float = 0.005
    """What arranging a hand-over takes, and what it has to win at least."""
    assumed_prefill_tokens_per_s: float = 1000.0
    """Rate of a member that has not prefilled yet, where no other of its kind has either (Member.kind)."""
    num_candidates: int = 4
    """Members of each kind that a request is worked out for: the least loaded, and as many of those with its prefix.
    Pools up to this size are searched whole."""
    max_hashes: int = 4096
    """Remembered for each member, of what it is believed to have cached; never more than it has blocks for."""
    hash_stride: int = 4
    """Every so many-th block of a prompt is remembered: coarser, and so much smaller."""
    max_links: int = 100_000
    """Pairs of members whose measured rates are remembered, the latest."""

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        for name in ("tpot_target_s", "assumed_prefill_tokens_per_s"):
            number(name, getattr(self, name), 0, _MOST_S * 1000, "more than 0", low_open=True)
        for name in ("late_token_s", "hand_over_s"):
            number(name, getattr(self, name), 0, _MOST_S, "0 to 1000000 seconds")
        for name in ("num_candidates", "max_hashes", "hash_stride", "max_links"):
            whole_number(name, getattr(self, name), 1)
