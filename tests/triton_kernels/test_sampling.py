"""Draws by Triton's kernels: the sampler's own tokens, filters and ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle.naive_sampling import NaiveRequest
from sampling_cases import FILTERS, mixed_batch, state_of
from triton_device import device
from twostroke.kernels.cuda import sampling
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState
from twostroke.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, where infinities are
DEVICE = device()


def samplers(vocab_size: int) -> tuple[Sampler, Sampler]:
    """Return samplers with and without the kernels."""
    ours = Sampler(vocab_size, (2,), DEVICE, sampling.gumbel_argmax, sampling.filtered_argmax)
    return ours, Sampler(vocab_size, (2,))


def states_of(params: list[SamplingParams], vocab_size: int) -> list[SamplingState]:
    return [state_of(NaiveRequest(p, seed=i), vocab_size) for i, p in enumerate(params)]


def logits_of(num_rows: int, vocab_size: int, *, in_bfloat16: bool) -> Tensor:
    """Return rows like those of models: bfloat16 has many equal values."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[-1, 1::2] = -torch.inf
    return logits.bfloat16().float() if in_bfloat16 else logits


@pytest.mark.parametrize("vocab_size", [2, 17, 500, 9000])
def test_whole_vocabularies(vocab_size: int) -> None:
    ours, theirs = samplers(vocab_size)
    states = states_of([SamplingParams(temperature=t) for t in (1.0, 0.5, 1e-30, 100.0, 1.0)], vocab_size)
    logits = logits_of(len(states), vocab_size, in_bfloat16=False)
    found = ours.sample(logits.to(DEVICE), states).token_ids.cpu()
    assert torch.equal(found, theirs.sample(logits, states).token_ids)
    one = ours.sample(logits[1:2].to(DEVICE), states[1:2]).token_ids
    assert one.tolist() == found[1:2].tolist()


@pytest.mark.parametrize("in_bfloat16", [False, True], ids=["all different", "many equal"])
@pytest.mark.parametrize("vocab_size", [2, 300, 5000])
def test_filtered_vocabularies(vocab_size: int, in_bfloat16: bool) -> None:
    ours, theirs = samplers(vocab_size)
    states = states_of(list(FILTERS), vocab_size)
    logits = logits_of(len(states), vocab_size, in_bfloat16=in_bfloat16)
    found = ours.sample(logits.to(DEVICE), states).token_ids.cpu()
    assert torch.equal(found, theirs.sample(logits, states).token_ids)


def test_filters_are_decided_by_the_kernel_and_not_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are too close to decide go to the sampler's tensor code; that has to be rare."""
    decided: list[Tensor] = []

    def watched(*arguments: Tensor) -> Tensor:
        decided.append(sampling.filtered_argmax(*arguments))
        return decided[-1].clone()

    vocab_size = 300
    states = states_of(list(FILTERS), vocab_size)
    Sampler(vocab_size, (), DEVICE, None, watched).sample(
        logits_of(len(states), vocab_size, in_bfloat16=True).to(DEVICE), states
    )
    assert (decided[0] >= 0).all()


def test_equal_tokens_are_cut_by_their_ids() -> None:
    """A vocabulary of two values, where top_p and top_k end among equals."""
    vocab_size = 40
    ours, theirs = samplers(vocab_size)
    logits = torch.where(torch.arange(vocab_size) % 3 == 0, 1.0, 0.5).expand(12, vocab_size).contiguous()
    params = [SamplingParams(top_p=p, top_k=k) for p in (0.1, 0.3, 0.51, 0.77) for k in (0, 5, 20)]
    states = states_of(params, vocab_size)
    found = ours.sample(logits.to(DEVICE), states).token_ids.cpu()
    assert torch.equal(found, theirs.sample(logits, states).token_ids)


def test_a_tie_on_the_edge_is_left_to_the_sampler() -> None:
    """Ten equal tokens and half of them: where the fifth ends is where the target is."""
    columns = {"dtype": torch.float32, "device": DEVICE}
    found = sampling.filtered_argmax(
        torch.zeros(1, 10, **columns),
        torch.ones(1, 1, **columns),
        torch.tensor([7], device=DEVICE),
        torch.full((1,), -np.inf, **columns),
        torch.tensor([10], device=DEVICE),
        torch.tensor([0.5], dtype=torch.float64, device=DEVICE),
    )
    assert found.tolist() == [-1]


def test_rows_of_every_kind_together() -> None:
    vocab_size = 61
    ours, theirs = samplers(vocab_size)
    logits, requests = mixed_batch(28, vocab_size, seed=3)
    states = [state_of(request, vocab_size) for request in requests]
    found, expected = ours.sample(logits.to(DEVICE), states), theirs.sample(logits, states)
    assert found.errors == expected.errors
    drawn = [row for row in range(28) if row not in expected.errors]
    assert found.token_ids.cpu()[drawn].tolist() == expected.token_ids[drawn].tolist()
