"""Whole plans of small models: what is said, as text, JSON and picture, and what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import kv_format_warning
from twostroke.cost.step_cost import MachineLimits
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.engine.event_sinks import read_events
from twostroke.errors import InvalidParameter, SetupError
from twostroke.events import EngineStarted, Event, StepScheduled
from twostroke.planner import machine
from twostroke.planner.after_run import compare, observed_run, observed_step_costs
from twostroke.planner.figure import draw_plan
from twostroke.planner.machine import ObservedRun
from twostroke.planner.options import PlanOptions
from twostroke.planner.plan import Plan, make_plan
from twostroke.planner.report import as_json
from twostroke.planner.show import advice, print_after_run, print_plan
from twostroke.planner.words import binary
from twostroke.startup.preparation import prepare

MEMORY = 1 << 28


def plan_of(model: str, options: dict[str, Any] | None = None, run: ObservedRun | None = None, **given: Any) -> Plan:
    config = EngineConfig.from_keywords(model=model, threads=1, **given)
    return make_plan(config, PlanOptions(**{"memory": MEMORY} | (options or {})), run=run)


def text_of(plan: Plan) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan, console)
    return console.export_text()


def test_a_plan_says_what_changes_would_do() -> None:
    plan = plan_of("embedded", {"device_name": "h100-sxm", "price_per_hour": 3.0})
    changes = {change.name: change for change in plan.changes}
    drafts = "4 drafts, all accepted"
    smaller = ["weights in int8", "weights in int4", "KV in int8", "KV in int4"]
    assert list(changes) == [*smaller, drafts, "on L4", "on A100-80"]
    figures = {name: change.outcome for name, change in changes.items() if change.outcome is not None}
    assert plan.base.weight_bytes > figures["weights in int8"].weight_bytes > figures["weights in int4"].weight_bytes
    assert plan.base.num_blocks < figures["KV in int8"].num_blocks < figures["KV in int4"].num_blocks
    assert plan.base.num_requests < figures["KV in int4"].num_requests
    assert figures["on L4"].tpot_floor_s == pytest.approx(plan.base.tpot_floor_s * 3350 / 300)
    assert changes["on L4"].factor(plan.base, "tpot_floor_s") == pytest.approx(3350 / 300)
    assert plan.base.tpot_floor_s / 5 <= figures[drafts].tpot_floor_s < plan.base.tpot_floor_s / 4, "weights read once"
    assert plan.frontier[0].cost_per_million_tokens == pytest.approx(3 / 3600 * 1e6 * plan.base.tpot_floor_s)
    text = text_of(plan)
    for words in ("on H100-SXM", "published", "KV in int4", "per M tokens", "two pools", "floors of operations"):
        assert words in text


@pytest.mark.parametrize("is_estimate", [False, True])
def test_a_data_sheets_times_are_floors_beside_estimates_of_this_machine(is_estimate: bool) -> None:
    plan = plan_of("embedded", {"compare": "L4,A100-80"})
    limits = replace(plan.machine.limits, is_estimate=is_estimate)
    text = text_of(replace(plan, machine=replace(plan.machine, limits=limits)))
    for name in ("on L4", "on A100-80"):
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        assert line.startswith(f"{name} (floor) ") is is_estimate
    assert ("TPOT estimate" in text) is is_estimate


def test_a_plan_names_the_prompt_lengths_that_it_leaves_out() -> None:
    plan = plan_of("embedded", {"prompt_lengths": "1000000,128"})
    note = "left out: prompts of 1,000,000 tokens; a request has at most 4,096 (--max-model-len)"
    assert note in text_of(plan)
    assert as_json(plan)["too_long_prompts"] == [1_000_000]
    none = plan_of("embedded", {"prompt_lengths": "1000000"})
    assert note in text_of(none)
    assert "prompts, computed alone" not in text_of(none), "a table without a row"


def test_a_plan_says_what_windows_give_back(random_models: dict[str, Path]) -> None:
    """A pool that holds the longest request may be smaller than the KV of all of its tokens."""
    plan = plan_of(str(random_models["mistral"]), {"context": 64}, max_num_batched_tokens=16, block_size=4)
    memory = plan.memory
    longest, held = memory.max_model_len, memory.blocks_for(memory.max_model_len) * memory.kv_bytes_per_block
    num_bytes = longest * memory.kv_bytes_per_token
    assert memory.kinds[0].window is not None
    assert held < num_bytes // 2
    row = f"KV of {longest:,} tokens {num_bytes:,} {binary(num_bytes)}; {binary(held)} of it at once"
    assert row in re.sub(" +", " ", text_of(plan))
    assert "of it at once" not in text_of(plan_of("embedded"))


def test_a_plan_warns_of_kv_in_int4() -> None:
    """The plan warns if int4 is requested, and if it is one of the what-ifs; docs and help have the same figure."""
    assert f"note: {kv_format_warning('int4')}" in text_of(plan_of("embedded", kv_cache_dtype="int4"))
    beside = text_of(plan_of("embedded"))
    assert f"note: {kv_format_warning('int4')}" not in beside
    assert kv_format_warning("int4") in beside.splitlines()
    assert kv_format_warning("int8") is None


def test_the_json_has_the_keys_that_programs_look_for(random_models: dict[str, Path]) -> None:
    plan = plan_of(str(random_models["qwen2"]), {"link_bytes_per_s": 1.0})
    found = json.loads(json.dumps(as_json(plan)))
    names = "weight_bytes kv_bytes_per_token num_blocks max_concurrent_requests max_model_len tpot_floor_s memory_bytes"
    for name in names.split():
        assert found[name] > 0, name
    assert found["kv_bytes_per_token_by_kind"][1] == {
        "window": 24,
        "num_layers": 1,
        "bytes_per_token": found["kv_bytes_per_token"] // 3,
    }
    assert [point["num_prompt_tokens"] for point in found["ttft"]] == [128, 512], "2048 is beyond the context"
    assert found["frontier"][0]["batch"] == 1
    assert found["frontier"][-1]["batch"] == found["most_requests"] <= found["max_num_seqs"]
    assert found["two_pools"]["is_hidden"] is False
    assert found["machine"]["is_published"] is False


def test_measured_steps_are_used_for_this_machine_alone(random_models: dict[str, Path]) -> None:
    steps = StepTimeModel(layers=Curve((1, 512), (0.1, 1.0)), head=Curve((1,), (0.01,)), pair_s=0.0, seen_s=1e-9)
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1, dtype="bfloat16")
    here = make_plan(config, PlanOptions(memory=MEMORY, price_per_hour=1), steps)
    assert here.is_predicted
    assert here.frontier[0].tpot_predicted_s == pytest.approx(0.11, rel=0.01)
    assert here.two_pools is not None
    assert here.two_pools.is_predicted
    assert "predicted" in text_of(here)
    elsewhere = make_plan(config, PlanOptions(device_name="L4"), steps)
    assert not elsewhere.is_predicted
    assert elsewhere.frontier[0].tpot_predicted_s is None


def test_a_change_that_cannot_be_had_says_why(random_models: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(str(random_models["llama"]), {"compare": "none"}, speculative_config={"method": "ngram"})
    why = [line for line in advice(plan) if "not possible" in line]
    assert len(why) == 2
    assert "KV in int8: not possible; kv_cache_dtype='int8': is planned without speculation" in why[0]
    on_floats = plan_of(str(random_models["llama"]), {"compare": "L4"})
    assert any("on L4: not possible" in line and "float32" in line for line in advice(on_floats))


def test_verified_drafts_end_where_a_step_does() -> None:
    wide = plan_of("embedded", {"batch": 3})
    narrow = plan_of("embedded", {"batch": 3}, max_num_batched_tokens=16, max_num_seqs=3)
    assert [point.num_drafts for point in wide.verification] == list(range(9))
    assert [point.num_drafts for point in narrow.verification] == list(range(5)), "3 x (1 + 4) tokens of 16"
    assert "more drafts exceed --max-num-batched-tokens" in text_of(narrow)
    assert "more drafts exceed" not in text_of(wide)
    with pytest.raises(InvalidParameter, match=r"batch=5: is more than the tokens of a step, 4\. Raise --max-num-ba"):
        plan_of("embedded", {"batch": 5}, max_num_batched_tokens=4)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"num_kv_blocks": 600}, "fit: at most 2 do with --num-kv-blocks 600"),
        ({"kv_cache_memory": 600 * 16 * 4608}, f"fit: at most 2 do with --kv-cache-memory {600 * 16 * 4608}"),
        ({}, "fit: at most 12 do at 90% of the card, 14 at 100%"),
    ],
    ids=str,
)
def test_a_size_that_is_given_decides_and_no_share_of_the_card(size: dict[str, int], words: str) -> None:
    text = text_of(
        plan_of("embedded", {"device_name": "L4", "requests": 2, "memory": 400 << 20}, device="cuda", **size)
    )
    assert words in text
    assert ("of the card" in text) is (not size)
    assert ("of them may be in use" in text) is (not size)


def test_ranks_have_a_device_each() -> None:
    alone, both = (plan_of("embedded", {"device_name": "L4"}, tensor_parallel_size=n) for n in (1, 2))
    assert both.memory.memory_bytes == alone.memory.memory_bytes == MEMORY
    assert both.base.tpot_floor_s == pytest.approx(alone.base.tpot_floor_s / 2)
    assert both.memory.kv_bytes_per_token * 2 == alone.memory.kv_bytes_per_token


def test_the_picture(random_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(str(random_models["llama"]))
    path = draw_plan(plan, tmp_path / "frontier.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SetupError, match=r"twostroke\[bench\].*leave --png out"):
        draw_plan(plan, tmp_path / "other.png")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory": 0}, "memory=0"),
        ({"memory": 1 << 60}, "memory="),
        ({"device_name": "H100"}, "Known: T4"),
        ({"compare": "L4,abacus"}, "abacus"),
        ({"price_per_hour": 0}, "price_per_hour=0"),
        ({"price_per_hour": float("nan")}, "price_per_hour=nan"),
        ({"link_bytes_per_s": -1.0}, "link_bytes_per_s=-1"),
        ({"prompt_lengths": "12,x"}, "no whole number"),
        ({"prompt_lengths": "0"}, "has 0"),
        ({"context": 0}, "context=0"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        PlanOptions(**given)


def test_of_a_card_here_all_bytes_are_taken_and_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 80))
    prepared = replace(prepare(EngineConfig.from_keywords(model="embedded")), device=torch.device("cuda"))
    assert machine.memory_here(prepared, None) == (80, 50)
    assert machine.memory_here(prepared, 7) == (7, 0)


def test_a_context_beyond_the_longest_request_is_refused(random_models: dict[str, Path]) -> None:
    with pytest.raises(InvalidParameter, match=r"context=640: must leave a token of the longest request here, 640"):
        plan_of(str(random_models["llama"]), {"context": 640})


@pytest.fixture(scope="module")
def run_of_llama(random_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.events"
    with LLM(str(random_models["llama"]), threads=1, num_kv_blocks=70, max_num_seqs=3, event_log=str(path)) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1 + i] * (5 + 9 * i)} for i in range(5)], params)
    return path


LIMITS = MachineLimits(flops_per_s=1e12, bytes_per_s=3e10)
"""Limits of an ordinary machine."""

SLOW = MachineLimits(flops_per_s=1e5, bytes_per_s=1e6)
"""Limits of a machine that was measured while others were at work: much too low."""


def limits_are(limits: MachineLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give plans these limits: measured ones depend on what else the machine does."""
    monkeypatch.setattr(machine, "measure_machine_limits", lambda *_, **__: limits)


