"""A drafter for tests that knows how texts go on, with branches some of which are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from twostroke.config.speculation import SpeculativeConfig
from twostroke.runner.branches import MAX_BRANCHES, Branch, BranchBlocks, blocks_of_branch
from twostroke.speculation.proposer import DraftRequest, Drafts
from twostroke.startup import preparation
from twostroke.startup.prepared import Drafter, DrafterFacts, Prepared, ProvidedDrafter

DEPTH = 4
NUM_PLACES = 14
KNOWING: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": NUM_PLACES}
"""The `speculative_config` that asks for it, after `knowing_drafts`."""
Texts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Knowing:
    """Knows how texts go on: its chain goes wrong somewhere, of its branches one is right and one is not."""

    texts: Texts

    def forget(self, row: int, num_tokens: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [self._drafts(tuple(request.token_ids.tolist()), request.num_drafts) for request in requests]

    def _drafts(self, known: tuple[int, ...], num_places: int) -> Drafts:
        following = next((text[len(known) :] for text in self.texts if text[: len(known)] == known), ())
        dice = random.Random(str(known[-3:]))
        right = following[: dice.randint(0, DEPTH)]
        chain, wrong = list(right), list(right)
        if right and dice.random() < 0.8:
            place = dice.randrange(len(right))
            chain[place] += 1 if chain[place] < 200 else -1
            wrong[place] += 2 if wrong[place] < 200 else -2
        drafts = Drafts(tuple(chain[:num_places]))
        for branch in (tuple(wrong), right):
            if branch and drafts.num_slots + 1 + len(branch) <= num_places:
                drafts = drafts._replace(branches=(*drafts.branches, branch))
        return drafts


def knowing_drafts(monkeypatch: pytest.MonkeyPatch, texts: Texts) -> None:
    """Let a drafter that knows these texts serve who asks for KNOWING; other settings draft as always."""
    find = preparation.find_drafter

    def find_drafter(given: SpeculativeConfig, prepared: Prepared) -> Drafter:
        if given.num_speculative_tokens != NUM_PLACES:
            return find(given, prepared)
        num_blocks = MAX_BRANCHES * blocks_of_branch(DEPTH, prepared.layout)
        return ProvidedDrafter(Knowing(texts), "one that knows", DrafterFacts(num_branch_blocks=num_blocks))

    monkeypatch.setattr(preparation, "find_drafter", find_drafter)


def count_branches(monkeypatch: pytest.MonkeyPatch) -> list[Branch]:
    """Return a list that each branch is appended to that a request goes along from now on."""
    kept: list[Branch] = []
    keep = BranchBlocks.commit

    def counting(self: BranchBlocks, branch: Branch, num_tokens: int, table: Any) -> None:
        kept.append(branch)
        keep(self, branch, num_tokens, table)

    monkeypatch.setattr(BranchBlocks, "commit", counting)
    return kept
