"""Plans for published models on published cards, compared with independent arithmetic: the rule of a GPU's memory."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from published_models import MODELS, Published, write_published
from twostroke.config.engine import EngineConfig
from twostroke.errors import DoesNotFit
from twostroke.kv_cache.device_memory import DeviceMemory
from twostroke.planner.devices import devices
from twostroke.planner.memory import SMALLER, plan_memory, with_quantization
from twostroke.planner.options import PlanOptions
from twostroke.planner.plan import Plan, make_plan
from twostroke.planner.report import as_json
from twostroke.planner.show import print_plan
from twostroke.startup.preparation import prepare
from twostroke.startup.prepared import Prepared

GB = 10**9
CARD_BYTES = {
    "T4": 16 * GB,
    "A10": 24 * GB,
    "L4": 24 * GB,
    "RTX-4090": 24 * GB,
    "A100-40": 40 * GB,
    "L40S": 48 * GB,
    "A100-80": 80 * GB,
    "H100-SXM": 80 * GB,
    "H200": 141 * GB,
    "B200": 180 * GB,
    "MI300X": 192 * GB,
}
FITS = [
    ("Llama-2-7B", "A100-80", 1),
    ("Llama-2-7B", "RTX-4090", 1),
    ("Llama-2-7B", "L40S", 1),
    ("Llama-2-13B", "A100-40", 1),
    ("Llama-3.1-8B", "L4", 1),
    ("Llama-3.1-8B", "H100-SXM", 1),
    ("Llama-3.1-8B", "A10", 2),
    ("Llama-3.1-70B", "H200", 2),
    ("Llama-3.1-70B", "A100-80", 4),
    ("Llama-3.1-70B", "MI300X", 1),
    ("Mistral-7B-v0.3", "A100-40", 1),
    ("Mistral-7B-v0.3", "H100-SXM", 1),
    ("Qwen2.5-0.5B", "L4", 1),
    ("Qwen2.5-7B", "RTX-4090", 1),
    ("Qwen2.5-32B", "B200", 1),
    ("Qwen3-0.6B", "H100-SXM", 1),
    ("Qwen3-8B", "L40S", 1),
    ("Qwen3-32B", "A100-80", 1),
]
TOO_LARGE = [
    # the model, the card, the suggestion that fits
    ("Llama-3.1-70B", "H100-SXM", "--tensor-parallel-size 2 or --quantization int4"),
    ("Qwen2.5-32B", "L40S", "--tensor-parallel-size 2 or --quantization int8"),
    ("Llama-2-13B", "A10", "--tensor-parallel-size 2 or --quantization int8"),
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    for name in MODELS:
        write_published(folder, name)
    return folder


def plan_of(folder: Path, name: str, card: str, options: dict[str, Any] | None = None, **given: Any) -> Plan:
    settings = {"model": str(folder / name), "load_format": "dummy", "threads": 1, **given}
    asked = {"device_name": card, "compare": "none", **(options or {})}
    return make_plan(EngineConfig.from_keywords(**settings), PlanOptions(**asked))


def text_of(plan: Plan) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan, console)
    return " ".join(console.export_text().split())


def share_of_weights(model: Published, num_ranks: int) -> int:
    """Return the weight bytes of one rank.

    Rows are split, norms are copied to all ranks, and norms of heads exist once per head.
    """
    norms = (2 * model.layers + 1) * model.hidden
    of_heads = model.layers * model.head_dim if model.family == "Qwen3" else 0
    dealt_out = (model.num_parameters - norms - 2 * of_heads) // num_ranks
    return 2 * (dealt_out + norms + of_heads * (model.heads + model.kv_heads) // num_ranks)


def kv_budget(model: Published, card_bytes: int, num_ranks: int, utilization: float = 0.9) -> int:
    """Return the bytes for KV after weights, rotary tables, the largest step, recorded passes and a reserve."""
    tables = 2 * model.context * model.head_dim * 2
    q, qkv = model.heads * model.head_dim, (model.heads + 2 * model.kv_heads) * model.head_dim
    activations = 512 * 2 * (3 * model.hidden + max(qkv + q, 3 * model.intermediate))
    scored = min(512, (64 << 20) // (4 * model.vocab))
    logits = 4 * model.vocab * max(5 * 64, 3 * scored)
    step = activations + logits + 1024 * q * 4 + (8 << 20)
    recorded, reserve = 2 * (step - logits), (64 << 20) + ceil(step / 8)  # passes of all the 512 tokens of a step
    return int(utilization * card_bytes) - share_of_weights(model, num_ranks) - tables - step - recorded - reserve


@pytest.mark.parametrize(("name", "card", "num_ranks"), FITS)
def test_a_plan_is_the_gpu_rule(published: Path, name: str, card: str, num_ranks: int) -> None:
    model = MODELS[name]
    found = plan_of(published, name, card, tensor_parallel_size=num_ranks).memory
    per_token = 2 * model.layers * model.kv_heads // num_ranks * model.head_dim * 2
    num_blocks = kv_budget(model, CARD_BYTES[card], num_ranks) // (16 * per_token)
    longest = min(model.context, 16 * num_blocks)
    assert found.num_parameters == model.num_parameters
    assert found.weight_bytes == share_of_weights(model, num_ranks)
    assert found.kv_bytes_per_token == per_token
    assert found.num_blocks == num_blocks
    assert found.max_model_len == longest
    assert found.max_concurrent_requests == num_blocks // ceil(longest / 16)


@pytest.mark.parametrize(("name", "card", "remedy"), TOO_LARGE)
def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic(
    published: Path, name: str, card: str, remedy: str
) -> None:
    weights, room = share_of_weights(MODELS[name], 1), CARD_BYTES[card] * 9 // 10
    with pytest.raises(DoesNotFit) as refusal:
        plan_of(published, name, card)
    said = str(refusal.value)
    assert f"take {weights:,} bytes of 0.9 x {CARD_BYTES[card]:,} = {room:,}: {weights - room:,} more" in said
    assert f"What would fit: {remedy}" in said


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_said_to_fit_does_and_all_that_does_is_said(published: Path, device: str) -> None:
    """At every size of memory, a named remedy leaves room for a step and a block beside the weights."""
    given = {"model": str(published / "Qwen2.5-0.5B"), "load_format": "dummy", "threads": 1}
    config = EngineConfig.from_keywords(**given)
    prepared = prepare(config)
    if device == "cuda":
        prepared = replace(prepared, settings=replace(config, load=replace(config.load, device="cuda")))
    weight_bytes = plan_memory(prepared, 4 * GB).weight_bytes
    counts: Counter[bool] = Counter()
    for memory in range(weight_bytes // 4, weight_bytes, weight_bytes // 40):
        said = refusal(prepared, memory)
        for quantization in SMALLER:
            fits = not refusal(with_quantization(prepared, quantization), memory)
            assert (f"--quantization {quantization} (" in said) is fits, (memory, said)
            counts[fits] += 1
    assert counts[True] >= 5
    assert counts[False] >= 5


def refusal(prepared: Prepared, memory_bytes: int) -> str:
    """Return why it does not fit; empty if it does."""
    try:
        plan_memory(prepared, memory_bytes)
    except DoesNotFit as error:
        return str(error)
    return ""


def test_the_cards_here_are_those_of_the_table() -> None:
    assert len(FITS) + len(TOO_LARGE) >= 20
    assert {name: devices()[name].memory_bytes for name in CARD_BYTES} == CARD_BYTES


def test_fifty_users_of_llama_2_do_not_fit_on_80_gb(published: Path) -> None:
    plan = plan_of(published, "Llama-2-7B", "A100-80", {"requests": 50})
    assert plan.memory.kv_bytes_per_token == 512 << 10
    assert plan.memory.max_concurrent_requests == 27
    text = text_of(plan)
    assert "KV per token 524,288 512 KiB" in text
    assert "KV of 4,096 tokens 2,147,483,648 2.00 GiB" in text
    assert "50 requests of 4,096 tokens do not fit: at most 27 do at 90% of the card, 30 at 100%" in text
    told = json.loads(json.dumps(as_json(plan)))["requests"]
    assert told == {"num_requests": 50, "most": 27, "most_of_all": 30, "fit": False}
    whole = plan_of(published, "Llama-2-7B", "A100-80", {"requests": 27}, gpu_memory_utilization=1.0, device="cuda")
    assert whole.memory.max_concurrent_requests == 30
    assert "27 requests of 4,096 tokens fit: at most 30 do at 100% of the card" in text_of(whole)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_bytes", "words"),
    [
        ("Llama-3.1-70B", 4, 32_768_000_000, "30.5 GiB, of all ranks"),
        ("Llama-3.1-8B", 1, 13_107_200_000, "12.2 GiB"),
    ],
)
def test_a_context_of_100_000_tokens(published: Path, name: str, num_ranks: int, num_bytes: int, words: str) -> None:
    plan = plan_of(published, name, "H100-SXM", {"context": 100_000}, tensor_parallel_size=num_ranks)
    assert f"KV of 100,000 tokens {num_bytes:,} {words}" in text_of(plan)


def test_weights_are_counted_as_the_kernels_of_the_card_keep_them(published: Path) -> None:
    """They take 8 bits a weight and a float16 scale for 128; embedding table and norms stay floats. A T4 cannot run
    Triton."""
    model = MODELS["Llama-2-7B"]
    num_floats = model.vocab * model.hidden + (2 * 32 + 1) * 4096
    num_codes = model.num_parameters - num_floats
    packed = plan_of(published, "Llama-2-7B", "L4", quantization="int8").memory
    assert packed.weight_bytes == 2 * num_floats + num_codes + 2 * num_codes // 128
    with pytest.raises(DoesNotFit, match="would not fit"):
        plan_of(published, "Llama-2-13B", "T4", dtype="float16")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantized_weights_are_planned_at_the_rate_of_the_floats_they_are_multiplied_with(
    published: Path, quantization: str
) -> None:
    """The kernels of a card leave activations as they are; twice the rate for 8 bits would promise prompts too soon."""
    plain, packed = (
        plan_of(published, "Llama-2-7B", "A100-80", {"prompt_lengths": "2048"}, **given)
        for given in ({}, {"quantization": quantization})
    )
    assert packed.machine.limits == plain.machine.limits
    (before,), (after,) = plain.ttft, packed.ttft
    assert (before.bound, after.bound) == ("compute", "compute")
    assert after.floor_s == before.floor_s


def test_what_a_user_may_set_changes_the_plan(published: Path) -> None:
    def blocks(**given: Any) -> int:
        return plan_of(published, "Qwen3-8B", "L4", device="cuda", **given).memory.num_blocks

    usual = blocks()
    assert blocks(gpu_memory_utilization=0.8) < usual < blocks(gpu_memory_utilization=0.95)
    assert blocks(enforce_eager=True) > usual, "nothing is recorded"
    assert blocks(kv_cache_dtype="fp8") > 1.9 * usual, "a format that the CPU's kernels refuse"
    assert blocks(max_num_batched_tokens=4096) < usual
    assert blocks(num_kv_blocks=100) == 100


def test_a_change_of_device_follows_its_rule(published: Path) -> None:
    """The change starts from a plan for this machine, which has another rule."""
    config = EngineConfig.from_keywords(model=str(published / "Qwen2.5-0.5B"), load_format="dummy", threads=1)
    plan = make_plan(config, PlanOptions(memory=8 * GB, compare="L4"))
    (change,) = [change for change in plan.changes if change.name == "on L4"]
    direct = plan_of(published, "Qwen2.5-0.5B", "L4")
    assert change.outcome is not None
    assert change.outcome.num_blocks == direct.memory.num_blocks
    assert plan.memory.utilization is None
    assert re.search(r"on L4( \(floor\))? +0\.988", " ".join(text_of(plan).split()))


def test_plan_and_engine_have_one_rule(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plan's predictions, the engine's own sizing function gives the plan's blocks."""
    from twostroke.startup import measured_memory, memory

    assert measured_memory.card_memory is memory.card_memory
    asked: list[DeviceMemory] = []
    real = memory.card_memory

    def spy(*given: Any) -> DeviceMemory:
        asked.append(real(*given))
        return asked[-1]

    monkeypatch.setattr(memory, "card_memory", spy)
    plan = plan_of(published, "Qwen3-0.6B", "H100-SXM")
    assert plan.memory.num_blocks == asked[0].default_bytes // plan.memory.kv_bytes_per_block


