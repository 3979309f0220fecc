"""Log-probabilities are the model's, and a row's do not depend on the other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracle import naive_sampling as naive
from sampling_cases import state_of
from twostroke.sampling import logprobs
from twostroke.sampling.logprobs import token_logprobs
from twostroke.sampling.rowwise import largest
from twostroke.sampling.sampler import Sampler
from twostroke.sampling_params import SamplingParams


@pytest.mark.parametrize("vocab_size", [7, 300, 4096, 151_936])
def test_a_row_has_the_same_bits_in_any_number_of_rows(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(64, vocab_size, generator=generator) * 3
    token_ids = torch.randint(0, vocab_size, (64,), generator=generator)
    alone = [token_logprobs(logits[i : i + 1], token_ids[i : i + 1], 4)[0] for i in range(64)]
    for num_rows in (1, 2, 3, 64):
        assert token_logprobs(logits[:num_rows], token_ids[:num_rows], 4) == alone[:num_rows]
        assert token_logprobs(logits[-num_rows:], token_ids[-num_rows:], 4) == alone[-num_rows:]


def test_values_ranks_and_order() -> None:
    probs = np.array([0.1, 0.4, 0.2, 0.2, 0.1])
    logits = torch.tensor(np.log(probs), dtype=torch.float32).expand(5, -1).contiguous()
    found = token_logprobs(logits, torch.arange(5), 3)
    assert [position.rank for position in found] == [4, 1, 2, 2, 4]
    assert [position.token_ids for position in found] == [(i, 1, 2, 3) for i in range(5)]
    np.testing.assert_allclose([position.logprobs[0] for position in found], np.log(probs), rtol=1e-6)
    assert token_logprobs(logits, torch.arange(5), 0)[2].token_ids == (2,)
    assert len(token_logprobs(logits, torch.arange(5), 20)[0].token_ids) == 6


def test_many_rows_go_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, 50, generator=generator)
    token_ids = torch.randint(0, 50, (11,), generator=generator)
    whole = token_logprobs(logits, token_ids, 2)
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 3 * 50 * 4)
    assert logprobs.num_slice_rows(50) == 3
    assert token_logprobs(logits, token_ids, 2) == whole


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_the_largest_come_by_value_then_by_column(levels: int) -> None:
    rng = np.random.default_rng(levels)
    values = rng.integers(0, levels, (20, 200)).astype(np.float32)
    for count in (1, 2, 20, 199, 200, 300):
        top, columns = largest(torch.from_numpy(values), count)
        expected = np.argsort(-values, axis=-1, kind="stable")[:, :count]
        assert np.array_equal(columns.numpy(), expected)
        assert np.array_equal(top.numpy(), np.take_along_axis(values, expected, -1))


def test_the_sampler_reports_the_model_not_what_was_done_to_it() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=3.0, logprobs=2, allowed_token_ids=(5,)),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0.5, top_k=1, logprobs=5),
    ]
    found = Sampler(30).sample(logits, [state_of(naive.NaiveRequest(p), 30) for p in params])
    assert [None if row is None else len(row.token_ids) for row in found.logprobs] == [3, None, 1, 6]
    model = logits.log_softmax(-1)
    for row, position in enumerate(found.logprobs):
        if position is not None:
            assert position.token_ids[0] == found.token_ids[row]
            assert position.logprobs == tuple(model[row, list(position.token_ids)].tolist())
    assert found.token_ids[0] == 5


def test_a_broken_row_has_none() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    states = [state_of(naive.NaiveRequest(SamplingParams(temperature=0, logprobs=1)), 2)] * 2
    found = Sampler(2).sample(logits, states)
    assert found.logprobs[0] is None
    assert found.logprobs[1] is not None
