"""A process is started, asked for a token, and watched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gguf_files import fixture
from twostroke.errors import InvalidParameter, SetupError
from twostroke.measure.start import StartOptions, run_start
from twostroke.model.quantize_folder import quantize_folder


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
    # a broken measurement would give less than torch alone, and a negative result
    assert 0 < row.anonymous_bytes < 1 << 30
    saved = json.loads((tmp_path / "start.json").read_text())["results"]
    assert saved["int8"]["memory_ratio"] == row.anonymous_bytes / (row.weight_bytes + (1 << 22))
    assert saved["int8"]["ratio_to_weights"] == row.anonymous_bytes / row.weight_bytes
    assert saved["torch_alone_bytes"] > 1 << 20


def test_what_failed_is_said(random_models: dict[str, Path], tmp_path: Path) -> None:
    options = StartOptions(model=str(random_models["llama"]), kv_cache_memory=1, repeats=1, results=tmp_path)
    # once: neither the command line of the process nor the name it begins its own errors with
    with pytest.raises(SetupError, match=r"^the start with quantization none failed: KV memory of 1 bytes"):
        run_start(options)
    with pytest.raises(InvalidParameter, match="quantization"):
        StartOptions(quantization=("int5",))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_quantized_model_is_started_as_it_is(kind: str, random_models: dict[str, Path], tmp_path: Path) -> None:
    model = fixture("llama-q4_0")
    if kind == "folder":
        model = quantize_folder(str(random_models["llama"]), tmp_path / "quantized", "int8").path
    options = StartOptions(model=str(model), kv_cache_memory=1 << 22, repeats=1, results=tmp_path)
    (row,) = run_start(options)
    assert row.quantization == "none"
    saved = (tmp_path / "start.json").read_text()
    assert json.loads(saved)["config"] == {
        **json.loads(saved)["config"],
        "model": model.name,
        "quantization": ["none"],
    }
    assert str(model) not in saved
    # before any process is started; otherwise the error would come after the rows that work
    options = StartOptions(model=str(model), quantization=("none", "int8"), kv_cache_memory=1, results=tmp_path)
    with pytest.raises(SetupError, match=r"^quantization=int8: .* quantized already"):
        run_start(options)