@pytest.mark.parametrize("seqs", [1, 2])
def test_plan_and_engine_have_one_bound(published: Path, seqs: int) -> None:
    """Memory that requests cannot use is not taken; a size that is given is."""
    plan = plan_of(published, "Qwen3-0.6B", "H100-SXM", max_num_seqs=seqs)
    memory = plan.memory
    assert memory.num_blocks == 2 * seqs * 40_960 // 16
    requests = "1 request" if seqs == 1 else "2 requests"
    limit = f"twice what {requests} of 40,960 tokens can use; the second half holds cached prefixes"
    assert memory.kv_limit == as_json(plan)["kv_limit"] == limit
    assert limit in text_of(plan)
    given = plan_of(published, "Qwen3-0.6B", "H100-SXM", max_num_seqs=seqs, num_kv_blocks=20_000)
    assert (given.memory.num_blocks, given.memory.kv_limit) == (20_000, "")


def test_the_example_of_the_page_about_planning(published: Path) -> None:
    plan = plan_of(published, "Qwen3-0.6B", "H100-SXM", {"price_per_hour": 2.5, "compare": "L4,A100-80"})
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan, console)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    block = page.split("Of the second line's output:")[1].split("```")[1]
    shown = [" ".join(line.split()) for line in block.splitlines() if line.strip()]
    assert len(shown) == 9
    assert [line for line in shown if line not in lines] == []
