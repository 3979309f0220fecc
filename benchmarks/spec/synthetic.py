"""A synthetic proposer: correct with a set probability. It knows the target's output, and errs on purpose.

It costs next to nothing, so its gain is what verification allows, which tests the prediction.
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
    """Proposer that is correct with probability `acceptance`; `learn` tells it the outputs by their prompts."""

    vocab_size: int
    acceptance: float = 1.0
    outputs: dict[PromptIds, tuple[int, ...]] = field(default_factory=dict[PromptIds, tuple[int, ...]])
    seed: int = 0
    _known: dict[int, tuple[PromptIds, Sequence[int]]] = field(
        default_factory=dict[int, tuple[PromptIds, Sequence[int]]]
    )
    """Prompt and output of each row."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [Drafts(self._guess(request)) for request in requests]

    def learn(self, outputs: Mapping[PromptIds, tuple[int, ...]]) -> None:
        """Add outputs of the target."""
        self.outputs.update(outputs)

    def forget(self, row: int, num_tokens: int) -> None:
        """Forget the row's prompt when its next request begins."""
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
        """Return whether to be correct at a place; the answer for a place is always the same."""
        return Random(hash((self.seed, prompt[:8], place))).random() < self.acceptance


def predicted_speedup(plain: SpecRun, speculated: SpecRun, num_drafts: int, acceptance: float) -> float:
    """Return E / ((verify + draft) / plain), each measured; E from the acceptance (Leviathan et al. 2023, theorem 3.8).

    Passes without drafts, where there was nothing to propose, make one token at the cost of one.

    Args:
        plain: a run without drafts.
        speculated: a run of one request with `num_drafts` drafts per step.
        num_drafts: number of drafts of each step.
        acceptance: the probability that a draft is accepted.
    """
    cost = (speculated.verify_s(1 + num_drafts) + speculated.draft_s()) / plain.verify_s()
    share = speculated.drafting_share
    return (share * expected_tokens(acceptance, num_drafts) + 1 - share) / (share * cost + 1 - share)
