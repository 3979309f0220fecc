"""The router is measured without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.bench import gateway, router
from twostroke.bench.router import RouterOptions, run_router
from twostroke.errors import InvalidParameter


def test_a_row_for_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("NUM_STREAMS", 50), ("OUTPUT_TOKENS", 40), ("NUM_HEARTBEATS", 50)):
        monkeypatch.setattr(gateway, name, few)
    monkeypatch.setattr(router, "NUM_PREFIXES", 50)
    (one, few), tables = run_router(RouterOptions(members=(1, 12), decisions=20, results=tmp_path))
    assert one.hand_overs == 0.0  # nobody to hand over to
    assert few.hand_overs > 0.0
    assert few.cost_over_whole is not None
    assert few.cost_over_whole >= 1 - 1e-9  # nothing is cheaper than the best of all
    assert [fleet.num_workers for fleet in tables["measured"]] == [12]
    saved = json.loads((tmp_path / "router.json").read_text())
    assert list(saved["results"]["sizes"]) == ["1", "12"]
    assert 50 < saved["results"]["bytes_per_hash"] < 2000
    assert saved["command"] == "twostroke bench router --members 1 --members 12 --decisions 20"


def test_sizes_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="members=0"):
        RouterOptions(members=(0,))
