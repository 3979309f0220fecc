"""The vectorised sampler is the naive one; what shares the batch does not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import naive_sampling as naive
from sampling_cases import mixed_batch, state_of
from tiers import examples
from twostroke.sampling.filters import apply_filters
from twostroke.sampling.sampler import Sampler
from twostroke.sampling_params import SamplingParams


@st.composite
def params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Draw parameters: mostly defaults, any of them off."""
    token = st.integers(0, vocab_size - 1)

    def maybe(off: object, values: st.SearchStrategy[object]) -> object:
        return draw(st.just(off) | values)

    number = st.floats(allow_nan=False, width=32, min_value=-2, max_value=2)
    return SamplingParams(
        temperature=maybe(1.0, st.sampled_from((0.0, 1e-6, 0.3, 0.7, 1.5, 20.0))),
        top_p=maybe(1.0, st.floats(1e-6, 1.0) | st.sampled_from((0.25, 0.5, 0.75))),
        top_k=maybe(0, st.integers(-1, vocab_size + 2)),
        min_p=maybe(0.0, st.floats(0.0, 1.0)),
        repetition_penalty=maybe(1.0, st.floats(0.1, 3.0)),
        presence_penalty=maybe(0.0, number),
        frequency_penalty=maybe(0.0, number),
        logit_bias=maybe(None, st.dictionaries(token, st.floats(-100, 100), max_size=3)),
        allowed_token_ids=maybe(None, st.lists(token, min_size=1, max_size=8)),
        min_tokens=maybe(0, st.integers(0, 6)),
        stop_token_ids=maybe((), st.lists(token, max_size=2)),
    )


@st.composite
def requests(draw: st.DrawFn, vocab_size: int) -> naive.NaiveRequest:
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=8)
    return naive.NaiveRequest(
        params=draw(params(vocab_size)),
        prompt=draw(tokens),
        output=draw(tokens),
        eos=draw(st.lists(st.integers(0, vocab_size - 1), max_size=2)),
        bad_words=draw(st.lists(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=3), max_size=3)),
        seed=draw(st.integers(0, 2**63 - 1)),
        sample_index=draw(st.integers(0, 127)),
    )


@st.composite
def logits_rows(draw: st.DrawFn, num_rows: int, vocab_size: int) -> np.ndarray:
    """Many ties, some -inf, now and then a broken row. float32 [num_rows, vocab_size]."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    step = draw(st.sampled_from((0.0, 0.5, 1.0)))
    rows = rng.normal(0, draw(st.sampled_from((0.0, 1.0, 4.0))), (num_rows, vocab_size))
    rows = np.round(rows / step) * step if step else rows
    rows[rng.random(rows.shape) < draw(st.sampled_from((0.0, 0.1, 0.6)))] = -np.inf
    rows[rng.random(rows.shape) < draw(st.sampled_from((0.0, 0.0, 0.01)))] = rng.choice([np.nan, np.inf])
    return rows.astype(np.float32)


@settings(max_examples=examples(300))
@given(data=st.data(), vocab_size=st.integers(1, 40), num_rows=st.integers(1, 5))
def test_every_row_is_what_the_naive_sampler_draws(data: st.DataObject, vocab_size: int, num_rows: int) -> None:
    logits = data.draw(logits_rows(num_rows, vocab_size))
    rows = [data.draw(requests(vocab_size)) for _ in range(num_rows)]
    sampled = Sampler(vocab_size).sample(torch.from_numpy(logits), [state_of(r, vocab_size) for r in rows])
    expected = [naive.sample(row, request) for row, request in zip(logits, rows, strict=True)]
    assert sampled.errors.keys() == {row for row, token in enumerate(expected) if token is None}
    found = [None if row in sampled.errors else token for row, token in enumerate(sampled.token_ids.tolist())]
    assert found == expected


@settings(max_examples=examples(300))
@given(data=st.data(), vocab_size=st.integers(1, 60), num_rows=st.integers(1, 5))
def test_the_same_tokens_are_kept(data: st.DataObject, vocab_size: int, num_rows: int) -> None:
    logits = np.nan_to_num(data.draw(logits_rows(num_rows, vocab_size)), nan=0.0, posinf=0.0, neginf=-np.inf)
    logits[:, data.draw(st.integers(0, vocab_size - 1))] = 1.0
    rows = torch.from_numpy(np.stack([naive.scaled(list(row), 1.0) for row in logits]))
    all_params = [data.draw(params(vocab_size)) for _ in range(num_rows)]
    expected = [naive.kept(list(row), p) for row, p in zip(rows.numpy(), all_params, strict=True)]
    apply_filters(rows, all_params)
    assert [set(np.flatnonzero(row > -np.inf).tolist()) for row in rows.numpy()] == expected
    assert all(expected)


@pytest.mark.parametrize("vocab_size", [7, 300, 4096])
def test_a_row_is_the_same_alone_in_any_company_in_any_order_on_any_threads(vocab_size: int) -> None:
    logits, rows = mixed_batch(64, vocab_size, seed=vocab_size)
    states = [state_of(r, vocab_size) for r in rows]
    sampler = Sampler(vocab_size)
    together = sampler.sample(logits, states).token_ids
    alone = torch.cat([sampler.sample(logits[i : i + 1], [states[i]]).token_ids for i in range(64)])
    assert torch.equal(together, alone)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    shuffled = sampler.sample(logits[order], [states[i] for i in order.tolist()]).token_ids
    assert torch.equal(together[order], shuffled)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(together, sampler.sample(logits, states).token_ids)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_a_mixed_batch_is_what_the_naive_sampler_draws(vocab_size: int) -> None:
    logits, rows = mixed_batch(64, vocab_size, seed=3)
    found = Sampler(vocab_size).sample(logits, [state_of(r, vocab_size) for r in rows])
    assert not found.errors
    assert found.token_ids.tolist() == [naive.sample(x.numpy(), r) for x, r in zip(logits, rows, strict=True)]


def test_a_state_grown_token_by_token_equals_one_built_at_once() -> None:
    """A preemption or a resume would otherwise change later tokens."""
    logits, rows = mixed_batch(42, 50, seed=5)
    sampler = Sampler(50)
    grown = [state_of(naive.NaiveRequest(**{**vars(r), "output": ()}), 50) for r in rows]
    for state, request in zip(grown, rows, strict=True):
        for token_id in request.output:
            state.append(token_id)
    rebuilt = sampler.sample(logits, [state_of(r, 50) for r in rows]).token_ids
    assert torch.equal(sampler.sample(logits, grown).token_ids, rebuilt)


def test_rows_ahead_of_drafts_equal_rows_after_them() -> None:
    logits, rows = mixed_batch(42, 50, seed=6)
    sampler = Sampler(50)
    drafts = [7, 1, 1, 0]
    before = [state_of(r, 50) for r in rows]
    ahead = [state.after_tokens(drafts) for state in before]
    after = [state_of(naive.NaiveRequest(**{**vars(r), "output": [*r.output, *drafts]}), 50) for r in rows]
    assert torch.equal(sampler.sample(logits, ahead).token_ids, sampler.sample(logits, after).token_ids)
    untouched = sampler.sample(logits, before).token_ids
    assert torch.equal(untouched, sampler.sample(logits, [state_of(r, 50) for r in rows]).token_ids)
