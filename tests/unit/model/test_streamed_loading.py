"""Matrices are read, quantized and packed a few rows at a time, which changes no bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

import gguf_files
from oracle.paged_driver import PagedDriver
from quantized_folders import FIXTURES, NAMES, open_folder
from twostroke.config.load import Quantization, QuantizationOnLoad
from twostroke.config.model import ModelConfig
from twostroke.kernels import native
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, multiplied_parts
from twostroke.model.model_files import find_model
from twostroke.model.quantize_folder import quantize_folder
from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not native.is_built(), reason="torch's operators take matrices whole")


@pytest.mark.parametrize("name", NAMES)
def test_some_rows_are_those_of_the_whole(name: str) -> None:
    source = open_folder(FIXTURES / name)
    num_read = 0
    for parameter, stored in source.weights.items():
        if not stored.is_by_rows:
            continue
        whole, some = (source.read(parameter, torch.float32, rows) for rows in (slice(None), slice(16, 40)))
        if isinstance(whole, QuantizedWeight):
            num_read += 1
            whole, some = whole.dequantize(), some.dequantize()
        assert torch.equal(some, whole[16:40])
    assert num_read == (14 if name.startswith("ct-") else 0)


@pytest.mark.parametrize("name", gguf_files.NAMES)
def test_some_rows_of_gguf_files(name: str) -> None:
    """Rows of heads are put in order before some of them are taken."""
    files = find_model(str(gguf_files.fixture(name)))
    source = files.weights(files.config(), None)
    for parameter in source.weights:
        whole, some = (source.read(parameter, torch.float32, rows) for rows in (slice(None), slice(16, 40)))
        whole, some = (x.dequantize() if isinstance(x, QuantizedWeight) else x for x in (whole, some))
        assert torch.equal(some, whole[16:40]), parameter


class Recorder:
    """A source that remembers how many rows of a weight were asked for at a time."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.path, self.quantization = source.path, source.quantization
        self.weights: Mapping[str, StoredWeight] = source.weights
        self.most_rows: dict[str, int] = {}

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        found = self._source.read(name, dtype, rows)
        self.most_rows[name] = max(self.most_rows.get(name, 0), found.shape[0])
        return found


def logits_of(source: WeightSource, config: ModelConfig, quantization: Quantization | None) -> Tensor:
    model = load_model(
        source,
        config,
        Placement(operators_for(CPU, torch.float32, "native"), torch.float32, CPU, 64),
        quantization=quantization,
    )
    driver = PagedDriver(model, num_blocks=8)
    return driver.logits(driver.step([(driver.add([3, 1, 4, 1, 5, 9, 2, 6]), 8)])[0])


def check(model: str, quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Load a model with matrices whole and in panels; return the names of those loaded in panels."""
    files = find_model(model)
    config = files.config()
    monkeypatch.setattr("twostroke.kernels.native.linear._NUMBERS_PER_CHUNK", 1 << 30)
    whole = logits_of(files.weights(config, quantization), config, quantization)
    monkeypatch.setattr("twostroke.kernels.native.linear._NUMBERS_PER_CHUNK", 1)
    source = Recorder(files.weights(config, quantization))
    assert torch.equal(logits_of(source, config, quantization), whole)
    return {name for name in multiplied_parts(config) if source.most_rows[name] <= 64}


@needs_native
@pytest.mark.parametrize("quantization", [None, *get_args(QuantizationOnLoad)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_floats(
    family: str,
    quantization: Quantization | None,
    random_models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = str(random_models[family])
    assert check(model, quantization, monkeypatch) == multiplied_parts(find_model(model).config())


@needs_native
@pytest.mark.parametrize("quantization", get_args(QuantizationOnLoad))
def test_folders_that_were_quantized_ahead(
    quantization: QuantizationOnLoad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_folder("embedded", tmp_path / "out", quantization)
    in_panels = check(str(tmp_path / "out"), None, monkeypatch)
    assert {name.split(".")[-2] for name in in_panels} >= {"embed_tokens", "o_proj", "down_proj"}


@needs_native
@pytest.mark.parametrize("name", gguf_files.NAMES)
def test_gguf_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows of heads that the file interleaves."""
    in_panels = check(str(gguf_files.fixture(name)), None, monkeypatch)
    assert {name.split(".")[-2] for name in in_panels} >= {"o_proj", "down_proj"}
