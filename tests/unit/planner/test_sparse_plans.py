"""Plans of sparse models of published sizes beside transformers' classes on the meta device."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fixtures.sparse.make import FOLDER, NAMES, config_of
from oracle.loaded_bytes import LoadedBytes
from published_sparse import SPARSE, write_sparse
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.cost.expert_shares import ExpertShare
from twostroke.cost.roofline import roofline
from twostroke.cost.step_cost import MachineLimits, Share, step_cost
from twostroke.events import EngineStarted, Event
from twostroke.model.registry import num_active_parameters, num_parameters
from twostroke.planner.levers import bits_per_weight
from twostroke.planner.machine import ObservedRun, planned_load
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


def is_stack(name: str) -> bool:
    return "experts." in name and "shared_expert" not in name


def loaded_bytes(name: str, *, is_native: bool, is_mxfp4: bool = False) -> int:
    """Bytes of all weights, from the tensors of transformers' class."""
    family = SPARSE[name].family
    rules = LoadedBytes(
        config=SPARSE[name].config,
        is_native=is_native,
        is_mxfp4=is_mxfp4,
        has_wide_norms=family in ("GptOss", "Gemma4"),
        has_copied_norms=family in ("Qwen3Moe", "Glm4Moe", "Gemma4"),
    )
    return rules.total(tensors_on_meta(name))


def prepared_from(folder: Path, **given: Any) -> Prepared:
    return prepare(EngineConfig.from_keywords(model=str(folder), load_format="dummy", threads=1, **given))


@pytest.fixture(scope="module", params=SPARSE)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("sparse"), name)


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Prepared:
    return prepared_from(folder, kernels="reference")


def test_parameters_are_those_of_the_class(name: str, prepared: Prepared) -> None:
    assert num_parameters(prepared.config) == sum(map(prod, tensors_on_meta(name).values()))


def test_parameters_are_the_published_ones(name: str, prepared: Prepared) -> None:
    """Ours have the head, and of the embedding table a row; some count both tables or none."""
    model, config = SPARSE[name], prepared.config
    active, table = num_active_parameters(config), config.vocab_size * config.hidden_size
    if config.tie_word_embeddings:
        active -= table if model.num_tables == 0 else 0
    else:
        active += (model.num_tables - 1) * table
    for number, published in ((num_parameters(config), model.total), (active, model.active)):
        last_digit = 0.1 ** len(published.partition(".")[2])
        assert number / 1e9 == pytest.approx(float(published), abs=last_digit)


def test_active_parameters_are_those_that_a_token_reads(name: str, prepared: Prepared) -> None:
    """Only chosen experts count, and one row of an embedding table that is not the head."""
    num_experts, num_chosen, _ = EXPERTS[name]
    config, shapes = prepared.config, tensors_on_meta(name)
    num_idle = sum(prod(shape) for key, shape in shapes.items() if is_stack(key)) * (num_experts - num_chosen)
    read = sum(map(prod, shapes.values())) - num_idle // num_experts
    rows_left = 0 if config.tie_word_embeddings else config.vocab_size - 1
    assert num_active_parameters(config) == read - rows_left * config.hidden_size


def test_bytes_are_exact(name: str, folder: Path, prepared: Prepared) -> None:
    """With torch's operators, and with the native ones, which pad panels and keep biases, routers and norms wide."""
    for kernels, ready in (("reference", prepared), ("auto", prepared_from(folder, dtype="bfloat16"))):
        plan = plan_memory(ready, 1 << 40)
        assert plan.weight_bytes == loaded_bytes(name, is_native=kernels == "auto"), kernels
        assert plan.kv_bytes_per_token == KV_BYTES[name]
        assert plan.experts == (ExpertsKind(*EXPERTS[name]),)


@pytest.mark.parametrize("published", NAMES)
def test_fixtures_are_what_the_classes_write(published: str) -> None:
    """For another release of transformers: `PYTHONPATH=tests python -m fixtures.sparse.make`."""
    assert json.loads((FOLDER / published / "config.json").read_text()) == config_of(published)


