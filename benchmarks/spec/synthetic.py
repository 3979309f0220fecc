"""A synthetic proposer: right with a set probability. It knows what the target will say, and errs on purpose.

It costs next to nothing, so what it gains is what verifying allows, and how well the prediction knows that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from twostroke.cost.acceptance import expected_tokens
from twostroke.measure.spec.measure import PromptIds, SpecRun
from twostroke.speculation.proposer import DraftRequest, Drafts


@dataclass(slots=True)
class SyntheticProposer:
    """Guesses with `acceptance`; to be told what the requests' outputs are, by their prompts."""

    vocab_size: int
    acceptance: float = 1.0
    outputs: dict[PromptIds, tuple[int, ...]] = field(default_factory=dict[PromptIds, tuple[int, ...]])
    seed: int = 0
    _known: dict[int, tuple[PromptIds, Sequence[int]]] = field(
        default_factory=dict[int, tuple[PromptIds, Sequence[int]]]
    )
    """Per row, its prompt and output."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [Drafts(self._guess(request)) for request in requests]

    def learn(self, outputs: Mapping[PromptIds, tuple[int, ...]]) -> None:
        """What the target says."""
        self.outputs.update(outputs)

    def forget(self, row: int, num_tokens: int) -> None:
        """The row's next request has another prompt."""
        if not num_tokens:
            self._known.pop(row, None)

    def _guess(self, request: DraftRequest) -> tuple[int, ...]:
        if request.row not in self._known:
            text = tuple(request.token_ids.tolist())
            self._known[request.row] = next(
                (prompt, output) for prompt, output in self.outputs.items() if text[: len(prompt)] == prompt
            )
        prompt, output = self._known[request.row]
        begin = len(request.token_ids) - len(prompt)
        right = output[begin : begin + request.num_drafts]
        return tuple(
            token_id if self._is_right(prompt, begin + i) else (token_id + 1) % self.vocab_size
            for i, token_id in enumerate(right)
        )

    def _is_right(self, prompt: PromptIds, place: int) -> bool:
        """The same for a place whenever it is asked for."""
        return Random(hash((self.seed, prompt[:8], place))).random() < self.acceptance


def predicted_speedup(plain: SpecRun, speculated: SpecRun, num_drafts: int, acceptance: float) -> float:
    """E / ((verify + draft) / plain), each measured; E from the acceptance alone (Leviathan et al. 2023, theorem 3.8).

    Passes without drafts, where there was nothing to guess from, make one token at the price of one.

    Args:
        plain: a run without drafts.
        speculated: a run of one request with `num_drafts` drafts in a step.
        num_drafts: of each step.
        acceptance: the probability that a draft stands.
    """
    cost = (speculated.verify_s(1 + num_drafts) + speculated.draft_s()) / plain.verify_s()
    share = speculated.drafting_share
    return (share * expected_tokens(acceptance, num_drafts) + 1 - share) / (share * cost + 1 - share)
