"""Grammars in the sampler: a function of the output alone, combined with other rules, without effect on other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import text_fakes
from grammar_walks import backend, eos_id, num_columns
from oracle.naive_sampling import NaiveRequest
from sampling_cases import KINDS as PARAMS
from sampling_cases import mixed_batch, state_of
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED, Sampler
from twostroke.sampling.state import SamplingRules, SamplingState
from twostroke.sampling_params import SamplingParams, StructuredOutputs

KIND = "byte_level"
VOCAB_SIZE, EOS = num_columns(KIND), eos_id(KIND)


def ids_of(text: str) -> list[int]:
    """A token for each byte."""
    tokens = (text_fakes.tokenizer(KIND).token_id(letter) for letter in text.replace(" ", "Ġ"))
    return [token for token in tokens if token is not None]


def state(regex: str, output: str = "", seed: int = 0, **params: object) -> SamplingState:
    grammars = backend(KIND)
    matcher = grammars.matcher(grammars.compile(StructuredOutputs(regex=regex)))
    rules = SamplingRules.compile(SamplingParams(**{"temperature": 0.0} | params), VOCAB_SIZE, [EOS])
    return SamplingState(rules, NoiseStream(seed), [1, 2, 3], ids_of(output), matcher)


def logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB_SIZE)).astype(np.float32))


def sample(rows: torch.Tensor, states: list[SamplingState]) -> tuple[list[int], dict[int, str]]:
    found = Sampler(VOCAB_SIZE, [EOS]).sample(rows, states)
    return found.token_ids.tolist(), found.errors


def test_the_most_likely_of_the_allowed_tokens_is_taken() -> None:
    row = logits(1)
    (allowed,) = (ids_of("ab"),)
    best = max(allowed, key=lambda i: float(row[0, i]))
    assert sample(row, [state("[ab]c")]) == ([best], {})
    row[0, VOCAB_SIZE - 1] = 100.0  # a row without a token
    row[0, EOS] = 90.0
    assert sample(row, [state("[ab]c")]) == ([best], {})


def test_an_end_of_text_token_comes_where_the_text_may_end() -> None:
    row = torch.zeros(1, VOCAB_SIZE)
    row[0, EOS] = 5.0
    a, b = ids_of("ab")
    assert sample(row, [state("a+")])[0] == [a]
    assert sample(row, [state("a+", "a")])[0] == [EOS]
    assert sample(row, [state("a+b?", "a", min_tokens=2)])[0] == [a]  # of equal ones the lower id
    assert sample(row, [state("a+b?", "a", ignore_eos=True)])[0] == [a]
    row[0, b] = 1.0
    assert sample(row, [state("a+b?", "aaaa", ignore_eos=True)])[0] == [b]


@pytest.mark.parametrize("ending", [{}, {"ignore_eos": True}, {"min_tokens": 9}])
def test_what_nothing_can_follow_is_complete(ending: dict[str, object]) -> None:
    assert [state("ab?c", output, **ending).is_complete for output in ("", "a", "ab", "abc", "ac")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert not state("abc*", "ab", **ending).is_complete
    assert sample(torch.zeros(1, VOCAB_SIZE), [state("abc", "abc", ignore_eos=True)])[0] == [EOS]


def test_a_row_without_a_grammar_is_never_complete() -> None:
    assert not state_of(NaiveRequest(SamplingParams()), VOCAB_SIZE).is_complete


def test_the_state_is_a_function_of_the_output() -> None:
    grown = state("(ab|[0-9]{2,3}) x+")
    for letter in ids_of("12 xx"):
        grown.append(letter)
    rebuilt = state("(ab|[0-9]{2,3}) x+", "12 xx")
    assert grown.constraint is not None
    assert rebuilt.constraint is not None
    assert np.array_equal(grown.constraint.bits, rebuilt.constraint.bits)
    rows = logits(1)
    assert sample(rows, [grown]) == sample(rows, [rebuilt])


def test_looking_ahead_changes_nothing() -> None:
    now = state("ab(c|d)e", "a")
    behind_drafts = [now.after_tokens(ids_of("bce")[:n]) for n in range(4)]
    wrong = now.after_tokens(ids_of("x"))
    rows = torch.zeros(1, VOCAB_SIZE)
    expected = [*ids_of("bc"), ids_of("e")[0], EOS]
    assert [sample(rows, [s])[0][0] for s in behind_drafts] == expected
    assert behind_drafts[3].is_complete
    assert sample(rows, [now]) == (ids_of("b"), {})
    ((row, error),) = sample(rows, [wrong])[1].items()
    assert row == 0
    assert "doesn't satisfy the grammar" in error
    assert "\n" not in error


def test_what_the_rules_leave_nothing_of_is_an_error_of_its_own_row() -> None:
    states = [
        state("[ab]c"),
        state("[ab]c", allowed_token_ids=ids_of("xyz")),
        state("[ab]c", "q"),
        state("[ab]c"),
        state("a", "a", min_tokens=5),
    ]
    rows = logits(5)
    rows[3, 7] = torch.nan
    token_ids, errors = sample(rows, states)
    assert errors[1] == NOTHING_ALLOWED
    assert errors[2].startswith("structured_outputs cannot continue: Parser Error")
    assert errors[3] == NOT_FINITE
    assert errors[4] == NOTHING_ALLOWED  # never drawn: it was complete
    assert sorted(errors) == [1, 2, 3, 4]
    assert token_ids[0] in ids_of("ab")


@pytest.mark.parametrize("params", PARAMS[:9], ids=str)
def test_rows_do_not_know_each_other(params: SamplingParams) -> None:
    """A row with a grammar among others, and others beside it: what each is alone."""
    rows, requests = mixed_batch(24, VOCAB_SIZE, seed=3)
    states = [state_of(request, VOCAB_SIZE) for request in requests]
    alone = [sample(rows[i : i + 1], [s])[0][0] for i, s in enumerate(states)]
    fields = {f: getattr(params, f) for f in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    states[5] = state("[a-z ]{3,9}", "ab", seed=9, **fields)
    states[17] = state("[0-9]+", "1", seed=9, **fields)
    for i in (5, 17):
        (alone[i],) = sample(rows[i : i + 1], [states[i]])[0]
    assert sample(rows, states)[0] == alone


def test_log_probabilities_are_the_models_own() -> None:
    rows = logits(1)
    found = Sampler(VOCAB_SIZE, [EOS]).sample(rows, [state("[ab]c", logprobs=2)])
    (position,) = found.logprobs
    assert position is not None
    expected = rows.log_softmax(dim=-1)[0]
    chosen = int(found.token_ids[0])
    assert position.token_ids[0] == chosen
    assert position.logprobs[0] == expected[chosen].item()
    assert position.token_ids[1:] == tuple(expected.topk(2).indices.tolist())
    assert position.rank > 1
