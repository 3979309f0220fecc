"""A file of weights that shrinks, is written to, or is replaced: while it is loaded, and while its model serves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import twostroke
from gguf_files import fixture
from twostroke import LLM, SamplingParams
from twostroke.errors import CorruptCheckpoint
from twostroke.startup import loading
from twostroke.weight_file import WeightFile

EMBEDDED = Path(twostroke.__file__).parent / "embedded"


def shorten(path: Path) -> None:
    os.truncate(path, 1000)


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(1, 1))  # however coarse the system's clock is


def replace_by_nothing(path: Path) -> None:
    path.with_name("other").write_bytes(b"")
    path.with_name("other").replace(path)


def test_what_was_read_is_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(200)))
    file = WeightFile(path)
    found = file.read(10, 4, "x.weight")
    replace_by_nothing(path)
    assert found.tolist() == file.read(10, 4, "x.weight").tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (shorten, "became shorter while it was read: x.weight ends at byte 1,204 of now 1,000. Wait until"),
        (write_into, "was written to while it was read, at x.weight. Wait until"),
    ],
)
def test_a_change_is_named(tmp_path: Path, change: Callable[[Path], None], told: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1300))
    file = WeightFile(path)
    change(path)
    with pytest.raises(CorruptCheckpoint, match="weights") as raised:
        file.read(1200, 4, "x.weight")
    assert told in str(raised.value)


def folder(tmp_path: Path) -> tuple[Path, Path]:
    """A model of safetensors: where it is, and its file of weights."""
    made = tmp_path / "model"
    shutil.copytree(EMBEDDED, made)
    return made, made / "model.safetensors"


def gguf(tmp_path: Path) -> tuple[Path, Path]:
    """The same of a GGUF file."""
    path = tmp_path / "model.gguf"
    shutil.copy(fixture("llama-q4_0"), path)
    return path, path


@pytest.mark.parametrize("make", [folder, gguf])
@pytest.mark.parametrize("change", [shorten, write_into])
def test_a_change_while_it_loads_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], tuple[Path, Path]],
    change: Callable[[Path], None],
) -> None:
    model, file = make(tmp_path)
    load_model = loading.load_model

    def changed(*args: Any, **given: Any) -> Any:
        change(file)
        return load_model(*args, **given)

    monkeypatch.setattr(loading, "load_model", changed)
    with pytest.raises(CorruptCheckpoint, match="while it was read"):
        LLM(model, kv_cache_memory="16MiB", threads=1)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("make", [folder, gguf])
def test_nothing_of_the_file_is_read_while_the_model_serves(
    tmp_path: Path, make: Callable[[Path], tuple[Path, Path]], kernels: str
) -> None:
    model, file = make(tmp_path)
    llm = LLM(model, kernels=kernels, kv_cache_memory="16MiB", threads=1)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    expected = llm.generate({"prompt_token_ids": [1, 2, 3]}, params)[0].outputs[0].token_ids
    shorten(file)
    assert llm.generate({"prompt_token_ids": [1, 2, 3, 4]}, params)
    assert llm.generate({"prompt_token_ids": [1, 2, 3]}, params)[0].outputs[0].token_ids == expected
