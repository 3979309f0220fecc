"""Speculation as the runner has it: a proposer, chosen once, and how much it is to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.config.speculation import SpeculativeConfig
from twostroke.speculation.ngram import NgramProposer
from twostroke.speculation.proposer import DraftRequest, Proposer, TokenIds


@dataclass(frozen=True, slots=True)
class Speculation:
    """Who drafts, and how much."""

    proposer: Proposer
    num_drafts: int
    """Per request and step, at most."""

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Speculation:
        """As configured."""
        proposer = NgramProposer(most=config.prompt_lookup_max, fewest=config.prompt_lookup_min)
        return cls(proposer, config.num_speculative_tokens)

    def drafts(self, token_ids: Sequence[TokenIds]) -> list[tuple[int, ...]]:
        """For each of the sequences what may follow its tokens; a view is enough, nothing is kept of it."""
        return self.proposer.propose([DraftRequest(tokens, self.num_drafts) for tokens in token_ids])
