"""The measurements of a card: their arithmetic on made-up numbers, and all of them on the processors in its place."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from benchmarks.card import machine as machines
from benchmarks.card.arithmetic import (
    Busy,
    Interval,
    decode_claims,
    idle_claims,
    prefill_claims,
    setting_claims,
    throughput_claims,
)
from benchmarks.card.machine import Card, Processors, TracedSteps, Tracer, find_machine, measure_limits, work_in
from benchmarks.card.shapes import QWEN3_8B, TINY, is_alike, write_shape
from benchmarks.claim import Claim, MissingHardware, ReproduceOptions, Reproduction
from benchmarks.reproduce import card
from benchmarks.reproduce.recorded import with_values
from benchmarks.reproduce.run import RESULTS, reproduce
from twostroke.batch import ScheduledBatch
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import StepCost
from twostroke.errors import SetupError
from twostroke.hardware import Hardware
from twostroke.kernels.dispatch import operators_for
from twostroke.measure import report
from twostroke.model.checkpoint import read_model_config
from twostroke.model.registry import num_parameters
from twostroke.startup.cuda_device import CudaFacts

RESULTS_ON_FILE = Path(__file__).parents[3] / "benchmarks" / "results"
COST = StepCost(
    operations=6e12,
    weight_bytes=12e9,
    kv_read_bytes=3.9e9,
    kv_written_bytes=0.1e9,
    intensity=0.0,
    bound="memory",
    seconds=0.0,
)
H200 = CudaFacts(
    torch_version="2.13.0+cu130",
    built_for="13.0",
    failure=None,
    num_devices=1,
    name="NVIDIA H200",
    capability=(9, 0),
    built_architectures=("sm_90",),
)
NO_CARD = CudaFacts(torch_version="2.13.0+cpu", built_for=None, failure=None)


def figure(claims: Sequence[Claim], words: str) -> Claim:
    (found,) = [claim for claim in claims if words in claim.what]
    return found


@pytest.mark.parametrize(("step_s", "holds"), [(0.0049, True), (0.0051, False)])
def test_decode_is_held_against_bytes_over_the_copy_rate(step_s: float, holds: bool) -> None:
    claims = decode_claims(64, step_s, COST, copied_bytes_per_s=4e12)
    share = figure(claims, "share of the bandwidth floor")
    assert share.measured == pytest.approx(0.004 / step_s)  # 16 GB at 4 TB/s
    assert share.holds is holds
    step, rate = figure(claims, "step, ms"), figure(claims, "tokens/s")
    assert (step.measured, step.predicted) == pytest.approx((1e3 * step_s, 4.0))
    assert (rate.measured, rate.predicted) == pytest.approx((64 / step_s, 16_000))


@pytest.mark.parametrize(("ttft_s", "holds"), [(0.019, True), (0.021, False)])
def test_prefill_is_held_against_operations_over_the_matrix_rate(ttft_s: float, holds: bool) -> None:
    claims = prefill_claims(8192, ttft_s, [COST, COST], multiplied_per_s=1e15)
    share = figure(claims, "share of the matrix rate")
    assert share.measured == pytest.approx(0.012 / ttft_s)
    assert share.holds is holds
    assert figure(claims, "TTFT").predicted == pytest.approx(12.0)


def test_busy_is_a_union_however_kernels_overlap() -> None:
    work = [Interval(10.0, 11.0), Interval(10.2, 10.4), Interval(10.9, 12.0), Interval(12.00001, 13.0)]
    work += [Interval(14.0, 15.0)]
    busy = Busy.of(reversed(work), num_steps=2)
    assert busy is not None
    assert busy.busy_s == pytest.approx(2.0 + 0.99999 + 1.0)
    assert busy.span_s == pytest.approx(5.0)
    assert busy.waits_s == pytest.approx(1.0)  # the gap of 10 us is a graph's, not the host's
    assert busy.traced_idle_share == pytest.approx(1.00001 / 5)
    assert busy.traced_wait_share == pytest.approx(1 / 5)
    assert Busy.of([], num_steps=2) is None


@pytest.mark.parametrize(("step_s", "idle", "holds"), [(1.05, 0.05 / 1.05, True), (1.06, 0.06 / 1.06, False)])
def test_idle_is_of_steps_that_no_profiler_slowed(step_s: float, idle: float, holds: bool) -> None:
    busy = Busy(num_steps=10, busy_s=10.0, span_s=20.0, waits_s=9.0)
    claims = idle_claims(64, busy, step_s)
    judged = figure(claims, "nothing runs")
    assert judged.measured == pytest.approx(idle)
    assert judged.holds is holds
    assert figure(claims, "traced steps").measured == pytest.approx(0.5)
    assert figure(claims, "20 us").measured == pytest.approx(0.45)
    assert busy.idle_share(0.5) == 0.0


@pytest.mark.parametrize(("theirs", "holds"), [(499.0, True), (501.0, False)])
def test_throughput_is_twice_transformers(theirs: float, holds: bool) -> None:
    (claim,) = throughput_claims(64, 1000.0, theirs)
    assert claim.holds is holds


def test_settings_are_reported_with_and_without_a_default() -> None:
    ratio, time_ms = setting_claims("graphs off", "decode, batch 64", 0.02, 0.01)
    assert (ratio.measured, time_ms.measured, ratio.holds) == (0.5, 20.0, None)
    assert setting_claims("graphs off", "decode, batch 64", 0.02, None) == (time_ms,)


def test_the_large_shape_is_qwen3_8b(tmp_path: Path) -> None:
    config = read_model_config(write_shape(tmp_path / "large", QWEN3_8B))
    assert num_parameters(config) == 8_190_735_360  # as published
    assert (config.ropes[0][0].theta, config.norm_eps, config.tie_word_embeddings) == (1e6, 1e-6, False)
    assert is_alike(config, QWEN3_8B)
    tiny = read_model_config(write_shape(tmp_path / "tiny", TINY))
    assert is_alike(tiny, TINY)
    assert not is_alike(tiny, QWEN3_8B)
    assert not is_alike(replace(config, dtype="float32"), QWEN3_8B)


@pytest.mark.parametrize(("name", "changes"), card.SETTINGS, ids=[name for name, _ in card.SETTINGS])
def test_settings_are_of_the_configs(name: str, changes: dict[str, Any]) -> None:
    load, scheduler = with_values(changes, LoadConfig(device="cuda"), SchedulerConfig())
    given = {**asdict(load), **asdict(scheduler)}
    assert {key: given[key] for key in changes} == changes, name
    before = {**asdict(LoadConfig(device="cuda")), **asdict(SchedulerConfig())}
    assert {key for key in given if given[key] != before[key]} == set(changes)


def test_a_setting_that_nobody_has_is_an_error() -> None:
    with pytest.raises(AssertionError, match="enforce_eagre"):
        with_values({"enforce_eagre": True}, LoadConfig(), SchedulerConfig())


def test_what_is_missing_for_a_card_is_said() -> None:
    assert isinstance(find_machine(needs_card=False, facts=NO_CARD), Processors)
    with pytest.raises(MissingHardware, match=r"--full .*NVIDIA GPU.*built for CPUs only.*Without --full") as error:
        find_machine(needs_card=True, facts=NO_CARD)
    assert "--device" not in str(error.value)
    no_driver = replace(H200, failure="Found no NVIDIA driver on your system. Please check")
    with pytest.raises(MissingHardware, match="no NVIDIA driver"):
        find_machine(needs_card=True, facts=no_driver)


def test_a_card_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.hardware._driver_version", lambda: "570.124.06")
    for needs_card in (False, True):
        found = find_machine(needs_card=needs_card, facts=H200)
        assert isinstance(found, Card)
        hardware = found.hardware()
        assert (hardware.card, hardware.driver, hardware.cuda) == ("NVIDIA H200", "570.124.06", "13.0")
        assert hardware.triton is not None
        assert hardware.as_json() == asdict(hardware)


def test_results_of_before_are_still_readable() -> None:
    known = {field.name for field in fields(Hardware)}
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(RESULTS_ON_FILE.glob("*.json"))}
    paths = [path for path, text in texts.items() if '"hardware"' in text and '"bench"' in text]
    assert len(paths) > 20
    for path in paths:
        given = report.load(path).hardware
        assert set(given) <= known, path.name
        assert (Hardware(**given).card is None) == (path.stem != "card")


def test_a_card_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    elapsed_ms = iter([7.0, 5.0, 6.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, _: Any) -> float:
            return next(elapsed_ms)

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert Card(H200).best_s(lambda: calls.append("work"), 3) == 0.005
    assert calls == ["work", "work", *["record", "work", "record", "wait"] * 3]


def test_limits_are_rates() -> None:
    limits = measure_limits(Processors(), torch.float32)
    assert 1e8 < limits.bytes_per_s < 1e13
    assert 1e7 < limits.flops_per_s < 1e14


def test_of_a_trace_the_works_of_the_device_count() -> None:
    def event(category: str, ts: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "ts": ts, "dur": 2.0}

    names = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime", "cpu_op")
    trace = {"traceEvents": [event(name, 10.0 * i) for i, name in enumerate(names)] + [{"ph": "M", "name": "x"}]}
    assert [round(1e6 * work.begin_s) for work in work_in(trace, Card.traced)] == [0, 10, 20]
    assert [round(1e6 * work.begin_s) for work in work_in(trace, Processors.traced)] == [50]


def test_the_profiler_sees_work_between_start_and_stop() -> None:
    tracer = Tracer(Processors())
    tracer.start()
    torch.ones(64, 64).sum()
    work = tracer.stop()
    assert work
    assert all(interval.end_s >= interval.begin_s for interval in work)


class FakeTracer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> list[Interval]:
        self.calls.append("stop")
        return [Interval(0.0, 1.0)]


def batches(traced: TracedSteps, calls: list[str], num_decodes: Sequence[int], num_prefill: int = 0) -> None:
    for n in num_decodes:
        traced(cast(ScheduledBatch, SimpleNamespace(num_prefill_tokens=num_prefill, num_decode_tokens=n)))
        calls.append("step")


def traced_by(tracer: FakeTracer) -> TracedSteps:
    return TracedSteps(cast(Tracer, tracer))


def test_whole_steps_of_one_kind_are_traced() -> None:
    tracer = FakeTracer()
    traced = traced_by(tracer)
    batches(traced, tracer.calls, [4] * 20)  # no profile was requested
    assert "start" not in tracer.calls
    tracer.calls.clear()
    traced.arm(4, 3)
    batches(traced, tracer.calls, [4] * 5, num_prefill=7)
    batches(traced, tracer.calls, [3, 2])
    assert "start" not in tracer.calls
    tracer.calls.clear()
    batches(traced, tracer.calls, [4] * traced.num_outputs(3))
    assert tracer.calls == [*["step"] * 8, "start", *["step"] * 3, "stop", "step"]
    assert traced.take() == Busy(num_steps=3, busy_s=1.0, span_s=1.0, waits_s=0.0)
    batches(traced, tracer.calls, [4] * 20)
    assert tracer.calls.count("start") == 1


def test_a_run_that_ends_early_leaves_no_profiler_on() -> None:
    tracer = FakeTracer()
    traced = traced_by(tracer)
    traced.arm(4, 3)
    batches(traced, tracer.calls, [4] * 10)
    assert traced.take() is None
    assert tracer.calls.count("stop") == 1


def run_small(tmp_path: Path, **changes: Any) -> tuple[Reproduction, dict[str, Any]]:
    options = ReproduceOptions(threads=1, results=tmp_path, plots=False, **changes)
    (found,) = reproduce(["card"], options, Console(quiet=True))
    (path,) = tmp_path.glob("card*-small.json")
    return found, json.loads(path.read_text())


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "cuda_facts", lambda: NO_CARD)


class FakePeer:
    """Transformers takes seconds to start; it has a test of its own."""

    version, attention = "5.0", "sdpa"

    def __init__(self, *_: Any) -> None:
        pass

    def best_s(self, prompts: Sequence[Any], max_tokens: Sequence[int], num_slots: int, rounds: int) -> float:
        assert len(prompts) == len(max_tokens) == card.SMALL.requests
        assert (num_slots, rounds) == (card.SMALL.batch, card.SMALL.repeats)
        return 1.0

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("no_card")
def test_everything_runs_on_the_processors_with_transformers(tmp_path: Path) -> None:
    found, saved = run_small(tmp_path)
    assert found.holds
    assert all(claim.holds is None and claim.rule == "reported" for claim in found.claims)
    assert all(claim.measured >= 0 for claim in found.claims)
    names = " | ".join(claim.what for claim in found.claims)
    for words in (
        "decode, batch 1: share of the bandwidth floor",
        "decode, batch 8: share of the bandwidth floor",
        "prefill of 64 tokens: share of the matrix rate",
        "idle, batch 8: share of a step in which nothing runs",
        "ours / transformers' continuous batching",
        "asynchronous scheduling off: decode, batch 8",
        "kernels=reference: decode, batch 8",
        "kernels=reference: prefill of 64 tokens: the default's time / this one's",
    ):
        assert words in names
    assert "no card" in found.remarks[0]
    no_graphs, no_invariance = found.remarks[1:]
    assert no_graphs.startswith("graphs off: not measured. enforce_eager=true: changes nothing with device=cpu")
    assert no_invariance.startswith("not batch-invariant: not measured. batch_invariant=false: applies to GPUs")
    assert "card" not in saved["hardware"]
    assert saved["config"]["kernels"] == operators_for(torch.device("cpu"), torch.bfloat16).name
    assert saved["config"]["load"]["model"] == "a tiny shape"
    assert saved["config"]["transformers"]["version"]
    assert saved["results"]["limits"]["bytes_per_s"] > 0
    assert str(tmp_path) not in json.dumps(saved)


@pytest.mark.usefixtures("no_card")
def test_of_a_folder_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "TransformersBatching", FakePeer)
    monkeypatch.setattr(card, "SETTINGS", ())
    folder = write_shape(tmp_path / "two-heads", {**TINY, "num_attention_heads": 2})
    found, saved = run_small(tmp_path, model=str(folder))
    assert saved["config"]["load"]["model"] == "two-heads"
    assert saved["config"]["load"]["load_format"] == "dummy"
    tokens = sum(
        claim.measured for claim in found.claims if claim.what == "throughput of transformers, 8 slots: tokens/s"
    )
    ours = figure(found.claims, "throughput, 8 slots: tokens/s").measured
    assert figure(found.claims, "ours / transformers'").measured == pytest.approx(ours / tokens)


@pytest.mark.usefixtures("no_card")
def test_a_part_that_fails_does_not_take_the_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise SetupError("the comparison needs transformers.")

    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(card, "TransformersBatching", absent)
    monkeypatch.setattr(card, "measure_prefill", broken)
    monkeypatch.setattr(card, "SETTINGS", (("of a checkpoint", {"quantization": "awq"}),))
    found, saved = run_small(tmp_path)
    assert any("decode, batch 8" in claim.what for claim in found.claims)
    assert figure(found.claims, "prefill: came to its end").holds is False
    assert not found.holds
    assert not saved["results"]["holds"]
    remarks = " | ".join(found.remarks)
    assert "transformers: not measured. the comparison needs transformers." in remarks
    assert "prefill: not measured. RuntimeError: an illegal memory access" in remarks
    assert "of a checkpoint: not measured. load_format='dummy': random weights" in remarks
    assert not [claim for claim in found.claims if "of a checkpoint" in claim.what or "transformers" in claim.what]


@pytest.mark.usefixtures("no_card")
def test_what_no_time_is_left_for_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "SMALL", replace(card.SMALL, limit_s=-1.0))
    options = ReproduceOptions(threads=1, results=tmp_path, plots=False)
    found = card.reproduce(options)
    assert not found.claims
    assert sum("left out" in remark for remark in found.remarks) == 2 + len(card.SETTINGS)


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(card, "measure_prefill", interrupted)
    options = ReproduceOptions(threads=1, results=tmp_path, plots=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        found = card.reproduce(options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert any(claim.what.startswith("decode, batch 1") for claim in found.claims)
    assert not any("prefill" in claim.what for claim in found.claims)
    assert "interrupted after" in found.remarks[-1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("no_card")
def test_full_is_refused_without_a_card_and_left_out_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ReproduceOptions(full=True, results=tmp_path, plots=False)
    with pytest.raises(MissingHardware, match="built for CPUs only"):
        reproduce(["card"], options, Console(quiet=True))
    monkeypatch.setattr("benchmarks.reproduce.run.RESULTS", {"card": RESULTS["card"]})
    console = Console(record=True, width=300, file=io.StringIO())
    assert reproduce(["all"], options, console) == []
    assert "card: left out. --full measures an NVIDIA GPU" in console.export_text()


def test_without_a_model_nothing_is_measured(tmp_path: Path) -> None:
    (found,) = reproduce(["card"], ReproduceOptions(with_model=False, results=tmp_path), Console(quiet=True))
    assert not found.claims


def full_machine(*, needs_card: bool) -> Processors:
    assert needs_card
    return Processors()


def test_goals_are_claimed_at_full_size_of_the_large_shape_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full run with everything small in its place."""
    monkeypatch.setattr(card, "TransformersBatching", FakePeer)
    monkeypatch.setattr(card, "SETTINGS", ())
    monkeypatch.setattr(card, "FULL", card.SMALL)
    monkeypatch.setattr(card, "find_machine", full_machine)
    options = ReproduceOptions(full=True, threads=1, results=tmp_path, model=str(write_shape(tmp_path / "m", TINY)))
    other = card.reproduce(options)
    assert {claim.rule for claim in other.claims} == {"reported"}
    monkeypatch.setattr(card, "QWEN3_8B", TINY)
    (found,) = reproduce(["card"], replace(options, model="embedded"), Console(quiet=True))
    rules = [claim.rule for claim in found.claims if claim.rule != "reported"]
    assert rules == [">= 0.8", ">= 0.8", ">= 0.6", "<= 0.05", ">= 2"]
    saved = report.load(tmp_path / "card.json")
    assert saved.command == "python -m benchmarks reproduce card --full --threads 1"
    assert (tmp_path / "card.png").stat().st_size > 0
