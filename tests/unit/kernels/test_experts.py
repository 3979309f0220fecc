"""Experts of every backend: the choice against transformers' rules, the products against those of single experts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twostroke.config.experts import ExpertsSpec, RouterScores
from twostroke.kernels import native, reference
from twostroke.kernels.expert_operators import ExpertRouter, Routing
from twostroke.kernels.interface import Operators
from twostroke.kernels.quantized_weight import quantize_in_groups, quantize_per_channel
from twostroke.kernels.reference import experts as one_by_one

NUM_EXPERTS, HIDDEN, INNER = 6, 64, 96


def backends() -> list[Operators]:
    levels = [native.operators(level) for level in native.levels()]
    whole = [native.operators(level, "none") for level in native.levels()[-1:]]
    return [reference.operators(), *levels, *whole]


BACKENDS = backends()
NAMES = [f"{place}-{one.name}" for place, one in enumerate(BACKENDS)]


def spec(scores: RouterScores = "softmax", **changes: int | float | bool) -> ExpertsSpec:
    return ExpertsSpec(
        **{"num_experts": NUM_EXPERTS, "num_chosen": 2, "intermediate_size": INNER, "scores": scores, **changes}  # type: ignore[arg-type]
    )


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_is_whole(routing: Routing, num_tokens: int, num_experts: int) -> None:
    """Check that every token has its pairs, and that each pair is with its expert."""
    num_chosen = routing.places.shape[1]
    assert routing.starts[0] == 0
    assert routing.starts[-1] == len(routing.tokens) == num_tokens * num_chosen
    assert sorted(routing.places.flatten().tolist()) == list(range(num_tokens * num_chosen))
    for token, places in enumerate(routing.places.tolist()):
        assert routing.tokens[places].tolist() == [token] * num_chosen
        assert places == sorted(places), "experts rise"
    for expert in range(num_experts):
        tokens = routing.tokens[routing.starts[expert] : routing.starts[expert + 1]].tolist()
        assert tokens == sorted(set(tokens))


@given(
    logits=st.lists(st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=8, max_size=8), min_size=1),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    num_chosen=st.integers(1, 4),
    num_groups=st.sampled_from([1, 2, 4]),
    is_renormalized=st.booleans(),
    has_correction_bias=st.booleans(),
    has_expert_scales=st.booleans(),
)
def test_native_choices_are_those_of_the_reference(
    logits: list[list[float]],
    scores: RouterScores,
    num_chosen: int,
    num_groups: int,
    is_renormalized: bool,
    has_correction_bias: bool,
    has_expert_scales: bool,
) -> None:
    """Ties included: of equal scores the first expert's counts as larger."""
    rules = spec(
        scores,
        num_experts=8,
        num_chosen=num_chosen,
        num_groups=num_groups,
        num_chosen_groups=2 if num_groups == 4 else 1,
        is_renormalized=is_renormalized,
        scale=1.5,
    )
    correction = numbers(8, seed=1) if has_correction_bias else None
    router = ExpertRouter(rules, correction, numbers(8, seed=2) if has_expert_scales else None)
    expected = one_by_one.route(torch.tensor(logits), router)
    check_is_whole(expected, len(logits), 8)
    for operators in BACKENDS[1:]:
        found = operators.route(torch.tensor(logits), router)
        for name in ("tokens", "starts", "places"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (operators.name, name)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("operators", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_tokens_choice_does_not_depend_on_the_others(operators: Operators, scores: RouterScores) -> None:
    router, logits = ExpertRouter(spec(scores), None), numbers(33, NUM_EXPERTS)
    together = operators.route(logits, router)
    for token in range(33):
        alone = operators.route(logits[token : token + 1], router)
        assert torch.equal(alone.weights[0], together.weights[token])


@cache
def weights(kind: str, dtype: torch.dtype) -> tuple[list[object], list[object]]:
    def made(rows: int, columns: int, seed: int) -> object:
        floats = (numbers(rows, columns, seed=seed) * 0.1).to(dtype)
        if kind == "int8":
            return quantize_per_channel(floats)
        return quantize_in_groups(floats, 32) if kind == "int4" else floats

    gated = [made(2 * INNER, HIDDEN, seed) for seed in range(NUM_EXPERTS)]
    return gated, [made(HIDDEN, INNER, 100 + seed) for seed in range(NUM_EXPERTS)]


@pytest.mark.parametrize("operators", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("kind", ["floats", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_biases", [False, True])
def test_products_are_those_of_single_experts(
    operators: Operators, kind: str, dtype: torch.dtype, has_biases: bool
) -> None:
    """Bit for bit; and a token's result is the same alone and among others."""
    gated, down = weights(kind, dtype)
    gated_biases = numbers(NUM_EXPERTS, 2 * INNER, seed=7).to(dtype) if has_biases else None
    biases = numbers(NUM_EXPERTS, HIDDEN, seed=8).to(dtype) if has_biases else None
    inner_of = operators.pack_gated_experts(gated, gated_biases, "silu")  # type: ignore[arg-type]
    down_of = operators.pack_expert_linears(down, biases)  # type: ignore[arg-type]
    plain_inner = one_by_one.pack_gated_experts(operators.pack_gated, gated, gated_biases, "silu")  # type: ignore[arg-type]
    plain_down = one_by_one.pack_expert_linears(operators.pack_linear, down, biases)  # type: ignore[arg-type]
    for num_tokens in (1, 2, 7, 40):
        x, router = numbers(num_tokens, HIDDEN, seed=num_tokens).to(dtype), ExpertRouter(spec(), None)
        routing = operators.route(numbers(num_tokens, NUM_EXPERTS, seed=3), router)
        inner = inner_of(x, routing)
        assert torch.equal(inner, plain_inner(x, routing))
        found = down_of(inner, routing)
        assert torch.equal(found, plain_down(inner, routing))
        assert torch.equal(down_of.add(down_of.multiply(inner, routing), routing), found)
        first = operators.route(numbers(num_tokens, NUM_EXPERTS, seed=3)[:1], router)
        assert torch.equal(down_of(inner_of(x[:1], first), first)[0], found[0])
