"""Plans of sparse models of published sizes beside transformers' classes on the meta device."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
from rich.console import Console

from published_sparse import SPARSE, write_sparse
from twostroke.config.engine import EngineConfig
from twostroke.cost.roofline import roofline
from twostroke.cost.step_cost import MachineLimits, Share, step_cost
from twostroke.events import EngineStarted, Event
from twostroke.model.registry import num_active_parameters, num_parameters
from twostroke.planner.levers import bits_per_weight
from twostroke.planner.memory import ExpertsKind, plan_memory, with_quantization
from twostroke.planner.options import PlanOptions
from twostroke.planner.plan import make_plan
from twostroke.planner.report import as_json
from twostroke.planner.show import print_plan
from twostroke.planner.signals import Signals
from twostroke.startup.assembly import build_engine
from twostroke.startup.preparation import prepare
from twostroke.startup.prepared import Prepared

LIMITS = MachineLimits(flops_per_s=1e15, bytes_per_s=1e11)
EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 48),
    "Mixtral-8x7B": (8, 2, 32),
    "OLMoE-1B-7B": (64, 8, 16),
    "Granite-3.0-3b-a800m": (40, 8, 32),
    "GLM-4.5-Air": (128, 8, 45),
    "gpt-oss-20b": (32, 4, 24),
    "Gemma-4-26B-A4B": (128, 8, 30),
}
KV_BYTES = {
    "Qwen3-30B-A3B": 2 * 48 * 4 * 128 * 2,
    "Mixtral-8x7B": 2 * 32 * 8 * 128 * 2,
    "OLMoE-1B-7B": 2 * 16 * 16 * 128 * 2,
    "Granite-3.0-3b-a800m": 2 * 32 * 8 * 64 * 2,
    "GLM-4.5-Air": 2 * 46 * 8 * 128 * 2,
    "gpt-oss-20b": 2 * 24 * 8 * 64 * 2,
    "Gemma-4-26B-A4B": 2 * (25 * 8 * 256 + 5 * 2 * 512) * 2,
}


@cache
def tensors_on_meta(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint, tied heads left out."""
    model = SPARSE[name].on_meta()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if key not in tied}


def is_of_router(name: str) -> bool:
    return any(part in name for part in ("mlp.gate.", "router.", "e_score_correction_bias"))


def is_stack(name: str) -> bool:
    return "experts." in name and "shared_expert" not in name


def bytes_of_weights(name: str) -> Iterator[int]:
    """Of each tensor as torch's operators keep it: routers in float32, norms of heads once for each of them."""
    config = SPARSE[name].config
    copies = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    norms_are_of_heads = SPARSE[name].family in ("Qwen3Moe", "Glm4Moe")
    for key, shape in tensors_on_meta(name).items():
        num = copies.get(key.split(".")[-2], 1) if norms_are_of_heads else 1
        yield num * prod(shape) * (4 if is_of_router(key) else 2)


