"""The router is measured without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import router
from benchmarks import router as gateway
from benchmarks.router import TOKEN_US, GatewayCosts, RouterOptions, fleets, run_router
from twostroke.errors import InvalidParameter

_ROOT = Path(__file__).parents[3]
_RESULTS = _ROOT / "benchmarks" / "results"
_PAGE = (_ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def _results(name: str) -> dict[str, Any]:
    return json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def _token_us(name: str) -> float:
    (claim,) = (claim for claim in _results(name)["claims"] if claim["what"] == "HTTP process, us of processor a token")
    return round(claim["measured"], 2)


def test_a_tokens_price_on_the_page_is_what_was_measured() -> None:
    embedded, qwen3 = _token_us("server-throughput"), _token_us("server-throughput-qwen3")
    assert embedded == TOKEN_US
    assert f"| {embedded} us of a core | measured: `server-throughput.json`" in _PAGE
    assert f"{qwen3} in `server-throughput-qwen3.json`" in _PAGE
    assert f"T x {embedded} us + R x 500 us" in _PAGE
    a_core = 1e6 / embedded
    assert f"{round(a_core, -3):,.0f} tokens/s are a core of Python, the output of {a_core / 290:.0f} decode" in _PAGE
    assert f"of {a_core / 5800:.0f} that are twenty times as fast" in _PAGE


def test_the_gateways_on_the_page_are_those_of_the_measured_prices() -> None:
    found = _results("router")
    sizes = {int(size): row for size, row in found["sizes"].items()}
    tables = fleets(
        {size: row["route_us"]["mean"] + row["placed_us"] for size, row in sizes.items()},
        {size: row["put_us"] for size, row in sizes.items()},
        found["bytes_per_hash"],
        GatewayCosts(**found["gateway"]),
    )
    lines = _PAGE.partition("## Gateways")[2].partition("**Cells.**")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| 1")]
    fleet_rows = [*tables["measured"], *tables["twenty_times"]]
    assert len(rows) == len(fleet_rows)
    for cells, fleet in zip(rows, fleet_rows, strict=True):
        text, routing = (float(cells[column]) for column in (3, 4))
        assert (cells[0], cells[2]) == (f"{fleet.num_workers:,}", f"{fleet.tokens_per_s:,.0f}")
        assert text == pytest.approx(fleet.text_cores, rel=0.02, abs=0.005)
        assert routing == pytest.approx(fleet.routing_cores, rel=0.03, abs=0.005)
        none = "**none is enough**", ""
        count, connections = fleet.num_gateways, fleet.connections_per_gateway
        assert tuple(cells[6:8]) == (none if count is None else (f"{count:,}", f"{connections:,}"))
    cells_of = [10 * (tables[name][2].num_gateways or 0) for name in ("measured", "twenty_times")]
    assert f"are {cells_of[0]:,} gateways for 10,000 workers as measured, {cells_of[1]:,} for the fast" in _PAGE


def test_no_benchmark_with_a_result_is_said_to_have_none() -> None:
    page = (_ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    without = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "No result yet" in line]
    assert [name for name in without if (_RESULTS / f"{name}.json").exists()] == []


def test_a_row_for_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("NUM_STREAMS", 50), ("STREAM_OUTPUT_TOKENS", 40), ("NUM_HEARTBEATS", 50)):
        monkeypatch.setattr(gateway, name, few)
    monkeypatch.setattr(router, "NUM_PREFIXES", 50)
    (one, few), tables = run_router(RouterOptions(members=(1, 12), decisions=20, results=tmp_path))
    assert one.hand_overs == 0.0  # there is no other worker
    assert few.hand_overs > 0.0
    assert few.cost_over_whole is not None
    assert few.cost_over_whole >= 1 - 1e-9  # nothing is cheaper than the best of all
    assert [fleet.num_workers for fleet in tables["measured"]] == [12]
    saved = json.loads((tmp_path / "router.json").read_text())
    assert list(saved["results"]["sizes"]) == ["1", "12"]
    assert 50 < saved["results"]["bytes_per_hash"] < 2000
    assert saved["command"] == "python -m benchmarks router --members 1 --members 12 --decisions 20"


def test_sizes_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="members=0"):
        RouterOptions(members=(0,))
