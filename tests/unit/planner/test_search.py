"""`twostroke plan --search` on the embedded model: workloads, candidates, output and refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from traces import conversations, write_trace
from twostroke.cli.main import app
from twostroke.config.engine import EngineConfig
from twostroke.cost.calibration import Calibration, Timing
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.planner import search
from twostroke.planner.options import PlanOptions
from twostroke.planner.search import Searched, search_placement
from twostroke.planner.search_options import SearchOptions
from twostroke.planner.show_search import conclusions, print_search, searched_json

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


def calibration(threads: int) -> Calibration:
    """Return the calibration of a machine with the step times SLOW."""
    return Calibration(
        model="embedded",
        load={"threads": threads, "tensor_parallel_size": 1},
        machine={},
        context_tokens=0,
        most_drafts=1,
        step_s=(Timing(1, 1.0), Timing(2, 1.0)),
        step_times=SLOW,
    )


def searched(plan: PlanOptions | None = None, load: dict[str, Any] | None = None, **given: Any) -> Searched:
    config = EngineConfig.from_keywords(**{"model": "embedded", "threads": 1} | (load or {}))
    plan = plan or PlanOptions(memory=1 << 28, link_bytes_per_s=1e9)
    return search_placement(config, plan, SearchOptions(**FEW | given))


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a machine of four cores with a calibration of one thread."""
    monkeypatch.setattr(search, "find_calibration", lambda *_: (calibration(1), "calibrated: a.json"))
    monkeypatch.setattr(search, "usable_processors", lambda: 4)


def text_of(found: Searched) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
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
    assert winner.best.tpot_p99_s <= 0.040
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
    monkeypatch.setattr(search, "find_calibration", lambda *_: (calibration(2), "calibrated: a.json"))
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


def test_a_trace_and_a_device_with_ranks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "chats.jsonl", conversations(40))
    plan = PlanOptions(device_name="L4", price_per_hour=1.0)
    found = searched(
        plan, {"block_size": 8}, workload=path, trace_divisor=64, num_requests=20, ranks="1,2,4", rate_factors="1,100"
    )
    assert len(found.workload.requests) == 20
    assert {one.ranks for one in found.space.candidates} == {1, 2}
    assert any("4 ranks are left out" in note for note in found.notes)
    assert found.are_floors
    text = text_of(found)
    for words in ("chats.jsonl: 20 requests", "best: one process", "published figures", "per GPU"):
        assert words in text, words


def test_a_trace_that_does_not_fit_says_what_would(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "chats.jsonl", conversations(10))
    plan = PlanOptions(device_name="L4")
    with pytest.raises(InvalidParameter, match=r"holds no request of at most .*--trace-divisor"):
        searched(plan, {"max_model_len": 64}, workload=path, num_requests=5)
    with pytest.raises(InvalidParameter, match="block_size=16: must divide 512 / 64 = 8"):
        searched(plan, workload=path, trace_divisor=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a workload"),
        ({"request_rate": 0}, "more than 0"),
        ({"request_rate": 1, "input_len": "many"}, "input_len='many'"),
        ({"request_rate": 1, "attainment": 1.5}, "attainment=1.5"),
        ({"request_rate": 1, "rate_factors": "fast"}, "is no number"),
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
