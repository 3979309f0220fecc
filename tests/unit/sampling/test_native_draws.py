"""Draws by the native kernels: the sampler's own tokens, whatever the level."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracle import naive_sampling as naive
from sampling_cases import state_of
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


def test_what_a_backend_leaves_open_the_sampler_decides() -> None:
    """A backend that never names a winner of every other row."""
    vocab_size = 50
    states = [state_of(request, vocab_size) for request in requests()]
    logits = logits_of(vocab_size, 1.0)
    expected = Sampler(vocab_size).sample(logits, states).token_ids

    def undecided(logits: Tensor, peaks: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
        del logits, peaks, temperatures, keys
        return torch.where(torch.arange(len(expected)) % 2 == 0, expected, -1)

    found = Sampler(vocab_size, gumbel_argmax=undecided).sample(logits, states).token_ids
    assert torch.equal(found, expected)
