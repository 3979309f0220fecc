"""A process is started, asked for a token, and watched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.bench.start import StartOptions, run_start
from twostroke.errors import InvalidParameter, SetupError


def test_a_start_is_measured_from_outside(random_models: dict[str, Path], tmp_path: Path) -> None:
    options = StartOptions(
        model=str(random_models["llama"]),
        quantization=("int8",),
        kv_cache_memory=1 << 22,
        repeats=1,
        results=tmp_path,
    )
    (row,) = run_start(options)
    assert row.first_token_s > 0
    assert row.cpu_s > 0.2  # importing torch alone takes more
    assert row.kv_bytes == 1 << 22
    # whoever watched nothing would see less than torch alone, and come out below zero
    assert 0 < row.anonymous_bytes < 1 << 30
    saved = json.loads((tmp_path / "start.json").read_text())["results"]
    assert saved["int8"]["memory_ratio"] == row.memory_ratio
    assert saved["torch_alone_bytes"] > 1 << 20


def test_what_failed_is_said(random_models: dict[str, Path], tmp_path: Path) -> None:
    options = StartOptions(model=str(random_models["llama"]), kv_cache_memory=1, repeats=1, results=tmp_path)
    with pytest.raises(SetupError, match=r"generate .* failed: .*DoesNotFit"):
        run_start(options)
    with pytest.raises(InvalidParameter, match="quantization"):
        StartOptions(quantization=("int5",))
