"""Benchmarks that need a model, at sizes of a second on a tiny random one. Counters are checked, times never."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.claim import ReproduceOptions, Reproduction
from benchmarks.reproduce import caches as r14_no_cache
from benchmarks.reproduce import long_prompt, r1_batching, r10_prefix_cache, vs_transformers
from benchmarks.reproduce import prices as invariance_price
from benchmarks.reproduce import step_times as engine_time
from benchmarks.reproduce.run import reproduce
from twostroke.cli.bench import app as bench_app
from twostroke.cli.flags import LoadFromFlags
from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.kernels.dispatch import operators_for
from twostroke.measure import report
from twostroke.measure.offline import OfflineOptions, print_summary, run_offline
from twostroke.measure.workload import Lengths


@pytest.fixture
def model(random_models: dict[str, Path]) -> str:
    return str(random_models["llama"])


def _reproduce(name: str, model: str, tmp_path: Path, **changes: Any) -> Reproduction:
    options = ReproduceOptions(model=model, threads=1, results=tmp_path, traces=tmp_path, **changes)
    (found,) = reproduce([name], options, Console(quiet=True))
    for claim in found.claims:
        if claim.rule == "equal":
            assert claim.holds, claim
    return found


def test_offline_saves_what_it_measured(model: str, tmp_path: Path) -> None:
    options = OfflineOptions(
        num_requests=12,
        prompt_lengths="uniform:4:40",
        output_lengths="exponential:8",
        num_prefix_groups=2,
        prefix_length=32,
        price_per_hour=3.6,
        results=tmp_path,
    )
    result = run_offline(
        options, LoadConfig(model=model, threads=1, max_model_len=256), SchedulerConfig(max_num_seqs=4)
    )
    saved = json.loads((tmp_path / "offline.json").read_text())
    assert saved["results"]["num_requests"] == 12
    assert saved["results"]["latency"]["ttft_s"]["count"] == 12
    assert saved["config"]["scheduler"]["max_num_seqs"] == 4
    assert saved["workload"]["prefix_length"] == 32
    # two groups of six: all but those that ran beside the first of their group find its 32 tokens
    assert saved["results"]["num_cached_tokens"] >= 6 * 32
    assert set(saved["results"]["own_time_s"]) <= {"1", "2", "3", "4"}
    cost, rates = saved["results"]["cost"], saved["results"]["throughput"]
    assert cost["per_million_output_tokens"] == pytest.approx(1000 / rates["output_tok_s"])
    num_output_tokens = rates["output_tok_s"] * saved["results"]["duration_s"]
    share = num_output_tokens / (saved["workload"]["prompt_tokens"] + num_output_tokens)
    assert cost["per_million_tokens"] == pytest.approx(cost["per_million_output_tokens"] * share)
    assert "--price-per-hour 3.6" in saved["command"]
    assert (tmp_path / "offline.png").stat().st_size > 0
    console = Console(width=200, record=True, file=io.StringIO())
    print_summary(result.results, console)
    assert "(at 3.6 per hour)" in console.export_text()


def test_offline_runs_a_trace_in_open_loop(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1000, "output_length": 128, "hash_ids": [0, i + 1]} for i in range(3)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    options = OfflineOptions(trace=trace, time_divisor=1.0, warmup=0, results=tmp_path, plots=False, name="traced")
    load, cache = LoadConfig(model=model, threads=1, max_model_len=64), CacheConfig(block_size=8)
    result = run_offline(options, load, cache=cache)
    assert result.results["duration_s"] >= 0.2  # the last one arrives then
    assert result.results["num_cached_tokens"] % 8 == 0
    assert report.load(tmp_path / "traced.json").workload["divisor"] == 64


TRACE = {"trace": Path("trace.jsonl")}


@pytest.mark.parametrize(
    "bad",
    [
        {"warmup": -1},
        {"price_per_hour": 0},
        {"price_per_hour": -2.5},
        {"price_per_hour": float("inf")},
        {"price_per_hour": True},
        {"price_per_hour": "2.5"},
        {"num_requests": -5},
        {"num_requests": -5} | TRACE,
        {"seed": -1},
        {"seed": 2**32},
        {"request_rate": 1e-300},
        {"request_rate": 0.0},
        {"request_rate": float("inf")},
        {"num_prefix_groups": -1},
        {"num_prefix_groups": -1, "prefix_length": 5},
        {"prefix_length": -3},
        {"prefix_length": 3},
        {"prompt_lengths": "fixed:99999999999999999999"},
        {"prompt_lengths": "fixed:²"},
        {"output_lengths": "uniform:1:99999999999999999999"},
        {"output_lengths": "exponential:" + "9" * 400},
        {"output_lengths": "exponential:nan"},
        {"name": "../x"},
        {"name": ""},
        {"name": ".."},
        {"name": ".hidden"},
        {"name": "a\0b"},
        {"name": "x" * 201},
        {"time_divisor": -1.0} | TRACE,
        {"time_divisor": float("nan")} | TRACE,
        {"time_divisor": 1e-300} | TRACE,
        {"time_divisor": 2.0},
        {"trace_divisor": 32},
        {"request_rate": 2.0} | TRACE,
        {"prompt_lengths": "fixed:3"} | TRACE,
        {"output_lengths": "fixed:3"} | TRACE,
        {"num_prefix_groups": 2} | TRACE,
        {"prefix_length": 2} | TRACE,
        {"seed": 1} | TRACE,
    ],
    ids=ascii,
)
def test_offline_options_that_crash_or_change_nothing_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        OfflineOptions(**bad)
    assert refusal.value.name in {*bad, "prefix_length"}
    assert refusal.value.limit


def test_a_result_says_how_to_get_it_again(model: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1]}')
    options = OfflineOptions(trace=tmp_path / "trace.jsonl", time_divisor=2.5, results=tmp_path, plots=False, warmup=0)
    load = LoadFromFlags(model=model, threads=1, event_log=tmp_path / "log.jsonl")
    run_offline(options, load, SchedulerConfig(enable_chunked_prefill=False), CacheConfig(num_kv_blocks=90))
    text = (tmp_path / "offline.json").read_text()
    saved = json.loads(text)
    name = Path(model).name
    flags = f"--trace trace.jsonl --time-divisor 2.5 --warmup 0 --no-plots --model {name} --threads 1"
    flags += " --event-log log.jsonl --no-enable-chunked-prefill --num-kv-blocks 90"
    assert saved["command"] == f"twostroke bench offline {flags}"
    assert saved["config"]["load"]["model"] == name
    assert str(tmp_path) not in text
    assert str(Path(model).parent) not in text
    _, bound, _ = bench_app.parse_args(saved["command"].split()[2:])
    assert bound.arguments["options"] == replace(options, trace=Path("trace.jsonl"), results=report.DEFAULT_FOLDER)
    assert bound.arguments["load"] == replace(load, model=name, event_log=Path("log.jsonl"))
    assert bound.arguments["scheduler"] == SchedulerConfig(enable_chunked_prefill=False)
    assert bound.arguments["cache"] == CacheConfig(num_kv_blocks=90)


@pytest.mark.parametrize("folder", ["/proc/none", "/dev/null"])
def test_results_that_could_not_be_saved_are_not_measured(folder: str, model: str) -> None:
    with pytest.raises(InvalidParameter, match="results="):
        run_offline(OfflineOptions(results=Path(folder)), LoadConfig(model="/no/such/model"))
    with pytest.raises(InvalidParameter, match="results="):
        reproduce(["r2"], ReproduceOptions(results=Path(folder)), Console(quiet=True))


def test_offline_refuses_a_workload_that_cannot_fit(model: str, tmp_path: Path) -> None:
    options = OfflineOptions(prompt_lengths="fixed:4000", results=tmp_path)
    with pytest.raises(InvalidParameter, match="no request fits a context of 640"):
        run_offline(options, LoadConfig(model=model))


def test_r1_wall_time_has_a_prediction(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r1_batching, "SLOTS", (2,))
    monkeypatch.setattr(r1_batching, "LENGTHS", {"exponential": Lengths.exponential(6)})
    monkeypatch.setattr(r1_batching, "GROUPS", {"exponential": {2: 40}})
    found = _reproduce("r1", model, tmp_path)
    (wall,) = found.details["wall"].values()
    assert wall["predicted"] > 0
    assert wall["measured_s"].keys() == {"static", "continuous"}


def test_r10_times_first_tokens(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r10_prefix_cache, "SMALL", 5)
    row = {"timestamp": 0, "input_length": 2000, "output_length": 64, "hash_ids": [0, 1, 2, 3]}
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join([json.dumps(row)] * 5))
    found = _reproduce("r10", model, tmp_path)
    tokens = found.details["conversation-ttft"]["computed_tokens"]
    # 32 tokens each (2000 / 64); four requests find three of four blocks
    assert tokens == {"without": 5 * 32, "with": 5 * 32 - 4 * 24}


def test_r11_finds_nothing(model: str, tmp_path: Path) -> None:
    found = _reproduce("r11", model, tmp_path)
    assert found.claims[0].measured == 0


def test_r14_counts_on_the_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r14_no_cache, "PROMPT", 20)
    monkeypatch.setattr(r14_no_cache, "OUTPUT", 8)
    found = _reproduce("r14", model, tmp_path)
    assert found.details["token_passes"] == {"without": sum(range(20, 28)), "with": 27}
    assert len([c for c in found.claims if "on the model" in c.what]) == 2


def test_engine_time_separates_deciding(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_time, "SIZES", (1, 4))
    found = _reproduce("engine-time", model, tmp_path)
    assert set(found.details["own_ms"]) == {"1", "4"}


def test_long_prompt_watches_memory(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompt, "BUDGET", 256)
    found = _reproduce("long-prompt", model, tmp_path)
    # the kernel counts resident pages in batches, so the two may disagree by some
    assert found.details["peak_bytes"] > found.details["resident_before_bytes"] - (8 << 20) > 0
    assert found.details["kv_bytes"] > 0
    served = found.details["served"]
    assert served["engine_growth_bytes"] > 0
    assert served["ttft_long_s"] > 0


def test_transformers_runs_beside(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vs_transformers, "BATCH", 4)
    found = _reproduce("vs-transformers", model, tmp_path)
    assert found.config["attention"] in ("eager", "sdpa")
    assert [claim.holds for claim in found.claims] == [None] * 3  # goals are for the embedded model
    saved = json.loads((tmp_path / f"vs-transformers-{Path(model).name}-small.json").read_text())
    assert saved["config"]["kernels"] == operators_for(torch.device("cpu"), torch.bfloat16).name


def test_the_price_of_invariance_is_reported_for_every_shape(model: str, tmp_path: Path) -> None:
    found = _reproduce("invariance-price", model, tmp_path)
    assert len(found.claims) == len(invariance_price.ROWS) + len(invariance_price.CONTEXTS)
    assert all(claim.measured > 0 and claim.holds is None for claim in found.claims)
    assert not _reproduce("invariance-price", model, tmp_path, with_model=False).claims


def test_r5_measures_budgets_and_predicts_them(model: str, tmp_path: Path) -> None:
    found = _reproduce("r5", model, tmp_path)
    names = {claim.what for claim in found.claims}
    assert {"p99 ITL ms, unchunked", "TTFT ms, budget 64", "p99 ITL ms, itl_slo 4x"} <= names
    assert all(claim.predicted for claim in found.claims if claim.what.startswith(("p99 ITL ms, b", "TTFT ms, b")))


def test_r6_measures_all_four(model: str, tmp_path: Path) -> None:
    found = _reproduce("r6", model, tmp_path)
    assert {"median TTFT ms, both", "p99 ITL ms, chunked"} <= {claim.what for claim in found.claims}
