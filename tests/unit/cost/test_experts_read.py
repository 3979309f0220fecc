"""Experts that a real engine reads at decode, beside the router's choice and beside what costs expect."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_folders import write_random_model
from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.config.experts import ExpertsSpec
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.expert_operators import ExpertRouter, Routing
from twostroke.kernels.reference.experts import routing_of
from twostroke.model import sparse
from twostroke.startup.preparation import prepare

BATCHES = (1, 2, 4, 8, 16, 32, 64)
NUM_TOKENS = 24


@dataclass
class Seen:
    """What the experts of all layers were asked for."""

    hits: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """For each pass through a layer: its tokens, and the experts that the router chose."""
    num_bytes: int = 0
    """Of the matrices that were multiplied."""


def watch(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Look at the experts of models that are loaded from now on; bytes are seen of those that run one by one."""
    seen, init = Seen(), sparse.Experts.__init__

    def counting(product: Callable[[Tensor], Tensor], num_bytes: int) -> Callable[[Tensor], Tensor]:
        def multiply(x: Tensor) -> Tensor:
            seen.num_bytes += num_bytes
            return product(x)

        return multiply

    def watched(self: Any, config: Any, spec: Any, weights: Any, placement: Any) -> None:
        init(self, config, spec, weights, placement)
        route = self._route

        def noted(logits: Tensor, router: ExpertRouter) -> Routing:
            found = route(logits, router)
            seen.hits.append((logits.shape[0], int((found.starts[1:] > found.starts[:-1]).sum())))
            return found

        self._route = noted
        size = spec.experts.intermediate_size * config.hidden_size * placement.dtype.itemsize
        for experts, num_bytes in zip(self._products, (2 * size, size), strict=True):
            if hasattr(experts, "_experts"):
                experts._experts = [counting(one, num_bytes) for one in experts._experts]

    monkeypatch.setattr(sparse.Experts, "__init__", watched)
    return seen


def decode(llm: LLM, batch: int) -> None:
    rng = random.Random(batch)
    prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(4)]} for _ in range(batch)]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(prompts))
    ]
    llm.generate(prompts, params)  # type: ignore[arg-type]


def test_bytes_of_experts_are_those_that_the_router_chose(
    random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, model = watch(monkeypatch), str(random_models["qwen3_moe"])
    shape = prepare(EngineConfig.from_keywords(model=model, kernels="reference", threads=1)).shape
    (experts,) = shape.experts
    assert shape.bytes_per_expert_weight == 4
    of_one = experts.parameters_each * 4
    assert (of_one, experts.num_layers) == (3 * 64 * 64 * 4, 2)
    with LLM(model, threads=1, num_kv_blocks=64, max_model_len=64, kernels="reference") as llm:
        for batch in (1, 3, 8):
            seen.hits.clear()
            seen.num_bytes = 0
            decode(llm, batch)
            assert seen.num_bytes == sum(num_hit for _, num_hit in seen.hits) * of_one
            steps = [num_hit for num_tokens, num_hit in seen.hits if num_tokens == batch]
            assert len(steps) >= 2 * (NUM_TOKENS - 4)
            if batch == 1:
                expected = shape.layer_bytes_read(1) - shape.num_layer_parameters * shape.bytes_per_weight
                assert set(steps) == {3}
                assert expected == pytest.approx(2 * 3 * of_one)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_experts_that_no_token_chose_are_not_multiplied(kernels: str) -> None:
    """NaN in their weights changes no bit."""
    torch.manual_seed(0)
    operators = operators_for(torch.device("cpu"), torch.float32, kernels)  # type: ignore[arg-type]
    chosen = torch.tensor([[1, 4], [4, 6], [1, 6]])
    routing = routing_of(chosen, torch.rand(3, 2), 8)
    gated, down = ([torch.randn(n, 64) / 8 for _ in range(8)] for n in (128, 64))
    x = torch.randn(3, 64)

    def result(inner: Sequence[Tensor], outer: Sequence[Tensor]) -> Tensor:
        of_gate = operators.pack_gated_experts(list(inner), None, "silu")
        return operators.pack_expert_linears(list(outer), None)(of_gate(x, routing), routing)

    spoilt = (
        [one if i in (1, 4, 6) else torch.full_like(one, torch.nan) for i, one in enumerate(stack)]
        for stack in (gated, down)
    )
    assert result(*spoilt).equal(result(gated, down))


def test_distinct_experts_are_the_expected_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random routers, in the mean over layers, steps and models; those of trained models may favour some experts."""
    seen, spec = watch(monkeypatch), ExpertsSpec(num_experts=32, num_chosen=4, intermediate_size=64)
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "mlp_only_layers": [], "hidden_size": 128}
    measured: dict[int, list[int]] = {batch: [] for batch in BATCHES}
    for seed in (0, 1):
        folder = write_random_model(tmp_path / str(seed), "qwen3_moe", seed=seed, num_hidden_layers=4, **sizes)
        options = {"num_kv_blocks": 256, "max_model_len": 64, "max_num_seqs": 64, "kernels": "reference"}
        with LLM(str(folder), threads=1, **options) as llm:  # type: ignore[arg-type]
            for batch in BATCHES:
                seen.hits.clear()
                decode(llm, batch)
                measured[batch] += [num_hit for num_tokens, num_hit in seen.hits if num_tokens == batch]
    for batch, hits in measured.items():
        assert len(hits) >= 2 * 4 * (NUM_TOKENS - 4)
        assert spec.expected_distinct(batch) == pytest.approx(sum(hits) / len(hits), rel=0.05), batch
