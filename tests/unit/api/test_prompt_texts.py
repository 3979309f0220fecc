"""Prompts that are kept to be shown: for their own tenant, for some minutes, and no more than is meant."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twostroke.api import prompt_texts
from twostroke.api.prompt_texts import KeptPrompt, PromptTexts
from twostroke.client.input_processor import PromptInput
from twostroke.sampling_params import SamplingParams

MOST = 40
PARAMS = SamplingParams(max_tokens=1)
NAMES, TENANTS = st.sampled_from("abc"), st.sampled_from(["ann", "bob"])


class Texts(RuleBasedStateMachine):
    """Prompt texts compared with a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.texts = PromptTexts(1, lambda: self.now_s)
        self.past: list[KeptPrompt] = []
        self.numbers = itertools.count()

    @rule(name=NAMES, tenant=TENANTS, length=st.integers(0, MOST + 2), is_text=st.booleans(), arrives=st.booleans())
    def keep(self, name: str, tenant: str, length: int, is_text: bool, arrives: bool) -> None:
        ids = tuple(range(length))
        self.texts.keep(name, tenant, PromptInput("x" * length if is_text else None, ids, PARAMS))
        request = f"{name}#{next(self.numbers)}" if arrives else ""
        if arrives:
            self.texts.has_arrived(f"{request}.0")
            self.texts.has_arrived(f"{request}.1@2")
        if length <= MOST:
            self.past.append(KeptPrompt(name, tenant, self.now_s, "x" * length if is_text else ids, request))
        while sum(len(kept.content) for kept in self.past) > MOST:
            del self.past[0]

    @rule(seconds=st.sampled_from([1, 20, 61]))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def those_are_shown_that_are_young_and_fit(self) -> None:
        self.past = [kept for kept in self.past if kept.kept_at_s >= self.now_s - 60]
        for tenant in ("", "ann", "bob"):
            own = [kept for kept in self.past if tenant in ("", kept.tenant)]
            for name in "abc":
                last = next((kept for kept in reversed(own) if kept.name == name), None)
                assert self.texts.of(name, tenant) == last
            for kept in self.past:
                if kept.request:
                    assert self.texts.of(kept.request, tenant) == (kept if kept in own else None)
        assert self.texts.of("a#99999", "") is None


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_texts, "MAX_UNITS", MOST)


class TestTexts(Texts.TestCase):
    settings = settings(stateful_step_count=30)
