"""The packed form of weights, kept from one start to the next: the same bits, or made anew, or an error by name."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
from twostroke import LLM, SamplingParams
from twostroke.errors import CorruptCheckpoint, InvalidParameter, SetupError
from twostroke.kernels import native
from twostroke.model import packed_cache
from twostroke.model.packed_cache import PackedCache, default_folder

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the native kernels pack")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def tokens(model: Path, folder: Path | None, **settings: Any) -> list[int]:
    settings |= {} if folder is None else {"packed_cache": str(folder)}
    with LLM(str(model), num_kv_blocks=16, max_model_len=64, threads=2, **settings) as llm:
        found = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    return list(found[0].outputs[0].token_ids)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(gguf_files.fixture("llama-wide-q4_k_m"), tmp_path / "model.gguf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def no_packing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse() -> None:
        def packs(*_: object) -> None:
            raise AssertionError("it was packed again")

        for name in ("_QuantizedPanels.read", "_QuantizedPanels.pack", "_FloatPanels.pack"):
            monkeypatch.setattr(f"twostroke.kernels.native.linear.{name}", packs)

    return refuse


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}, {"quantization": "int8"}, {"dtype": "float32"}])
def test_a_folder_is_packed_once(
    settings: dict[str, Any], folder: Path, no_packing: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    embedded = Path("embedded")
    expected = tokens(embedded, None, **settings)
    assert tokens(embedded, folder, **settings) == expected
    assert only(folder).suffix == ".packed"
    assert only(folder).stat().st_mode & 0o077 == 0
    no_packing()
    assert tokens(embedded, folder, **settings) == expected
    assert tokens(embedded, folder, verify=True, **settings) == expected
    assert not caplog.records


@pytest.mark.parametrize("name", ["llama-wide-q4_k_m", "qwen3-wide-q6_k", "qwen3-q4_0", "llama-bf16"])
def test_gguf_files_are_packed_once(name: str, folder: Path, no_packing: Callable[[], None]) -> None:
    """With parts of several types in one map, and rows of heads in an order of their own."""
    file = gguf_files.fixture(name)
    expected = tokens(file, None)
    assert tokens(file, folder) == expected
    no_packing()
    assert tokens(file, folder) == expected


def test_other_forms_lie_beside_it(model: Path, folder: Path) -> None:
    tokens(Path("embedded"), folder)
    tokens(Path("embedded"), folder, quantization="int8")
    tokens(model, folder)
    assert len(list(folder.iterdir())) == 3


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def spoil_weights(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def spoil_index(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-200] ^= 4
    path.write_bytes(content)


def lose_the_middle(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + content[8192:])


@pytest.mark.parametrize("spoil", [shorten, empty, spoil_weights, spoil_index, lose_the_middle])
def test_a_damaged_file_is_made_anew(
    spoil: Callable[[Path], None],
    model: Path,
    folder: Path,
    no_packing: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = tokens(model, folder)
    spoil(only(folder))
    assert tokens(model, folder) == expected
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(only(folder)) in caplog.text
    assert "is made again" in caplog.text
    no_packing()
    assert tokens(model, folder) == expected


def test_a_model_that_changed_is_packed_anew(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens(model, folder)
    os.utime(model, ns=(0, 1))
    tokens(model, folder)
    assert "was made for another time" in caplog.text
    shutil.copy(gguf_files.fixture("llama-wide-q6_k"), model)
    caplog.clear()
    assert tokens(model, folder) == tokens(gguf_files.fixture("llama-wide-q6_k"), None)
    assert "was made for another size, time, header" in caplog.text


def test_another_version_packs_anew(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens(model, folder)
    monkeypatch.setattr(packed_cache, "__version__", "0.0.7")
    tokens(model, folder)
    assert "was made for another version of twostroke" in caplog.text


def test_verify_finds_a_change_that_nothing_else_tells(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changed byte is after the header; size and time are as before."""
    monkeypatch.setattr("twostroke.model.packed_cache._HEADER_BYTES", 64)
    tokens(model, folder)
    state = model.stat()
    with model.open("r+b") as file:
        file.seek(state.st_size - 4)
        file.write(b"\x01\x02\x03\x04")
    os.utime(model, ns=(state.st_atime_ns, state.st_mtime_ns))
    tokens(model, folder)  # not seen without
    with pytest.raises(CorruptCheckpoint, match=r"its hash has changed since .* but not its size"):
        tokens(model, folder, verify=True)


def test_verify_finds_damage_of_the_packed_form(model: Path, folder: Path) -> None:
    tokens(model, folder)
    spoil_weights(only(folder))
    with pytest.raises(CorruptCheckpoint, match="its hash has changed since it was made"):
        tokens(model, folder, verify=True)


def test_a_full_disk_ends_the_keeping_and_not_the_start(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, num_put = tokens(model, None), 0

    def put(self: object, content: torch.Tensor) -> list[int]:
        nonlocal num_put
        num_put += 1
        if num_put == 3:
            raise OSError(28, "No space left on device")
        return [0, len(content)]

    monkeypatch.setattr("twostroke.model.packed_cache._Writer._put", put)
    assert tokens(model, folder) == expected
    assert "cannot be written (No space left on device)" in caplog.text
    assert not list(folder.iterdir())


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="it failed"), PackedCache(tmp_path / "c", model, {"dtype": "bfloat16"}):
        raise ValueError("it failed")
    assert not list((tmp_path / "c").iterdir())


def test_a_folder_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be created"):
        tokens(model, tmp_path / "file" / "cache")


def test_default_is_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "twostroke" / "packed"
    tokens(model, Path("default"))
    assert only(default_folder()).name.startswith("model-")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"verify": True}, "verify=true: compares with the hashes in a packed cache, and none is named"),
        ({"packed_cache": "c", "kernels": "reference"}, "keeps what native kernels pack"),
        ({"packed_cache": "c", "tensor_parallel_size": 2}, "keeps whole models, not the shares of 2 ranks"),
        ({"packed_cache": "c", "load_format": "dummy"}, "not random ones"),
        ({"packed_cache": "c", "dtype": "float16"}, "keeps what native kernels pack; this model runs on"),
        ({"packed_cache": 3}, "must be a string or a Path"),
        ({"packed_cache": "c", "verify": "yes"}, "verify='yes': must be true or false"),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        LLM("embedded", num_kv_blocks=16, max_model_len=64, **settings)