@pytest.fixture(scope="module", params=SPARSE)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def prepared(name: str, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = write_sparse(tmp_path_factory.mktemp("sparse"), name)
    return prepare(EngineConfig.from_keywords(model=str(folder), load_format="dummy", threads=1, kernels="reference"))


def test_parameters_are_those_of_the_class(name: str, prepared: Prepared) -> None:
    assert num_parameters(prepared.config) == sum(map(prod, tensors_on_meta(name).values()))


def test_parameters_are_the_published_ones(name: str, prepared: Prepared) -> None:
    """Some leave the embedding table and the head out of the active ones."""
    model, config = SPARSE[name], prepared.config
    active = num_active_parameters(config)
    num_tables = 1 if config.tie_word_embeddings else 2
    active -= max(0, num_tables - model.num_tables) * config.vocab_size * config.hidden_size
    for number, published in ((num_parameters(config), model.total), (active, model.active)):
        last_digit = 0.1 ** len(published.partition(".")[2])
        assert number / 1e9 == pytest.approx(float(published), abs=last_digit)


def test_bytes_are_exact(name: str, prepared: Prepared) -> None:
    plan = plan_memory(prepared, 1 << 40)
    if SPARSE[name].family not in ("Gemma4", "GptOss"):
        assert plan.weight_bytes == sum(bytes_of_weights(name))
    assert plan.kv_bytes_per_token == KV_BYTES[name]
    assert plan.experts == (ExpertsKind(*EXPERTS[name]),)


def test_floors_are_by_active_parameters(name: str, prepared: Prepared) -> None:
    """A token alone reads its own experts, and everything else but the embedding table, which is looked up."""
    num_experts, num_chosen, _ = EXPERTS[name]
    shapes = tensors_on_meta(name)
    tables = 0 if prepared.config.tie_word_embeddings else prepared.config.vocab_size * prepared.config.hidden_size
    stacks = sum(prod(shape) for key, shape in shapes.items() if is_stack(key))
    others = sum(map(prod, shapes.values())) - stacks - tables
    cost = step_cost(prepared.shape, [Share(0, 1, 1)], LIMITS)
    assert cost.weight_bytes == pytest.approx(2 * (others + stacks * num_chosen / num_experts), rel=0.01)
    assert cost.operations == pytest.approx(2 * (others + stacks * num_chosen / num_experts), rel=0.01)
    assert cost.seconds == pytest.approx(cost.weight_bytes / LIMITS.bytes_per_s, rel=0.001)
    many = step_cost(prepared.shape, [Share(0, 1, 1)] * 4096, LIMITS)
    assert many.weight_bytes == pytest.approx(2 * (others + stacks), rel=0.01)


def test_experts_in_few_bits_are_counted_apart(tmp_path: Path) -> None:
    """The embedding table keeps its floats: the mean over all weights would count too much for experts."""
    folder = write_sparse(tmp_path, "Granite-3.0-3b-a800m")
    floats = prepare(EngineConfig.from_keywords(model=str(folder), load_format="dummy", threads=1, device="cpu"))
    shape = with_quantization(floats, "int4").shape
    assert shape.bytes_per_expert_weight is not None
    assert shape.bytes_per_expert_weight == 0.5 + 2 / 32, "of a group a scale"
    assert shape.bytes_per_weight > shape.bytes_per_expert_weight
    hidden, (experts,) = floats.config.hidden_size, shape.experts
    at_once = shape.layer_bytes_read(1) - shape.num_layer_parameters * shape.bytes_per_weight
    assert at_once == pytest.approx(8 * 32 * 3 * hidden * 512 * shape.bytes_per_expert_weight)
    assert experts.num_weights == 40 * 32 * 3 * hidden * 512


def test_step_times_of_a_roofline_count_experts_by_tokens(prepared: Prepared) -> None:
    times = roofline(prepared.shape, LIMITS, most_tokens=64).layers
    expected = [prepared.shape.layer_bytes_read(count) / LIMITS.bytes_per_s for count in times.counts]
    assert times.seconds == pytest.approx(expected)
    assert times.seconds[0] < times.seconds[1] < 2 * times.seconds[0]


def test_what_a_plan_says(tmp_path: Path) -> None:
    folder = write_sparse(tmp_path, "OLMoE-1B-7B")
    config = EngineConfig.from_keywords(model=str(folder), load_format="dummy", threads=1)
    plan = make_plan(config, PlanOptions(device_name="H200", compare="none"))
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan, console)
    text = " ".join(console.export_text().split())
    assert "6,919.2 M parameters, 1,282.0 M of them for a token, bfloat16" in text
    assert "experts: 8 of 64 compute a token in each of 16 layers" in text
    assert "batch TPOT floor tok/s at most experts read bound by" in text
    told = as_json(plan)
    assert told["experts"] == [{"num_experts": 64, "num_chosen": 8, "num_layers": 16}]
    assert (told["num_parameters"], told["num_active_parameters"]) == (6_919_161_856, 1_282_017_280)
    read = [point["distinct_experts"] for point in told["frontier"]]
    assert read[:3] == pytest.approx([8, 64 * (1 - (7 / 8) ** 2), 64 * (1 - (7 / 8) ** 4)])
    assert plan.frontier[0].tpot_floor_s < plan.frontier[1].tpot_floor_s < 2 * plan.frontier[0].tpot_floor_s


def test_a_plan_says_that_ranks_have_whole_experts(tmp_path: Path) -> None:
    """The weights of each of two ranks are half of all experts, and half of the rows of the rest."""
    folder, told, num_bytes = write_sparse(tmp_path, "OLMoE-1B-7B"), [], []
    for is_dealt in (False, True):
        given = {"tensor_parallel_size": 2, "enable_expert_parallel": is_dealt}
        config = EngineConfig.from_keywords(model=str(folder), load_format="dummy", threads=1, device="cuda", **given)
        plan = make_plan(config, PlanOptions(device_name="H200", compare="none"))
        console = Console(record=True, width=300, file=io.StringIO())
        print_plan(plan, console)
        told.append("2 ranks with whole experts (memory is each rank's)" in " ".join(console.export_text().split()))
        num_bytes.append(plan.memory.weight_bytes)
    assert told == [False, True]
    assert num_bytes[0] == num_bytes[1], "of even numbers of rows and of experts"


def test_the_doctor_counts_bits_of_experts_that_no_step_read(random_models: dict[str, Path]) -> None:
    """Logs of before have only what steps read."""
    events: list[Event] = []
    config = EngineConfig.from_keywords(model=str(random_models["qwen3_moe"]), threads=1, num_kv_blocks=8)
    build_engine(config, listeners=[events]).engine.close()  # pyright: ignore[reportArgumentType]
    prepared = prepare(config)
    (started,) = (event for event in events if isinstance(event, EngineStarted))
    seen = Signals(weight_bytes=prepared.weight_bytes() / 4)
    bits = 8 * prepared.weight_bytes() / num_parameters(prepared.config)
    assert bits_per_weight(seen, started) == pytest.approx(bits)
    assert bits_per_weight(seen, replace(started, weight_bytes=None)) == pytest.approx(bits / 4)
