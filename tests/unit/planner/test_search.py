"""`twostroke plan --search` on the embedded model: workloads, candidates, output and refusals."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from published_models import write_published
from timed_engine import history
from traces import conversations, write_trace
from twostroke.cli.main import app
from twostroke.config.engine import EngineConfig
from twostroke.cost.calibration import Calibration, Timing
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import DoesNotFit, InvalidParameter
from twostroke.event_codec import to_json
from twostroke.measure.workload import with_arrivals, workload_of_lengths
from twostroke.planner import memory, search, trace_replay, worker_kinds
from twostroke.planner.memory import MemoryPlan, plan_memory
from twostroke.planner.options import PlanOptions, SearchOptions, TraceOptions
from twostroke.planner.search import SearchResult, search_placement
from twostroke.planner.show_search import conclusions, print_search, searched_json
from twostroke.planner.words import significant
from twostroke.simulation.settings import WhatIf
from twostroke.startup.prepared import Prepared

SLOW = StepTimeModel(
    layers=Curve((1, 16, 512), (0.020, 0.022, 0.420)), head=Curve((1, 64), (0.002, 0.006)), pair_s=5e-8, seen_s=1e-7
)
FEW: dict[str, Any] = {
    "search": True,
    "num_requests": 20,
    "budgets": "64,256",
    "rate_factors": "0.5,1,2,4",
    "max_workers": 2,
}


def calibration(threads: int, model: str = "embedded", **given: Any) -> Calibration:
    """Signals of a machine whose steps take SLOW."""
    return Calibration(
        model=model,
        load={"threads": threads, "tensor_parallel_size": 1} | given,
        machine={},
        context_tokens=0,
        most_drafts=1,
        step_s=(Timing(1, 1.0), Timing(2, 1.0)),
        step_times=SLOW,
    )


def searched(plan: PlanOptions | None = None, load: dict[str, Any] | None = None, **given: Any) -> SearchResult:
    config = EngineConfig.from_keywords(**{"model": "embedded", "threads": 1} | (load or {}))
    plan = plan or PlanOptions(memory=1 << 28, link_bytes_per_s=1e9)
    return search_placement(config, plan, SearchOptions(**FEW | given))


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a machine of four cores with a calibration of one thread."""
    monkeypatch.setattr(worker_kinds, "find_calibration", lambda *_: (calibration(1), "calibrated: a.json"))
    monkeypatch.setattr(search, "usable_processors", lambda: 4)


def text_of(found: SearchResult, width: int = 200) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    print_search(found, console)
    return console.export_text()


LONG_PROMPTS: dict[str, Any] = {"request_rate": 1.5, "input_len": "400", "output_len": "uniform:20:60"}


@pytest.mark.usefixtures("calibrated")
def test_a_split_wins_where_prompts_stand_in_the_way_of_tokens() -> None:
    """A decode beside 64 prompt tokens takes 60 ms and more, alone 24 ms: one process cannot keep 40 ms."""
    found = searched(**LONG_PROMPTS, ttft_target_s=2.5, tpot_target_s=0.040)
    winner = found.ranking.places[0]
    assert (winner.candidate.prefill, winner.candidate.decode) == (1, 1)
    assert winner.best is not None
    assert winner.best.tpot.p99_s <= 0.040
    assert found.ranking.unsplit is None
    assert "the split pays: no single process keeps the limits" in conclusions(found)


@pytest.mark.usefixtures("calibrated")
def test_one_process_wins_where_limits_are_wide_and_says_so() -> None:
    found = searched(**LONG_PROMPTS, ttft_target_s=30.0, tpot_target_s=1.0)
    winner = found.ranking.places[0]
    assert not winner.candidate.is_split
    assert found.ranking.unsplit == winner
    assert "the split does not pay: one process carries more requests per core" in text_of(found)
    assert winner.candidate.num_devices == 1


