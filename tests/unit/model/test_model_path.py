"""Words for a model, and the errors about words that name none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import huggingface_hub
import pytest

from gguf_files import fixture
from twostroke.errors import ModelNotFound
from twostroke.model.checkpoint import find_model_folder, read_model_config
from twostroke.model.model_files import GGUFModel, find_model
from twostroke.model.model_path import gguf_path


def said_of(model: str) -> str:
    with pytest.raises(ModelNotFound) as refused:
        find_model(model)
    return str(refused.value)


def test_one_file_of_a_folder_is_told_its_folder(random_models: dict[str, Path]) -> None:
    folder = random_models["llama"]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert said_of(str(folder / name)) == f"{folder / name} is one file of a model. Give its folder: {folder}."


def test_weights_alone_are_told_what_is_missing(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 16)
    assert "Give a folder that has config.json and tokenizer.json" in said_of(str(weights))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "not a GGUF file. Give a folder" in said_of(str(tmp_path / "pytorch_model.bin"))


def test_what_is_neither_a_file_nor_a_folder_is_told_at_once(tmp_path: Path) -> None:
    """Nothing is opened: opening a pipe without a writer would wait."""
    pipe, place = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        (tmp_path / "link.gguf").symlink_to(pipe)
        kinds = {"/dev/null": "a device", "/dev/zero": "a device", str(pipe): "a pipe", str(place): "a socket"}
        for path, kind in {**kinds, str(tmp_path / "link.gguf"): "a pipe"}.items():
            assert said_of(path).startswith(f"{path} is {kind}; a model cannot be read from it. Give a folder")


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    names = [f"model-{i}.gguf" for i in range(6)]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    said = said_of(str(tmp_path))
    assert said.startswith(f"{tmp_path} holds 6 GGUF files; give one of them: {tmp_path / names[0]}, ")
    assert said.endswith(f"{tmp_path / names[3]} or 2 more.")
    for name in names[1:]:
        (tmp_path / name).unlink()
    assert gguf_path(str(tmp_path)) == tmp_path / names[0], "the only one is meant"
    (tmp_path / "config.json").write_text("{}")
    assert gguf_path(str(tmp_path)) is None, "a folder of Hugging Face's goes first"


def test_a_gguf_file_by_any_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sha256-0a1b"
    path.write_bytes(fixture("llama-q4_0").read_bytes())
    assert isinstance(find_model(str(path)), GGUFModel)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama3.2:1b", "the short names are smollm2, qwen2.5-coder-1.5b, gemma3-270m. Give a folder"),
        ("tinyllama", "the short names are smollm2"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "give its id: Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "give its id: Qwen/Qwen3-0.6B"),
        ("hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", "give its id: bartowski/Llama-3.2-1B-Instruct-GGUF"),
        ("Tell me a story", "Names of models have no spaces"),
        ("/no/such/folder", "it is not a hub id (owner/name). Check the path."),
        ("./model.GGUF", "there is no file './model.GGUF'"),
        ("owner/name/file", "it is not a hub id"),
    ],
)
def test_words_that_name_nothing(model: str, words: str) -> None:
    assert words in said_of(model)


def test_a_folder_of_the_hubs_cache_is_told_where_its_model_is(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=rf"Did you mean {snapshot}\?"):
        read_model_config(tmp_path)


def test_a_hub_repository_of_gguf_files_is_told_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"hf download owner/name-GGUF FILE"):
        find_model_folder("owner/name-GGUF")