def with_limits(events: list[Event], limits: MachineLimits | None) -> list[Event]:
    """Return the log with these limits of the machine."""
    return [replace(event, machine=limits) if isinstance(event, EngineStarted) else event for event in events]


def test_after_a_run_the_plan_is_held_against_it(
    random_models: dict[str, Path], run_of_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_are(LIMITS, monkeypatch)
    events = with_limits(list(read_events(run_of_llama)), LIMITS)
    run = observed_run(events)
    after = compare(plan_of(str(random_models["llama"]), run=run, num_kv_blocks=70, max_num_seqs=3), events)
    assert [one.error for one in after.sizes] == [0.0] * 4
    assert after.planned == {}, "nothing is calibrated"
    assert [kind.kind for kind in after.beside_floors] == ["decode steps", "steps with prefill"]

    plan = plan_of(str(random_models["llama"]), run=run, num_kv_blocks=80, max_num_seqs=3)
    found = json.loads(json.dumps(as_json(plan, compare(plan, events))))["measured"]
    assert found["sizes"]["num_blocks"] == {"planned": 80, "measured": 70, "error": pytest.approx(1 / 7, abs=1e-5)}
    assert found["times"] == {}
    assert 0 < found["beside_floors"][0]["share"] <= found["beside_floors"][0]["nearest"] <= 1 + 1e-9
    console = Console(record=True, width=120, file=io.StringIO())
    print_after_run(compare(plan, events), console)
    text = console.export_text()
    for words in ("+14.3%", "exact", "no step is faster than its floor", "decode steps"):
        assert words in text


def test_predicted_times_of_a_run_are_those_of_the_step_times(
    random_models: dict[str, Path], run_of_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_are(LIMITS, monkeypatch)
    events = with_limits(list(read_events(run_of_llama)), LIMITS)
    steps = StepTimeModel(layers=Curve((1, 512), (0.25, 0.25)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1)
    after = compare(make_plan(config, PlanOptions(memory=MEMORY), steps), events)
    assert not after.beside_floors
    assert after.planned["itl_p50"] == pytest.approx(0.25)
    assert after.planned["duration_s"] == pytest.approx(0.25 * after.planned["num_steps"], rel=1e-3)


@pytest.mark.parametrize("is_estimate", [False, True])
def test_no_printed_floor_is_above_a_step_of_the_run(
    random_models: dict[str, Path], run_of_llama: Path, monkeypatch: pytest.MonkeyPatch, is_estimate: bool
) -> None:
    limits = replace(SLOW, is_estimate=is_estimate)
    limits_are(limits, monkeypatch)
    events = with_limits(list(read_events(run_of_llama)), limits)
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1, num_kv_blocks=70)
    plan = make_plan(config, PlanOptions(memory=MEMORY), run=observed_run(events))
    seen = observed_step_costs(events)
    assert seen
    assert any(limits.floor_s(step.cost) > step.seconds for step in seen), "the measured limits were passed"
    for step in seen:
        assert plan.machine.limits.floor_s(step.cost) <= step.seconds * (1 + 1e-9)
    after = compare(plan, events)
    assert all(kind.share <= kind.nearest <= 1 + 1e-9 for kind in after.beside_floors)
    assert "raised to what the run shows" in text_of(plan)
    assert ("an estimate, measured while other processes ran" in text_of(plan)) is is_estimate
    assert ("TPOT estimate" in text_of(plan)) is is_estimate
    assert json.loads(json.dumps(as_json(plan)))["machine"]["raised"] == plan.raised
    untouched = make_plan(config, PlanOptions(memory=MEMORY))
    assert untouched.raised == ""
    assert untouched.machine.limits == limits


def test_the_log_of_another_machine_raises_nothing_and_gives_no_ratio(
    random_models: dict[str, Path], run_of_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_are(SLOW, monkeypatch)
    events = with_limits(list(read_events(run_of_llama)), MachineLimits(1e14, 3e12))
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1)
    plan = make_plan(config, PlanOptions(memory=MEMORY), run=observed_run(events))
    after = compare(plan, events)
    assert plan.machine.limits == SLOW
    assert not after.beside_floors
    console = Console(record=True, width=120, file=io.StringIO())
    print_after_run(after, console)
    assert "times are not compared: the log is of another machine (3,000 GB/s there, 0.00100 planned)" in (
        " ".join(console.export_text().split())
    )


def test_predicted_times_are_not_held_against_the_log_of_another_machine(
    random_models: dict[str, Path], run_of_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_are(SLOW, monkeypatch)
    events = with_limits(list(read_events(run_of_llama)), MachineLimits(1e14, 3e12))
    steps = StepTimeModel(layers=Curve((1, 512), (0.25, 0.25)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1)
    after = compare(make_plan(config, PlanOptions(memory=MEMORY), steps), events)
    assert (after.planned, after.measured, after.beside_floors) == ({}, {}, ())
    assert "another machine" in after.why_not


def test_steps_without_a_cost_say_why_there_is_no_table(
    random_models: dict[str, Path], run_of_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_are(LIMITS, monkeypatch)
    events = with_limits(list(read_events(run_of_llama)), LIMITS)
    events = [replace(e, cost=None) if isinstance(e, StepScheduled) else e for e in events]
    after = compare(plan_of(str(random_models["llama"])), events)
    assert after.why_not == "no finished step of the log has a cost"


def test_small_figures_are_not_rounded_to_nothing(random_models: dict[str, Path]) -> None:
    """A tiny model on a large card has times of microseconds, and changes by a factor of a hundred."""
    plan = plan_of("embedded", {"device_name": "B200", "compare": "L4,T4", "memory": None})
    text = text_of(plan)
    assert re.search(r"(?<![\d.,])0\.0+(?![\d])", text) is None, text


def test_the_log_of_another_model_is_refused(random_models: dict[str, Path], run_of_llama: Path) -> None:
    with pytest.raises(InvalidParameter, match="another model"):
        compare(plan_of(str(random_models["qwen2"])), list(read_events(run_of_llama)))
