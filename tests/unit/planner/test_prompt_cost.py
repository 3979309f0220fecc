"""Cost of a prompt: its tokens as the engine counts them, its KV, its times and its price."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import InvalidParameter, InvalidPrompt
from twostroke.planner import machine
from twostroke.planner.options import PlanOptions
from twostroke.planner.plan import Plan, make_plan
from twostroke.planner.prompt_cost import PromptCost
from twostroke.planner.report import as_json
from twostroke.planner.show import print_plan

TEXT = "def fibonacci(n):\n    return"


def plan_of(steps: StepTimeModel | None = None, model: str = "embedded", **asked: Any) -> Plan:
    options = PlanOptions(**{"device_name": None if steps else "L4", "compare": "none", **asked})
    return make_plan(EngineConfig.from_keywords(model=model, threads=1), options, steps)


def cost_of(plan: Plan) -> PromptCost:
    assert plan.prompt is not None
    return plan.prompt


def text_of(plan: Plan) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan, console)
    return console.export_text()


def test_the_count_is_that_of_an_engine() -> None:
    with LLM("embedded", threads=1, num_kv_blocks=64) as llm:
        (answer,) = llm.generate([TEXT], SamplingParams(max_tokens=1))
        (chat,) = llm.chat([{"role": "user", "content": TEXT}], SamplingParams(max_tokens=1))
    assert cost_of(plan_of(prompt=TEXT)).num_prompt_tokens == len(answer.prompt_token_ids)
    assert cost_of(plan_of(prompt=TEXT, chat=True)).num_prompt_tokens == len(chat.prompt_token_ids)


def test_kv_and_price_are_those_of_its_tokens() -> None:
    plan = plan_of(prompt=TEXT, max_tokens=100, price_per_hour=36.0)
    found = cost_of(plan)
    memory = plan.memory
    assert found.kv_bytes == found.num_prompt_tokens * 2 * 9 * 128 * 2 == found.num_prompt_tokens * 4608
    assert found.kv_block_bytes == -(-(found.num_prompt_tokens + 100) // 16) * memory.kv_bytes_per_block
    assert found.price == pytest.approx(0.01 * found.total_s)
    assert found.basis == "floor"
    longer = cost_of(plan_of(prompt=TEXT, max_tokens=200, price_per_hour=36.0))
    assert longer.total_s > found.total_s > found.ttft_floor_s
    assert longer.num_prompt_tokens == found.num_prompt_tokens


def test_measured_steps_predict_its_time() -> None:
    steps = StepTimeModel(layers=Curve((1, 512), (0.1, 0.1)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
    found = cost_of(plan_of(steps, prompt=TEXT, max_tokens=11, price_per_hour=3600.0, memory=1 << 28))
    assert found.ttft_predicted_s == pytest.approx(0.1)
    assert found.total_s == pytest.approx(1.1)
    assert found.price == pytest.approx(1.1)
    assert found.basis == "calibrated"


def test_it_is_said_as_text_and_as_json() -> None:
    plan = plan_of(prompt=TEXT, price_per_hour=2.0)
    text = text_of(plan)
    for words in (f"{cost_of(plan).num_prompt_tokens} tokens", "bytes of KV", "TTFT", "price", "(floor)"):
        assert words in text
    told = json.loads(json.dumps(as_json(plan)))["prompt"]
    assert told["num_prompt_tokens"] == cost_of(plan).num_prompt_tokens
    assert told["basis"] == "floor"
    assert told["max_tokens"] == told["asked_max_tokens"]
    assert "is cut to" not in text
    assert as_json(plan_of())["prompt"] is None


@pytest.mark.parametrize(("is_estimate", "word"), [(False, "floor"), (True, "estimate")])
def test_a_time_is_a_floor_unless_others_were_at_work(
    monkeypatch: pytest.MonkeyPatch, *, is_estimate: bool, word: str
) -> None:
    limits = MachineLimits(1e11, 1e10, is_estimate)
    monkeypatch.setattr(machine, "_measured", lambda *_: limits)
    plan = plan_of(prompt=TEXT, device_name=None, memory=1 << 28)
    text = text_of(plan)
    assert (cost_of(plan).basis, cost_of(plan).is_estimate) == (word, is_estimate)
    assert f"({word}), alone on the machine" in text
    assert f"TTFT {word}" in text  # of the table, by the same word


def test_output_that_the_model_has_no_room_for_is_said_to_be_cut() -> None:
    plan = plan_of(prompt=TEXT, max_tokens=5000)
    found = cost_of(plan)
    assert (found.max_tokens, found.asked_max_tokens) == (4096 - found.num_prompt_tokens, 5000)
    words = f"--max-tokens 5,000 is cut to {found.max_tokens:,}: prompt and output together have at most 4,096 tokens"
    assert words in text_of(plan)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert cost_of(plan_of(prompt=f"@{path}")) == cost_of(plan_of(prompt=TEXT))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": "@/nowhere/at/all"}, r"cannot be read \(No such file.*@@ for a prompt"),
        ({"prompt": "@~nobodyxyz/f"}, r"cannot be read \(Could not determine home directory\).*@@ for a prompt"),
        ({"chat": True}, "chat=true: changes nothing without a prompt. Give --prompt"),
        ({"max_tokens": 3}, "max_tokens=3: changes nothing without a prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens=0"),
        ({"prompt": ""}, "prompt"),
        ({"requests": 0}, "requests=0"),
        ({"batch": 0}, "batch=0"),
        ({"batch": 65, "context": 9}, r"batch=65: is more than run at once, 64\. Raise --max-num-seqs"),
        ({"batch": 100_000}, r"batch=100000: does not fit: at most \d+ requests of 1024 tokens do"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_what_would_do(given: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidParameter, InvalidPrompt), match=words):
        plan_of(memory=1 << 28, **given)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(InvalidParameter, match=r"no text in UTF-8 \(byte 2\)"):
        plan_of(prompt=f"@{tmp_path / 'bytes'}")


def test_a_prompt_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(InvalidPrompt, match=r"max_model_len 4096 it may have 4095.*Shorten it"):
        plan_of(prompt="a b " * 5000)


def test_a_chat_without_a_template_is_refused(random_models: dict[str, Path]) -> None:
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), dtype="bfloat16", threads=1)
    options = PlanOptions(prompt="hello", chat=True, device_name="L4", compare="none")
    with pytest.raises(InvalidPrompt, match="chat template"):
        make_plan(config, options)
