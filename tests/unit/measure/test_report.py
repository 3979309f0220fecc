"""Results: saved whole, read back equal, compared figure by figure."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.compare.options import CompareOptions
from twostroke.errors import InvalidParameter
from twostroke.hardware import Hardware
from twostroke.measure.report import (
    BenchResult,
    CodeState,
    command_line,
    compare,
    load,
    median,
    percentiles,
    print_comparison,
    save,
)


def _result(**results: object) -> BenchResult:
    return BenchResult.now("some", "make it", config={"max_num_seqs": 4}, workload={"seed": 1}, results=results)


def test_a_saved_result_reads_back_equal(tmp_path: Path) -> None:
    result = _result(ttft_s=percentiles([0.25, 0.5]), steps=3)
    path = save(result, tmp_path / "results")
    assert path == tmp_path / "results" / "some.json"
    assert load(path) == result
    assert [p.name for p in path.parent.iterdir()] == ["some.json"], "a temporary file was left behind"


def test_a_failed_save_leaves_the_old_result(tmp_path: Path) -> None:
    path = save(_result(steps=1), tmp_path)
    with pytest.raises(TypeError):
        save(_result(**{"steps": {(1, 2): "no JSON key"}}), tmp_path)
    assert load(path).results == {"steps": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_result_says_where_it_comes_from() -> None:
    result = json.loads(_result().to_json())
    assert set(result) >= {"bench", "commit", "dirty", "date", "hardware", "config", "workload", "warmup", "repeats"}
    assert result["hardware"]["cores"] >= 1
    assert result["hardware"]["memory_bytes"] > 0
    assert Hardware.of_this_machine().cpu
    assert len(CodeState.of_this_checkout().hash) in (7, 40)  # "unknown" or a hash


def test_a_command_names_an_environment_and_not_where_it_lies() -> None:
    options = CompareOptions(peers="llama.cpp", env=(f"llama.cpp={sys.executable}",))
    command = command_line("python -m benchmarks compare", options)
    assert command == "python -m benchmarks compare --peers llama.cpp --env llama.cpp=PYTHON"


def test_numpy_values_become_json() -> None:
    text = _result(a=np.float64(0.5), b=np.int64(3), where=Path("x")).to_json()
    assert json.loads(text)["results"] == {"a": 0.5, "b": 3, "where": "x"}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    found = percentiles(values)
    for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(values, q))
    assert found["count"] == count
    assert median(values) == found["p50"]
    assert percentiles([]) == {}


def test_comparing_names_ratios_and_what_else_changed() -> None:
    before = _result(tok_s=100.0, deep={"p50": 2.0}, gone=1, text="a")
    after = replace(_result(tok_s=150.0, deep={"p50": 0.0}, new=1), config={"max_num_seqs": 8}, dirty=False)
    comparison = compare(before, after)
    assert {d.name: d.ratio for d in comparison.differences} == {"tok_s": 1.5, "deep.p50": 0.0}
    assert "config.max_num_seqs differs: 4 -> 8" in comparison.remarks
    console = Console(record=True, width=100, file=io.StringIO())
    print_comparison(comparison, console)
    shown = console.export_text()
    assert "1.500" in shown
    assert "max_num_seqs" in shown
    zero = compare(_result(x=0, y=0), _result(x=1, y=0))
    assert [d.ratio for d in zero.differences] == [math.inf, 1.0]


@pytest.mark.parametrize("text", ["", "[]", '{"bench": "x", "unknown": 1}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidParameter, match="written by a benchmark"):
        load(path)