@pytest.mark.usefixtures("calibrated")
def test_the_same_search_twice_says_the_same() -> None:
    plan = PlanOptions(memory=1 << 28, price_per_hour=0.4)
    first, again = (searched(plan, **LONG_PROMPTS, ttft_target_s=3.0, tpot_target_s=0.2) for _ in range(2))
    told = searched_json(first)
    assert json.loads(json.dumps(told)) == json.loads(json.dumps(searched_json(again)))
    best = told["places"][0]
    per_hour = 0.4 / 4 * best["num_devices"]
    assert best["price_per_million_tokens"] == pytest.approx(per_hour / 3600 / best["output_tokens_per_s"] * 1e6)
    assert best["share_within_limits"] >= 0.99
    assert best["ttft_p99_s"] <= 3.0
    assert any("link between workers is taken to carry 1.25 GB/s" in note for note in told["notes"])
    assert any("as if it had the machine to itself" in note for note in told["notes"])
    assert told["price_per_device_hour"] == pytest.approx(0.1)
    assert "price: 0.100 an hour for each core" in text_of(first)


@pytest.mark.usefixtures("calibrated")
def test_limits_that_nobody_keeps_name_the_limit_and_the_nearest() -> None:
    with pytest.raises(InvalidParameter) as error:
        searched(**LONG_PROMPTS, ttft_target_s=2.5, tpot_target_s=0.010)
    assert error.value.name == "tpot_target_s"
    message = str(error.value)
    for words in ("is kept by none of 4 candidates at 0.5 times", "The nearest (", "times the limit"):
        assert words in message, words
    with pytest.raises(InvalidParameter, match=r"ttft_target_s=0.1: is kept by none"):
        searched(**LONG_PROMPTS, ttft_target_s=0.1, tpot_target_s=1.0)


def test_calibrations_of_other_threads_are_workers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "usable_processors", lambda: 2)
    monkeypatch.setattr(worker_kinds, "find_calibration", lambda *_: (calibration(2), "calibrated: a.json"))
    alone = searched(load={"threads": 2}, **LONG_PROMPTS, ttft_target_s=30.0, tpot_target_s=1.0)
    assert not any(one.is_split for one in alone.space.candidates)
    assert "twostroke calibrate embedded --threads 1" in alone.notes[0]
    calibration(1).write(tmp_path / "one.json")
    both = searched(
        load={"threads": 2},
        **LONG_PROMPTS,
        ttft_target_s=30.0,
        tpot_target_s=1.0,
        calibrations=str(tmp_path / "one.json"),
    )
    assert {(one.threads, one.is_split) for one in both.space.candidates} == {(1, False), (2, False), (1, True)}


