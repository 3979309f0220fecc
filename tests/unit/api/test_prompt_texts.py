"""Prompts that are kept to be shown: for their own tenant, for some minutes, and no more than is meant."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twostroke.api import prompt_texts
from twostroke.api.prompt_texts import KeptPrompt, PromptTexts
from twostroke.engine.input_processor import PromptInput
from twostroke.sampling_params import SamplingParams

MOST = 40
PARAMS = SamplingParams(max_tokens=1)
NAMES, TENANTS = st.sampled_from("abcdef"), st.sampled_from(["ann", "bob"])


class Texts(RuleBasedStateMachine):
    """Beside a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.texts = PromptTexts(1, lambda: self.now_s)
        self.past: list[tuple[str, KeptPrompt]] = []

    @rule(name=NAMES, tenant=TENANTS, length=st.integers(0, MOST + 2), is_text=st.booleans())
    def keep(self, name: str, tenant: str, length: int, is_text: bool) -> None:
        ids = tuple(range(length))
        self.texts.keep(name, tenant, PromptInput("x" * length if is_text else None, ids, PARAMS))
        self.past = [(other, kept) for other, kept in self.past if other != name]
        if length <= MOST:
            self.past.append((name, KeptPrompt(tenant, self.now_s, "x" * length if is_text else ids)))
        while sum(len(kept.content) for _, kept in self.past) > MOST:
            del self.past[0]

    @rule(seconds=st.sampled_from([1, 20, 61]))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def those_are_shown_that_are_young_and_fit(self) -> None:
        shown = {name: kept for name, kept in self.past if kept.kept_at_s >= self.now_s - 60}
        for name in "abcdef":
            expected = shown.get(name)
            assert self.texts.of(name, "") == expected
            for tenant in ("ann", "bob"):
                own = expected is not None and expected.tenant == tenant
                assert self.texts.of(name, tenant) == (expected if own else None)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_texts, "MAX_UNITS", MOST)


class TestTexts(Texts.TestCase):
    settings = settings(stateful_step_count=30)
