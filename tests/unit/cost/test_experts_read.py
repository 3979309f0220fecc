"""Experts that a real engine reads at decode, beside the router's choice and beside what costs expect."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_folders import write_random_model
from twostroke import LLM, SamplingParams
from twostroke.batch import ScheduledBatch
from twostroke.config.engine import EngineConfig
from twostroke.cost.step_cost import ModelShape
from twostroke.engine.event_sinks import read_events
from twostroke.events import EngineStarted, ExpertsMeasured, StepScheduled
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.native.experts import NativeExpertLinears, NativeGatedExperts
from twostroke.kernels.reference.experts import routing_of
from twostroke.model import sparse
from twostroke.planner.after_run import observed_run
from twostroke.runner.launched_step import LaunchedStep
from twostroke.runner.model_runner import ModelRunner
from twostroke.startup.preparation import prepare

BATCHES = (1, 2, 4, 8, 16, 32, 64)
NUM_TOKENS = 24
PASSES = {1: 1, 2: 12, 4: 10, 8: 8, 16: 4, 32: 3, 64: 2}
"""Runs of each batch: few tokens scatter most."""
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
}
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 24, "num_experts_per_tok": 4},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": []},
    "olmoe": {"num_experts": 32, "num_experts_per_tok": 4},
    "granite_moe": {"num_local_experts": 16, "num_experts_per_tok": 4},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4},
    "glm4_moe": {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    "gemma4_experts": {"num_experts": 32, "top_k_experts": 4},
    "minimax_m2": {"num_local_experts": 32, "num_experts_per_tok": 4},
    "ernie4_5_moe": {"moe_num_experts": 32, "moe_k": 4},
    "dots1": {"n_routed_experts": 32, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 3, "moe_intermediate_size": 64},
}
"""Each family with experts, with random routers and biases; three choose in groups."""
PREFERRING = ("gpt_oss", "glm4_moe", "minimax_m2", "ernie4_5_moe", "dots1")
"""Families whose routers have biases, and so prefer some experts."""


@dataclass
class Seen:
    """Experts that the routers of a model chose."""

    steps: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """For each step: its tokens, its requests, and the experts that were hit, summed over the layers."""
    experts: list[sparse.Experts] = field(default_factory=list[sparse.Experts])

    def hits_of(self, batch: int) -> list[int]:
        """Return the hits of the steps in which so many requests decode."""
        return [hits for num_tokens, num_requests, hits in self.steps if num_tokens == num_requests == batch]

    @property
    def num_multiplied(self) -> tuple[int, int]:
        """Experts whose two matrices were multiplied, counted by the products themselves."""
        gated, down = zip(*(one._products for one in self.experts), strict=True)  # pyright: ignore[reportPrivateUsage]
        assert all(isinstance(one, NativeGatedExperts) for one in gated)
        assert all(isinstance(one, NativeExpertLinears) for one in down)
        return sum(one.bound.num_multiplied for one in gated), sum(one.bound.num_multiplied for one in down)

    @property
    def bytes_of_one(self) -> tuple[int, int]:
        """Packed bytes of an expert's two products."""
        first = self.experts[0]._products  # pyright: ignore[reportPrivateUsage]
        gated, down = (one.panels[0]._packed.nbytes for one in first)  # type: ignore[attr-defined]
        return gated, down


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record the experts of models that are loaded from now on."""
    seen, init, launch = Seen(), sparse.Experts.__init__, ModelRunner.launch

    def watched(self: sparse.Experts, *given: Any) -> None:
        init(self, *given)
        seen.experts.append(self)

    def noted(self: ModelRunner, batch: ScheduledBatch) -> LaunchedStep:
        before = self.expert_counts()
        found = launch(self, batch)
        hits = int((self.expert_counts() > before).sum())
        seen.steps.append((batch.num_tokens, len(batch.requests), hits))
        return found

    monkeypatch.setattr(sparse.Experts, "__init__", watched)
    monkeypatch.setattr(ModelRunner, "launch", noted)
    return seen


def decode(llm: LLM, batch: int, seed: int = 0) -> None:
    rng = random.Random(1000 * seed + batch)
    prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(4)]} for _ in range(batch)]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1000 * seed + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    llm.generate(prompts, params)  # type: ignore[arg-type]


def shape_of(model: Path, **given: Any) -> ModelShape:
    return prepare(EngineConfig.from_keywords(model=str(model), threads=1, **given)).shape


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_bytes_of_experts_are_those_that_the_router_chose(
    random_models: dict[str, Path], seen: Seen, quantization: Any
) -> None:
    """In the layer's one native call: the products count the experts whose weights they multiply."""
    model, given = random_models["qwen3_moe"], {"quantization": quantization}
    shape = shape_of(model, **given)
    (experts,) = shape.experts
    assert shape.bytes_per_expert_weight is not None
    of_one = experts.parameters_each * shape.bytes_per_expert_weight
    with LLM(str(model), threads=1, num_kv_blocks=64, max_model_len=64, **given) as llm:
        assert len(seen.experts) == experts.num_layers == 2
        assert all(one.parts is not None for one in seen.experts)
        assert sum(seen.bytes_of_one) == of_one
        for batch in (1, 3, 8):
            before = seen.num_multiplied
            seen.steps.clear()
            decode(llm, batch)
            gated, down = (now - then for now, then in zip(seen.num_multiplied, before, strict=True))
            assert gated == down == sum(hits for *_, hits in seen.steps)
            steps = seen.hits_of(batch)
            assert len(steps) >= NUM_TOKENS - 4
            if batch == 1:
                expected = shape.layer_bytes_read(1) - shape.num_layer_parameters * shape.bytes_per_weight
                assert set(steps) == {2 * 3}
                assert expected == pytest.approx(2 * 3 * of_one)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_experts"])