def test_a_calibration_of_a_folder_is_named_as_calibrate_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_models: dict[str, Path]
) -> None:
    folder = random_models["llama"]
    monkeypatch.setattr(search, "usable_processors", lambda: 2)
    monkeypatch.setattr(worker_kinds, "find_calibration", lambda *_: (calibration(2), "calibrated: a.json"))
    calibration(1, folder.name).write(tmp_path / "one.json")
    given: dict[str, Any] = {"request_rate": 1.5, "input_len": "40", "output_len": "8", "ttft_target_s": 30.0}
    given |= {"tpot_target_s": 1.0, "calibrations": str(tmp_path / "one.json")}
    found = searched(load={"model": str(folder), "threads": 2}, **given)
    assert {one.threads for one in found.space.candidates} == {1, 2}
    calibration(1, "another").write(tmp_path / "one.json")
    with pytest.raises(InvalidParameter, match=f"is of another, not of {folder.name}"):
        searched(load={"model": str(folder), "threads": 2}, **given)


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"load": {"threads": 2, "quantization": "int4"}}, "quantization int4 there, None here"),
        ({"load": {"threads": 2, "kernels": "reference"}}, "kernels reference there"),
        ({"machine": {"cpu": "an abacus"}}, "cpu an abacus there"),
        ({"cache": {"kv_cache_dtype": "int8"}}, "kv_cache_dtype int8 there"),
        ({"step_times": None}, "has no step times"),
    ],
)
def test_calibrations_of_another_machine_or_other_settings_are_refused(
    other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    replace(calibration(2), **other).write(tmp_path / "other.json")
    with pytest.raises(InvalidParameter, match=f"calibrations=.*{words}"):
        searched(request_rate=1, calibrations=str(tmp_path / "other.json"))


@pytest.mark.usefixtures("calibrated")
def test_a_calibration_of_a_kind_that_is_there_already_is_left_out_and_said(tmp_path: Path) -> None:
    calibration(1).write(tmp_path / "again.json")
    found = searched(**LONG_PROMPTS, ttft_target_s=30.0, tpot_target_s=1.0, calibrations=str(tmp_path / "again.json"))
    assert any("left out (calibrated: again.json)" in note for note in found.notes)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a shape of 70 billion parameters, without weights."""
    return str(write_published(tmp_path_factory.mktemp("published"), "Llama-3.1-70B"))


def test_a_model_too_large_for_one_gpu_is_searched_with_more_ranks(large: str) -> None:
    load = {"model": large, "load_format": "dummy"}
    given: dict[str, Any] = {"request_rate": 1.0, "input_len": "100", "output_len": "8", "num_requests": 10}
    given |= {"budgets": "512", "rate_factors": "0.5,1", "ttft_target_s": 5.0, "tpot_target_s": 1.0}
    found = searched(PlanOptions(device_name="H100-SXM"), load, **given)
    assert {one.ranks for one in found.space.candidates} == {2, 4}
    assert "left out: 2 candidates, as the model does not fit into their memory" in found.notes
    assert found.ranking.places[0].candidate.ranks == 2
    with pytest.raises(DoesNotFit, match=r"No candidate fits .*one process.*--tensor-parallel-size 2 .*--max-devices"):
        searched(PlanOptions(device_name="H100-SXM"), load, **given, max_devices=1)
    with pytest.raises(DoesNotFit, match="No candidate fits"):
        searched(PlanOptions(device_name="H100-SXM"), load, **given, ranks="1")
    with pytest.raises(DoesNotFit, match="4 ranks, budget 512: max_model_len=10000000 exceeds"):
        searched(PlanOptions(device_name="H100-SXM"), load | {"max_model_len": 10_000_000}, **given, ranks="4")
    few = searched(PlanOptions(device_name="H100-SXM"), load, **given, max_devices=2)
    assert "no split is searched: none of them fits" in few.notes


def test_what_would_fit_is_looked_for_once(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding it takes a second, and there are dozens of candidates."""
    looked_for, what_would_fit = 0, memory.what_would_fit

    def counted(*arguments: Any) -> str:
        nonlocal looked_for
        looked_for += 1
        return what_would_fit(*arguments)

    monkeypatch.setattr(memory, "what_would_fit", counted)
    given: dict[str, Any] = {"request_rate": 1.0, "budgets": "256,512,1024,2048", "max_workers": 4}
    with pytest.raises(DoesNotFit, match="No candidate fits"):
        searched(PlanOptions(device_name="L4"), {"model": large, "load_format": "dummy"}, **given)
    assert looked_for == 1


def test_no_figure_is_cut_at_80_columns() -> None:
    """With every column there is: ranks, a price, small and large figures."""
    plan = PlanOptions(device_name="L4", price_per_hour=0.0123)
    given: dict[str, Any] = {"request_rate": 0.5, "input_len": "100", "output_len": "8", "budgets": "1000000"}
    found = searched(plan, {"num_kv_blocks": 100}, **given, ranks="1,2", max_workers=3, rate_factors="0.25,1")
    lines = text_of(found, 80).splitlines()
    assert "\u2026" not in "".join(lines)
    assert len({one.ranks for one in found.space.candidates}) == 2
    for i, place in enumerate(searched_json(found)["places"], 1):
        (first, second) = (line.split() for line in lines if line.split()[:1] == [f"{i}"])
        assert "1000000" in first
        for name in ("goodput_requests_per_s", "goodput_per_device", "price_per_million_tokens"):
            assert significant(place[name]) in first, name
        for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"):
            assert significant(place[name] * 1e3) in second, name
    assert "price: 0.0123 an hour for each GPU" in lines


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("module", ["search", "trace_replay"])
def test_what_others_hold_of_a_card_is_told_to_the_account(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`plan_memory` gets all bytes of a card and those in use, and takes its share of all."""
    accounts: list[tuple[int, int]] = []
    used = {"search": search, "trace_replay": trace_replay}[module]

    def seen(prepared: Prepared, memory_bytes: int, *, others_bytes: int = 0) -> MemoryPlan:
        accounts.append((memory_bytes, others_bytes))
        return plan_memory(prepared, memory_bytes, others_bytes=others_bytes)

    monkeypatch.setattr(used, "memory_here", lambda *_: (1 << 28, 1 << 20))
    monkeypatch.setattr(used, "plan_memory", seen)
    if module == "search":
        searched(PlanOptions(), **LONG_PROMPTS, ttft_target_s=30.0, tpot_target_s=1.0)
        assert set(accounts) == {(1 << 28, 1 << 20), (1 << 27, 1 << 19)}, "two workers share the card"
    else:
        monkeypatch.setattr(worker_kinds, "find_calibration", lambda *_: (calibration(1), "calibrated: a.json"))
        config = EngineConfig.from_keywords(model="embedded", threads=1, block_size=8)
        path = write_trace(tmp_path / "chats.jsonl", conversations(10))
        trace_replay.replay_trace(path, config, TraceOptions(trace_divisor=64))
        assert accounts == [(1 << 28, 1 << 20)]


def test_a_trace_and_a_device_with_ranks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "chats[b].jsonl", conversations(40))
    plan = PlanOptions(device_name="L4", price_per_hour=1.0)
    found = searched(
        plan, {"block_size": 8}, workload=path, trace_divisor=64, num_requests=20, ranks="1,2,4,8", rate_factors="1,100"
    )
    assert len(found.workload.requests) == 20
    assert {one.ranks for one in found.space.candidates} == {1, 2, 4}
    assert any("8 ranks are left out" in note for note in found.notes)
    assert found.are_floors
    text = text_of(found)
    for words in ("chats[b].jsonl: 20 requests", "best: one process", "published figures", "per GPU"):
        assert words in text, words


def test_a_trace_that_does_not_fit_says_what_would(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "chats.jsonl", conversations(10))
    plan = PlanOptions(device_name="L4")
    with pytest.raises(InvalidParameter, match=r"holds no request of at most .*--trace-divisor"):
        searched(plan, {"max_model_len": 64}, workload=path, num_requests=10)
    with pytest.raises(InvalidParameter, match="block_size=16: must divide 512 / 64 = 8"):
        searched(plan, workload=path, trace_divisor=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"input_len": "10000"},
            r"^input_len='10000': holds no request of at most 4096 .*shorten requests \(--input-len",
        ),
        ({"output_len": "fixed:9999"}, r"^output_len='fixed:9999': holds no request of at most 4096 .*--output-len"),
        (
            {"input_len": "uniform:3950:8000", "output_len": "100"},
            r"^input_len='uniform:3950:8000': has . requests? of at most 4096 .*Give more requests \(--num-requests\)",
        ),
    ],
    ids=str,
)
def test_lengths_that_do_not_fit_are_named_and_not_the_rate(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        searched(PlanOptions(device_name="L4"), request_rate=2, ranks="1", num_requests=20, **given)


def test_ranks_that_leave_nothing_say_why(calibrated: None) -> None:
    given: dict[str, Any] = {"request_rate": 2}
    with pytest.raises(
        InvalidParameter,
        match=r"ranks='3': leaves no kind of worker: 3 ranks are left out: tensor_parallel_size=3: must divide the 4 "
        r"query heads.*Take one of 1, 2, 4\. Give a number that divides the model's heads, or leave it out\.",
    ):
        searched(PlanOptions(device_name="L4"), ranks="3", **given)
    with pytest.raises(
        InvalidParameter,
        match=r"ranks='3': leaves no kind of worker: left out \(calibrated: a\.json\): its workers have 1 rank, which "
        r"--ranks does not name\. Give a number",
    ):
        searched(ranks="3", **given)


def write_log(path: Path, num_requests: int) -> Path:
    events = history(
        with_arrivals(workload_of_lengths([(32, 8)] * num_requests), [0.1 * i for i in range(num_requests)])
    )
    path.write_text("".join(f"{to_json(event)}\n" for event in events))
    return path


def test_a_log_is_searched_at_the_rate_of_its_arrivals(tmp_path: Path) -> None:
    plan = PlanOptions(device_name="L4")
    found = searched(plan, workload=write_log(tmp_path / "run.events", 11), ranks="1", max_devices=1, budgets="64")
    assert found.workload.span_s == pytest.approx(1.0)
    text = text_of(found)
    assert "run.events: 11 requests, 10.0 requests/s" in text, "11 arrivals have 10 gaps"
    assert "1 candidate, 4 rates" in text
    assert "the workload's own rate takes 1 of it, 1 GPU\n" in text


def test_too_few_requests_conclude_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a longer path is shortened in a message
    plan = PlanOptions(device_name="L4")
    with pytest.raises(InvalidParameter, match=r"workload=.*few.events.*holds 9 requests .*fewer than the 10 needed"):
        searched(plan, workload=write_log(Path("few.events"), 9))
    path = write_trace(Path("few.jsonl"), conversations(9))
    with pytest.raises(InvalidParameter, match=r"few.jsonl.*has 9 requests of at most .* Name a trace of 10 .*more\.$"):
        searched(plan, {"block_size": 8}, workload=path, trace_divisor=64)
    with pytest.raises(InvalidParameter, match="num_requests=9"):
        SearchOptions(search=True, request_rate=1, num_requests=9)


def test_a_file_without_requests_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("empty.jsonl")
    path.write_text("")
    with pytest.raises(InvalidParameter, match=r"workload='empty.jsonl': is empty. Name a Mooncake trace, or an"):
        searched(PlanOptions(device_name="L4"), workload=path)
    path.write_text("no JSON\n")
    with pytest.raises(InvalidParameter, match=r"is neither a Mooncake trace nor an event log. Name a Mooncake trace"):
        searched(PlanOptions(device_name="L4"), workload=path)
    path.write_text('{"input_length": 5}\n')
    with pytest.raises(InvalidParameter, match=r"workload='.*empty.jsonl': must be a Mooncake trace; line 1"):
        searched(PlanOptions(device_name="L4"), workload=path)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens=64: has no part in a search. Give --budgets"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: has no part in a search of a device. Give --ranks"),
    ],
)
def test_settings_that_a_search_chooses_are_refused(load: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        searched(PlanOptions(device_name="L4"), load, request_rate=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a workload"),
        ({"request_rate": 0}, "more than 0"),
        ({"request_rate": 1, "input_len": "many"}, "input_len='many'"),
        ({"request_rate": 1, "attainment": 1.5}, "attainment=1.5"),
        ({"request_rate": 1, "rate_factors": "fast"}, "is no number"),
        ({"request_rate": 1, "rate_factors": "1000001"}, "must be more than 0 and at most 1000000"),
        ({"request_rate": 1, "budgets": "9" * 5000}, r"budgets='9+… .* has '9+… \(5000 characters\); from 1 to"),
        ({"request_rate": 1, "ranks": "9" * 5000}, r"ranks='9+… .* has '9+… \(5000 characters\); from 1 to 64"),
        ({"request_rate": 1, "trace_divisor": 2}, "changes nothing without a trace"),
        ({"workload": Path("t"), "request_rate": 1}, "changes nothing beside a workload"),
        ({"search": False, "num_requests": 200, "budgets": "64"}, "budgets='64': changes nothing without a search"),
    ],
)
def test_options_that_mean_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SearchOptions(**{"search": True} | given)


def command(*arguments: str) -> None:
    app(["plan", "embedded", "--search", *arguments], exit_on_error=False, result_action="return_value")


def test_the_command_prints_a_ranking_and_fails_where_nothing_keeps_the_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["--num-requests", "10", "--budgets", "256", "--max-workers", "2", "--ranks", "1", "--device-name", "L4"]
    load = ["--request-rate", "20", "--input-len", "100", "--output-len", "8", "--rate-factors", "1,2"]
    command(*few, *load, "--threads", "1", "--json")
    told = json.loads(capsys.readouterr().out)
    assert [(one["prefill"], one["decode"]) for one in told["places"]] == [(0, 0), (1, 1)]
    assert told["split_pays"] is False
    with pytest.raises(InvalidParameter, match="ttft_target_s=1e-09: is kept by none of 2 candidates"):
        command(*few, *load, "--threads", "1", "--ttft-target-s", "1e-9")


def test_the_largest_rate_factor_is_one_that_can_be_simulated() -> None:
    (factor,) = SearchOptions(search=True, request_rate=1, rate_factors="1000000").factors
    assert WhatIf(settings={"request_rate_factor": factor}).request_rate_factor == 1e6
