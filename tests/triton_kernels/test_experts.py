"""Experts in one launch: the bits of single experts' products, alone and among others, and the reference's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triton_device import device
from twostroke.config.experts import ExpertsSpec
from twostroke.kernels import cuda, reference
from twostroke.kernels.cuda import experts
from twostroke.kernels.expert_operators import ExpertRouter, Routing
from twostroke.kernels.quantized_weight import quantize_in_groups
from twostroke.kernels.reference import experts as one_by_one

DEVICE = device()
NUM_EXPERTS, HIDDEN, INNER = 5, 72, 40  # no multiple of a tile, of a span or of a run


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weights(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    gated = [numbers(2 * INNER, HIDDEN, seed=seed, dtype=dtype) * 0.1 for seed in range(NUM_EXPERTS)]
    return gated, [numbers(HIDDEN, INNER, seed=50 + seed, dtype=dtype) * 0.1 for seed in range(NUM_EXPERTS)]


def routing_of(logits: Tensor, num_chosen: int = 2) -> Routing:
    spec = ExpertsSpec(num_experts=logits.shape[1], num_chosen=num_chosen, intermediate_size=INNER)
    return one_by_one.route(logits, ExpertRouter(spec, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_biases", [False, True])
def test_products_are_those_of_single_experts(dtype: torch.dtype, has_biases: bool) -> None:
    """Bit for bit, with an expert that has no token, one that has a few and one that has more than a tile holds."""
    operators, (gated, down) = cuda.operators(), weights(dtype)
    gated_biases = numbers(NUM_EXPERTS, 2 * INNER, seed=7, dtype=dtype) if has_biases else None
    biases = numbers(NUM_EXPERTS, HIDDEN, seed=8, dtype=dtype) if has_biases else None
    inner_of = operators.pack_gated_experts(gated, gated_biases, "silu")
    down_of = operators.pack_expert_linears(down, biases)
    assert isinstance(inner_of, experts.TritonGatedExperts)
    assert isinstance(down_of, experts.TritonExpertLinears)
    plain_inner = one_by_one.pack_gated_experts(operators.pack_gated, gated, gated_biases, "silu")
    plain_down = one_by_one.pack_expert_linears(operators.pack_linear, down, biases)
    torchs = reference.operators()
    torchs_inner = torchs.pack_gated_experts(gated, gated_biases, "silu")
    torchs_down = torchs.pack_expert_linears(down, biases)
    for num_tokens in (1, 3, 70):
        x, logits = numbers(num_tokens, HIDDEN, seed=2, dtype=dtype), numbers(num_tokens, NUM_EXPERTS, seed=3)
        logits[:, 1] -= 100.0  # no token's
        logits[:, 3] += 100.0  # every token's
        routing = routing_of(logits)
        inner = inner_of(x, routing)
        assert torch.equal(inner, plain_inner(x, routing))
        found = down_of(inner, routing)
        assert torch.equal(found, plain_down(inner, routing))
        assert torch.equal(down_of.add(down_of.multiply(inner, routing), routing), found)
        first = routing_of(logits[:1])
        assert torch.equal(down_of(inner_of(x[:1], first), first)[0], found[0])
        expected = torchs_down(torchs_inner(x, routing), routing)
        error = 2e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.float(), expected.float(), rtol=error, atol=error)


def test_high_tiles_have_the_bits_of_low_ones() -> None:
    """More than 64 pairs for an expert take high tiles, where these gave the same bits at start."""
    down = [numbers(HIDDEN, INNER, seed=seed, dtype=torch.bfloat16) for seed in range(2)]
    operators = cuda.operators()
    grouped = operators.pack_expert_linears(down, None)
    plain = one_by_one.pack_expert_linears(operators.pack_linear, down, None)
    inner = numbers(150, INNER, seed=3, dtype=torch.bfloat16)
    routing = routing_of(numbers(150, 2, seed=4), num_chosen=1)
    assert torch.equal(grouped(inner, routing), plain(inner, routing))


@pytest.mark.parametrize("own", [range(1), range(1, 4), range(4, 5)], ids=str)
def test_some_experts_of_a_rank(own: range) -> None:
    _, down = weights(torch.bfloat16)
    routing, inner = routing_of(numbers(9, NUM_EXPERTS, seed=3)), numbers(18, INNER, seed=4, dtype=torch.bfloat16)
    pairs = slice(int(routing.starts[own.start]), int(routing.starts[own.stop]))
    whole, part = (cuda.operators().pack_expert_linears(some, None) for some in (down, down[own.start : own.stop]))
    found = part.multiply(inner[pairs], routing.of_experts(own, pairs))
    assert torch.equal(found, whole.multiply(inner, routing)[pairs])


def test_quantized_experts_are_multiplied_one_after_the_other() -> None:
    _, down = weights(torch.bfloat16)
    quantized = [quantize_in_groups(numbers(HIDDEN, 64, seed=seed), 32) for seed in range(len(down))]
    packed = cuda.operators().pack_expert_linears(quantized, None)
    assert isinstance(packed, one_by_one.SequentialExpertLinears)
