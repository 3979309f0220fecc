"""Two processes are started, a prompt goes over, and its bytes are counted."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.handover.link import why_no_link
from benchmarks.handover.pair import LAYOUT
from benchmarks.handover.run import HandoverOptions, print_handover, run_handover
from twostroke.errors import InvalidParameter


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    assert LAYOUT.bytes_per_token == 112 << 10
    result = run_handover(HandoverOptions(megabytes=(2,), repeats=1, results=tmp_path))
    saved = json.loads((tmp_path / "handover.json").read_text())
    assert saved["command"] == "python -m benchmarks handover --megabytes 2 --repeats 1"
    assert [row["transport"] for row in saved["results"]["handovers"]] == ["shm", "tcp"]
    for row in saved["results"]["handovers"]:
        assert row["is_exact"]
        assert row["bytes"] == 32 * LAYOUT.bytes_per_token  # two blocks of 16 tokens hold 2 million bytes
        assert row["gb_per_s"] > 0
        # a layer cannot be sent before it is computed
        assert row["layerwise"]["total_ms"] >= row["layerwise"]["prefill_ms"]
        assert "share_of_link" not in row
    print_handover(result.results, Console(file=(shown := io.StringIO()), width=200))
    assert shown.getvalue().count(" yes ") == 2


def test_nixl_brings_the_same_bytes(tmp_path: Path, need_nixl: Callable[[], None]) -> None:
    need_nixl()
    result = run_handover(HandoverOptions(megabytes=(2,), repeats=1, results=tmp_path, transports=("nixl",)))
    (row,) = result.results["handovers"]
    assert row["is_exact"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("transports", ("rdma",)), ("megabytes", (0,)), ("repeats", 0), ("link_gbit_per_s", 0.0), ("transports", ())],
)
def test_what_cannot_be_measured_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=name):
        HandoverOptions(**{name: value})  # pyright: ignore


def test_what_a_link_needs_is_named() -> None:
    missing = why_no_link()
    assert not missing or "root" in missing or "iproute2" in missing
