"""How many drafts each request's next step is to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twostroke.config.speculation import SpeculativeConfig
from twostroke.request import Request


class DraftGate(Protocol):
    """Decides per step and request."""

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        """For each request that is about to decode, so many drafts are wanted; fewer may fit, or be guessed."""
        ...


class NoDrafts:
    """Nobody drafts."""

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        """None for anybody."""
        return (0,) * len(requests)


class FixedDrafts:
    """As many as the user said, always."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        """The same for everybody."""
        return (self._num_drafts,) * len(requests)


def make_gate(config: SpeculativeConfig | None) -> DraftGate:
    """The gate that the settings ask for."""
    return NoDrafts() if config is None else FixedDrafts(config.num_speculative_tokens)