@pytest.mark.parametrize("published", NAMES)
def test_plans_of_published_models_from_config_json_alone(published: str) -> None:
    """Experts of gpt-oss take 4.5 bits in memory, where scales are float16, and 4.25 in the file."""
    load = planned_load(LoadConfig(model=str(FOLDER / published), threads=1, device="cpu"))
    assert (load.load_format, load.tokenizer) == ("dummy", "embedded")
    ready = prepare(EngineConfig(load=load))
    plan, is_mxfp4 = plan_memory(ready, 1 << 40), published == "gpt-oss-20b"
    assert plan.weight_bytes == loaded_bytes(published, is_native=True, is_mxfp4=is_mxfp4)
    assert plan.kv_bytes_per_token == KV_BYTES[published]
    assert plan.quantization == ("mxfp4" if is_mxfp4 else None)
    (remark,) = (one for one in plan.remarks if "config.json" in one)
    assert remark.startswith("sizes are those of config.json in ")
    num_experts, num_chosen, _ = EXPERTS[published]
    stacks = {key: prod(shape) for key, shape in tensors_on_meta(published).items() if is_stack(key)}
    num_in_file = sum(num for key, num in stacks.items() if not key.endswith("_bias"))
    assert plan.bytes_per_expert_weight is not None
    if is_mxfp4:
        of_biases = 4 * sum(num for key, num in stacks.items() if key.endswith("_bias"))
        assert plan.bytes_per_expert_weight * num_in_file == 4.5 / 8 * num_in_file + of_biases
    else:
        assert plan.bytes_per_expert_weight == 2
    cost = step_cost(ready.shape, [Share(0, 1, 1)], LIMITS)
    others = plan.weight_bytes - plan.bytes_per_expert_weight * num_in_file
    tables = 0 if ready.config.tie_word_embeddings else 2 * ready.config.vocab_size * ready.config.hidden_size
    read = others - tables + plan.bytes_per_expert_weight * num_in_file * num_chosen / num_experts
    assert cost.weight_bytes == pytest.approx(read, rel=0.005)


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
    assert "6,919.2 M parameters, 1,179.0 M of them for a token, bfloat16" in text
    assert "experts: 8 of 64 compute a token in each of 16 layers each of their weights takes 16.00 bits" in text
    assert "the experts that several tokens read are an upper bound" in text
    assert "batch TPOT floor tok/s at most experts at most bound by" in text
    told = as_json(plan)
    assert told["experts"] == [{"num_experts": 64, "num_chosen": 8, "num_layers": 16}]
    assert (told["num_parameters"], told["num_active_parameters"]) == (6_919_161_856, 1_178_996_736)
    read = [point["distinct_experts"] for point in told["frontier"]]
    assert told["has_measured_experts"] is False
    assert read[:3] == pytest.approx([8, 64 * (1 - (7 / 8) ** 2), 64 * (1 - (7 / 8) ** 4)])
    assert plan.frontier[0].tpot_floor_s < plan.frontier[1].tpot_floor_s < 2 * plan.frontier[0].tpot_floor_s


def test_a_plan_with_a_run_expects_the_experts_that_the_run_measured(tmp_path: Path) -> None:
    """Half of the experts are never chosen. Shares of another model are not used."""
    folder = write_sparse(tmp_path, "OLMoE-1B-7B")
    config = EngineConfig.from_keywords(model=str(folder), load_format="dummy", threads=1)
    options = PlanOptions(device_name="H200", compare="none")
    for num_experts, is_used in ((32 * 16, True), (32 * 15, False)):
        run = ObservedRun(None, (), ((ExpertShare(num_experts, 0.25),),))
        plan = make_plan(config, options, run=run)
        assert plan.has_measured_experts is is_used
        num, share = (32, 1 / 4) if is_used else (64, 1 / 8)
        read = [point["distinct_experts"] for point in as_json(plan)["frontier"]]
        assert read[:3] == pytest.approx([8, num * (1 - (1 - share) ** 2), num * (1 - (1 - share) ** 4)])
        console = Console(record=True, width=200, file=io.StringIO())
        print_plan(plan, console)
        text = " ".join(console.export_text().split())
        assert ("experts read bound by" in text) is is_used
        assert ("are an upper bound" in text) is not is_used


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
