"""Single behaviours of the sampler, at its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracle import naive_sampling as naive
from sampling_cases import state_of
from twostroke.errors import InvalidParameter
from twostroke.sampling.filters import apply_filters
from twostroke.sampling.rowwise import lowest_argmax, ragged_argmax
from twostroke.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED, Sampler
from twostroke.sampling_params import SamplingParams

INF = float("inf")


def sample(rows: list[list[float]], requests: list[naive.NaiveRequest]) -> tuple[list[int], dict[int, str]]:
    logits = torch.tensor(rows)
    vocab_size = logits.shape[1]
    found = Sampler(vocab_size).sample(logits, [state_of(r, vocab_size) for r in requests])
    return found.token_ids.tolist(), found.errors


def sample_one(row: list[float], **params: object) -> int:
    token_ids, errors = sample([row], [naive.NaiveRequest(SamplingParams(**params))])
    assert not errors
    return token_ids[0]


def kept(row: list[float], **params: object) -> list[int]:
    logits = torch.tensor([row]) - max(row)
    apply_filters(logits, [SamplingParams(**params)])
    return np.flatnonzero(logits[0].numpy() > -INF).tolist()


@pytest.mark.parametrize("vocab_size", [2, 15, 16, 17, 33, 1000, 40_000])
def test_the_lowest_of_equal_maxima_is_taken(vocab_size: int) -> None:
    for first in {0, 1, vocab_size // 2, vocab_size - 1}:
        row = torch.zeros(3, vocab_size)
        row[:, first:] = 1.0
        assert lowest_argmax(row).tolist() == [first] * 3
        assert lowest_argmax(row.to(torch.float64)).tolist() == [first] * 3


def test_the_lowest_id_of_equal_scores_is_taken_in_any_order() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 5.0, 5.0, -3.0], dtype=torch.float64)
    rows, ids = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([3, 9, 4, 8, 7, 0])
    for order in (torch.arange(6), torch.arange(5, -1, -1)):
        assert ragged_argmax(scores[order], rows[order], ids[order], 3).tolist() == [4, 7, 0]


def test_top_k_keeps_ties_with_the_kth() -> None:
    assert kept([3.0, 1.0, 2.0, 2.0, 0.0], top_k=2) == [0, 2, 3]
    assert kept([1.0, 1.0, 1.0], top_k=1) == [0, 1, 2]


def test_top_p_keeps_the_smallest_set_and_of_equal_tokens_the_lowest() -> None:
    assert kept([0.0] * 10, top_p=0.3) == [0, 1, 2]
    assert kept([0.0] * 10, top_p=0.31) == [0, 1, 2, 3]
    assert kept([0.0, 9.0, 0.0], top_p=1e-9) == [1]
    assert kept([0.0, 0.0], top_p=1e-9) == [0]


def test_top_p_counts_what_top_k_leaves_ties_included() -> None:
    # of 4 equal tokens left by top_k, 0.5 are 2; of all 6 it would be 3
    assert kept([1.0, 1.0, 1.0, 1.0, -1.0, -1.0], top_k=2, top_p=0.5) == [0, 1]


def test_a_row_without_top_p_is_not_cut_because_its_neighbour_has_one() -> None:
    """Its tail is negligible beside 1, so the sum before it has already reached the total."""
    logits = torch.tensor([[0.0, -50.0, -60.0], [0.0, 0.0, 0.0]])
    apply_filters(logits, [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
    assert (logits > -INF).tolist() == [[True, True, False], [True, True, False]]


def test_min_p_is_relative_to_the_most_likely() -> None:
    row = np.log([0.5, 0.26, 0.24]).tolist()
    assert kept(row, min_p=0.5) == [0, 1]
    assert kept(row, min_p=1.0) == [0]


def test_filters_together_always_leave_the_most_likely() -> None:
    assert kept([-5.0, 4.0, -INF], top_k=1, top_p=1e-12, min_p=1.0) == [1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2}])
def test_a_tiny_temperature_is_greedy(temperature: float, filters: dict[str, float]) -> None:
    row = [1e4, -3e38, 9999.0, -INF, 3.0]
    assert sample_one(row, temperature=temperature, **filters) == 0


def test_excluded_tokens_are_never_drawn_even_with_the_largest_bias() -> None:
    row = [-INF, 0.0, -INF]
    assert sample_one(row, logit_bias={0: 100.0, 2: 100.0}, temperature=100.0) == 1


@pytest.mark.parametrize("others", [SamplingParams(temperature=0), SamplingParams(top_p=0.9), SamplingParams()])
def test_a_broken_row_fails_alone(others: SamplingParams) -> None:
    good = [0.1, 2.0, -1.0, 0.3]
    rows = [good, [0.0, float("nan"), 0.0, 0.0], good, [0.0, INF, 0.0, 0.0], [-INF] * 4, good]
    requests = [naive.NaiveRequest(others, seed=seed) for seed in range(6)]
    token_ids, errors = sample(rows, requests)
    assert errors == {1: NOT_FINITE, 3: NOT_FINITE, 4: NOT_FINITE}
    expected = [naive.sample(np.array(good, np.float32), requests[i]) for i in (0, 2, 5)]
    assert [token_ids[i] for i in (0, 2, 5)] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_draw_nothing_says_why(temperature: float) -> None:
    blocked = SamplingParams(temperature=temperature, allowed_token_ids=(2,), min_tokens=1)
    requests = [naive.NaiveRequest(blocked, eos=(2,)), naive.NaiveRequest(SamplingParams(temperature=0))]
    token_ids, errors = sample([[0.0, 1.0, 2.0]] * 2, requests)
    assert errors == {0: NOTHING_ALLOWED}
    assert token_ids[1] == 2


def test_a_hidden_nan_fails_although_the_token_is_not_allowed() -> None:
    _, errors = sample([[float("nan"), 1.0]], [naive.NaiveRequest(SamplingParams(allowed_token_ids=(1,)))])
    assert errors == {0: NOT_FINITE}


def test_min_tokens_holds_back_end_tokens_until_it_is_reached_also_when_they_are_ignored() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,), ignore_eos=True)
    state = state_of(naive.NaiveRequest(params, eos=(0,)), 4)
    sampler = Sampler(4)
    drawn: list[int] = []
    for _ in range(3):
        drawn += sampler.sample(torch.tensor([[9.0, 8.0, 1.0, 0.0]]), [state]).token_ids.tolist()
        state.append(drawn[-1])
    assert drawn == [2, 2, 0]


def test_a_bad_word_is_stopped_at_its_last_token_only() -> None:
    state = state_of(naive.NaiveRequest(SamplingParams(temperature=0), bad_words=((3, 2), (3, 3, 1))), 4)
    sampler = Sampler(4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    drawn: list[int] = []
    for _ in range(4):
        drawn += sampler.sample(logits, [state]).token_ids.tolist()
        state.append(drawn[-1])
    assert drawn == [3, 3, 3, 3]
    logits[0, 3] = -5.0
    assert sampler.sample(logits, [state]).token_ids.tolist() == [0]  # neither 2 behind 3 nor 1 behind 3 3


def test_prompt_tokens_are_penalised_by_repetition_alone() -> None:
    row = [2.0, 1.9]
    assert sample_one(row, temperature=0, repetition_penalty=1.2) == 1  # the prompt is token 0
    assert sample_one(row, temperature=0, presence_penalty=2.0, frequency_penalty=2.0) == 0


def test_bias_comes_before_penalties() -> None:
    row = [1.0, 1.2]
    assert (
        sample_one(row, temperature=0, repetition_penalty=2.0, logit_bias={0: 1.0}) == 1
    )  # (1 + 1) / 2, not 1 / 2 + 1


def test_looking_ahead_leaves_the_state_alone() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    state = state_of(naive.NaiveRequest(params, output=[0], bad_words=((1, 1, 1),)), 3)
    logits = torch.tensor([[3.0, 1.5, 0.0]])
    ahead = state.after_tokens([0, 1])
    assert ahead.position == state.position + 2
    assert Sampler(3).sample(logits, [state]).token_ids.tolist() == [0]  # 2.0, 1.5, 0
    ahead.append(0)
    assert Sampler(3).sample(logits.repeat(2, 1), [state, ahead]).token_ids.tolist() == [
        0,
        1,
    ]  # 0, 0.5, 0 for the second


def test_end_tokens_are_free_after_min_tokens_also_when_other_rules_apply() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, logit_bias={3: 0.5})
    rows = [naive.NaiveRequest(params, output=[1] * count, eos=(0,)) for count in (1, 2)]
    assert sample([[9.0, 8.0, 1.0, 0.0]] * 2, rows)[0] == [1, 0]


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 3.0}, top_p=0.5, presence_penalty=1.0, allowed_token_ids=tuple(range(20)))
    states = [state_of(naive.NaiveRequest(p), 50) for p in (params, SamplingParams(top_k=3), SamplingParams(), params)]
    Sampler(50).sample(logits, states)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 2000, "top_p": 0.99}], ids=str)
def test_a_vocabulary_of_many_slices_equals_the_naive_sampler(params: dict[str, float]) -> None:
    vocab_size = 33_001
    logits = np.random.default_rng(2).normal(0, 1, vocab_size).astype(np.float32)
    request = naive.NaiveRequest(SamplingParams(**params), seed=5)
    upper = logits + np.where(np.arange(vocab_size) < 32_800, 0, 15).astype(np.float32)  # decided in the last slice
    expected = [naive.sample(row, request) for row in (logits, upper)]
    assert sample([logits.tolist(), upper.tolist()], [request] * 2)[0] == expected
    assert expected[1] is not None
    assert expected[1] >= 32_800


def test_a_wide_history_and_a_narrow_one_share_a_batch() -> None:
    """Penalties are written through flat indices; nothing may reach into the next row."""
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    wide = naive.NaiveRequest(params, output=list(range(5)))
    none = naive.NaiveRequest(params)
    row = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert sample([row, row, row], [wide, none, wide])[0] == [0, 0, 0]
    assert sample([row, row], [naive.NaiveRequest(params, output=[0]), none])[0] == [1, 0]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [99]}, "stop_token_ids"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"allowed_token_ids": [1, 2], "min_tokens": 1, "stop_token_ids": [2]}, "allowed_token_ids"),
    ],
    ids=str,
)
def test_what_the_model_cannot_do_is_refused(params: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(**params).check_against_model(10, max_logprobs=5, eos_token_ids=(1,))
    assert error.value.name == name
    assert error.value.remedy


def test_what_the_model_can_do_is_accepted() -> None:
    fits = SamplingParams(
        allowed_token_ids=(1, 2, 9), min_tokens=1, stop_token_ids=(2,), logit_bias={0: 1.0}, top_k=10**9, logprobs=5
    )
    fits.check_against_model(10, max_logprobs=5, eos_token_ids=(1,))
    # each bans all tokens but one, or is no ban: of several tokens, or of ends without min_tokens
    fits.check_against_model(10, max_logprobs=5, eos_token_ids=(1,), bad_words_token_ids=[(2,), (1,), (9, 9)])
    SamplingParams(allowed_token_ids=(1,)).check_against_model(10, max_logprobs=5, eos_token_ids=(1,))
    every_but_one = [(token_id,) for token_id in range(9)]
    SamplingParams().check_against_model(10, max_logprobs=5, bad_words_token_ids=every_but_one)


def test_bad_words_that_are_the_whole_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"bad_words.*leaves no token to draw"):
        SamplingParams(bad_words=["x"]).check_against_model(3, 5, bad_words_token_ids=[(0,), (1,), (2,)])


@pytest.mark.parametrize("top_k", [1, 2, 31, 33, 100])
def test_the_largest_of_a_long_row_are_found_without_ordering_it(top_k: int) -> None:
    """Ties with the k-th, excluded tokens, and all of the largest side by side."""
    rng = np.random.default_rng(top_k)
    for vocab_size in (128 * (top_k + 1), 20_001):
        rows = [rng.normal(size=vocab_size), np.round(rng.normal(size=vocab_size) * 3), np.arange(vocab_size) / 100.0]
        rows.append(np.where(rng.random(vocab_size) < 0.9, -np.inf, rows[0]))
        for row in (row.astype(np.float32) for row in rows):
            kth = np.sort(row)[-top_k]
            assert kept(row.tolist(), top_k=top_k) == np.flatnonzero(row - row.max() >= kth - row.max()).tolist()
            logits = [naive.scaled(list(row), 1.0)]
            both = kept(row.tolist(), top_k=top_k, top_p=0.6)
            assert both == sorted(naive.kept(logits[0], SamplingParams(top_k=top_k, top_p=0.6)))
