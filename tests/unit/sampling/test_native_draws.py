"""Draws by the native kernels: the sampler's own tokens, whatever the level."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracle import naive_sampling as naive
from sampling_cases import FILTERS, state_of
from twostroke.kernels import native
from twostroke.sampling.sampler import Sampler
from twostroke.sampling_params import SamplingParams

TEMPERATURES = (1.0, 0.5, 2.0, 1e-30, 100.0, 1.0)


def requests() -> list[naive.NaiveRequest]:
    return [naive.NaiveRequest(SamplingParams(temperature=t), seed=i) for i, t in enumerate(TEMPERATURES)]


def logits_of(vocab_size: int, scale: float) -> Tensor:
    logits = torch.randn(len(TEMPERATURES), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    logits[-1, 1::2] = -torch.inf
    return logits


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("vocab_size", [2, 16, 63, 65, 4096, 151_936])
def test_tokens_are_those_of_the_tensor_code(level: str, vocab_size: int) -> None:
    sampler = Sampler(vocab_size, gumbel_argmax=native.operators(level).gumbel_argmax)
    states = [state_of(request, vocab_size) for request in requests()]
    for scale in (0.0, 1.0, 10.0):
        logits = logits_of(vocab_size, scale)
        expected = Sampler(vocab_size).sample(logits, states).token_ids
        assert torch.equal(sampler.sample(logits, states).token_ids, expected)
        for row in range(len(states)):
            assert sampler.sample(logits[row : row + 1], states[row : row + 1]).token_ids == expected[row]


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("num_columns", [1, 15, 16, 17, 100, 5003])
def test_the_first_of_the_largest_is_found(level: str, num_columns: int) -> None:
    argmax = native.operators(level).argmax
    assert argmax is not None
    rows = torch.randn(40, num_columns, generator=torch.Generator().manual_seed(num_columns)).mul(2).round()
    rows[0] = -torch.inf
    rows[1] = 0.0
    rows[2, num_columns // 2] = torch.inf
    for row in range(3, 9):
        rows[row, (7 * row) % num_columns] = torch.nan
        rows[row, (11 * row) % num_columns] = torch.nan
    assert argmax(rows).tolist() == rows.numpy().argmax(axis=-1).tolist()
    assert argmax(rows[:, : num_columns // 2 + 1]).tolist() == rows[:, : num_columns // 2 + 1].argmax(-1).tolist()


def filtered_logits(vocab_size: int, scale: float, *, in_bfloat16: bool) -> Tensor:
    """Rows as models make them: bfloat16 has many that are equal. The last one has a single token."""
    logits = torch.randn(len(FILTERS), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    logits[-2, 1::2] = -torch.inf
    logits[-1, 1:] = -torch.inf
    return logits.bfloat16().float() if in_bfloat16 else logits


@pytest.mark.parametrize("in_bfloat16", [False, True], ids=["all different", "many equal"])
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("vocab_size", [2, 63, 65, 4096, 151_936])
def test_filtered_tokens_are_those_of_the_tensor_code(level: str, vocab_size: int, in_bfloat16: bool) -> None:
    sampler = Sampler(vocab_size, filtered_argmax=native.operators(level).filtered_argmax)
    states = [state_of(naive.NaiveRequest(params, seed=i), vocab_size) for i, params in enumerate(FILTERS)]
    for scale in (0.0, 1.0, 3.0, 30.0) if vocab_size < 100_000 else (3.0,):
        logits = filtered_logits(vocab_size, scale, in_bfloat16=in_bfloat16)
        expected = Sampler(vocab_size).sample(logits, states).token_ids
        assert torch.equal(sampler.sample(logits, states).token_ids, expected)
        early = sampler.draw_early(logits, states)
        assert early is not None
        assert torch.equal(torch.where(early < 0, expected, early), expected)
        for row in range(len(states)):
            assert sampler.sample(logits[row : row + 1], states[row : row + 1]).token_ids == expected[row]


def test_filters_are_decided_by_the_kernel_and_not_behind_it() -> None:
    """Rows that are too close to decide go to the sampler's tensor code; that has to be rare."""
    vocab_size = 4096
    sampler = Sampler(vocab_size, filtered_argmax=native.operators().filtered_argmax)
    states = [state_of(naive.NaiveRequest(params, seed=i), vocab_size) for i, params in enumerate(FILTERS)]
    early = sampler.draw_early(filtered_logits(vocab_size, 3.0, in_bfloat16=True), states)
    assert early is not None
    assert (early >= 0).all()


def test_what_a_backend_leaves_open_the_sampler_decides() -> None:
    """A backend that never names a winner of every other row."""
    vocab_size = 50
    states = [state_of(request, vocab_size) for request in requests()]
    logits = logits_of(vocab_size, 1.0)
    expected = Sampler(vocab_size).sample(logits, states).token_ids

    def undecided(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
        del logits, temperatures, keys
        return torch.where(torch.arange(len(expected)) % 2 == 0, expected, -1)

    found = Sampler(vocab_size, gumbel_argmax=undecided).sample(logits, states).token_ids
    assert torch.equal(found, expected)


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 70, 129])
def test_a_row_whose_largest_logit_is_no_number_is_left_to_the_sampler(level: str, value: float, place: int) -> None:
    """Others of the batch are drawn all the same."""
    logits = logits_of(130, 1.0)[:3].contiguous()
    logits[1, place] = value
    operators = native.operators(level)
    assert operators.gumbel_argmax is not None
    assert operators.filtered_argmax is not None
    temperatures, keys = torch.ones(3, 1), torch.arange(3)
    filters = torch.full((3,), -torch.inf), torch.full((3,), 7), torch.full((3,), 0.9, dtype=torch.float64)
    for drawn in (
        operators.gumbel_argmax(logits, temperatures, keys),
        operators.filtered_argmax(logits, temperatures, keys, *filters),
    ):
        assert (drawn < 0).tolist() == [False, True, False]
