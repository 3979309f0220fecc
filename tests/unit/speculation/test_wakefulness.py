"""A drafter that is not asked for long reads only prompts, and continues as well as possible when asked again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from twostroke.config.load import LoadConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.measure.spec.measure import SpecEngine, SpecRun
from twostroke.request import Request
from twostroke.scheduler import drafts as gate

LOAD = LoadConfig(threads=1)
PROMPTS = [tuple(range(40, 90)), tuple(range(300, 340))]
ASKED = 4
"""Drafts, where any are asked for."""


def drafted(monkeypatch: pytest.MonkeyPatch, method: str, unasked: range) -> tuple[list[SpecRun], list[SpecRun]]:
    """Run both prompts one after the other, without drafts and with; no drafts for answers of so many tokens."""

    class Gate(gate.FixedDrafts):
        def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
            return [0 if request.num_output_tokens in unasked else ASKED for request in requests]

    monkeypatch.setattr(gate, "FixedDrafts", Gate)
    engines = [
        SpecEngine(LOAD, 1, 160),
        SpecEngine(LOAD, 1, 160, SpeculativeConfig.read({"method": method, "num_speculative_tokens": ASKED})),
    ]
    found = [[engine.run([prompt], 90) for prompt in PROMPTS] for engine in engines]
    for engine in engines:
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_it_drafts_right_behind_a_prompt_that_came_while_it_slept(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    plain, found = drafted(monkeypatch, method, range(2, 90))
    for one, two in zip(plain, found, strict=True):
        assert two.outputs == one.outputs
        assert two.steps[0].num_drafts == ASKED
        assert not any(step.num_drafts for step in two.steps[2:])


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_it_wakes_up_in_the_midst_of_a_text(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    plain, found = drafted(monkeypatch, method, range(5, 40))
    for one, two in zip(plain, found, strict=True):
        assert two.outputs == one.outputs
        num_known, behind = 1, list[tuple[int, int]]()  # (tokens that were known, drafts) of the steps that asked
        for step in two.steps:
            if num_known >= 40:
                behind.append((num_known, step.num_drafts))
            num_known += step.num_tokens
        silent = next(i for i, (_, num_drafts) in enumerate(behind) if num_drafts)
        assert 0 < silent <= 17, "it has to see a step first, an EAGLE head the beginning of a block of 16"
        assert all(num_drafts for known, num_drafts in behind[silent:] if known < 89), "from there on always"
    assert sum(stood for run in found for step in run.steps for _, stood in step.rounds) > 10