def test_every_path_counts_the_same_tokens(random_models: dict[str, Path], seen: Seen, family: str) -> None:
    """In one native call, in native products, and in the reference: each token once for each of its experts."""
    num_pairs = 3 * 5 * (4 + NUM_TOKENS - 1)
    for kernels in ("auto", "reference"):
        seen.experts.clear()
        with LLM(str(random_models[family]), threads=1, num_kv_blocks=64, max_model_len=64, kernels=kernels) as llm:
            counts = [one.counts for one in seen.experts]
            assert counts
            assert all(one is not None for one in counts)
            before = [0 if one is None else int(one.sum()) for one in counts]
            decode(llm, 5)
            after = [0 if one is None else int(one.sum()) for one in counts]
        assert [now - then for now, then in zip(after, before, strict=True)] == [num_pairs] * len(counts)


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


@pytest.mark.parametrize("family", ROUTERS)
def test_distinct_experts_are_the_expected_ones(tmp_path: Path, seen: Seen, family: str) -> None:
    """Shares that an engine measured give the experts of other tokens within 5 %, from 1 to 64 requests.

    Without them the count is an upper bound, which routers with biases miss by far.
    """
    folder, log = write_random_model(tmp_path / "model", family, **SMALL | ROUTERS[family]), tmp_path / "log.jsonl"
    given = {"num_kv_blocks": 256, "max_model_len": 64, "max_num_seqs": 64}
    unmeasured = shape_of(folder, **given)
    with LLM(str(folder), threads=1, event_log=str(log), **given) as llm:
        decode(llm, 64, seed=1)
        decode(llm, 64, seed=2)
        measured = [event.shares for event in read_events(log) if isinstance(event, ExpertsMeasured)]
        known = replace(unmeasured, expert_shares=measured[-1])
        num_layers = sum(group.num_layers for group in known.experts)
        found: dict[int, float] = {}
        for batch in BATCHES:
            seen.steps.clear()
            for run in range(PASSES[batch]):
                decode(llm, batch, seed=3 + run)
            found[batch] = float(np.mean(seen.hits_of(batch))) / num_layers
    assert {batch: known.distinct_experts(batch) for batch in BATCHES} == pytest.approx(found, rel=0.05)
    upper = {batch: unmeasured.distinct_experts(batch) / hits for batch, hits in found.items()}
    assert min(upper.values()) > 0.97
    if family in PREFERRING:
        assert max(upper.values()) > 1.05


def test_costs_of_steps_follow_from_measured_shares(tmp_path: Path) -> None:
    """Until 1,024 tokens were served, costs are those of the upper bound."""
    folder, log = (
        write_random_model(tmp_path / "model", "gpt_oss", **SMALL | ROUTERS["gpt_oss"]),
        tmp_path / "log.jsonl",
    )
    given = {"num_kv_blocks": 256, "max_model_len": 64, "max_num_seqs": 64}
    with LLM(str(folder), threads=1, event_log=str(log), **given) as llm:
        for seed in range(3):
            decode(llm, 64, seed)
    shape, num_tokens = shape_of(folder, **given), 0
    read, kinds = list(read_events(log)), list[int]()
    for event in read:
        match event:
            case EngineStarted():
                assert event.machine is not None
            case ExpertsMeasured():
                kinds.append(num_tokens)
                shape = replace(shape, expert_shares=event.shares)
            case StepScheduled() if event.cost is not None and event.batch.requests:
                expected = shape.layer_bytes_read(event.batch.num_tokens) + shape.head_bytes
                assert event.cost.weight_bytes == pytest.approx(expected)
                num_tokens += event.batch.num_tokens
            case _:
                pass
    assert len(kinds) == 3
    assert observed_run(read).expert_shares == shape.expert_shares, "what `plan --measured` takes from a log"
    assert all(low <= num < low + 64 * 4 for low, num in zip((1024, 2048, 4096), kinds, strict=True)), kinds
