"""`twostroke plan` as people run it: a process, its streams and its exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from command_line import twostroke
from fixtures.sparse.make import FOLDER
from twostroke.config.engine import EngineConfig
from twostroke.startup.assembly import build_engine


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return twostroke("plan", *arguments)


def test_for_machines_and_as_the_engine_has_it(random_models: dict[str, Path], tmp_path: Path) -> None:
    model, picture = str(random_models["mistral"]), tmp_path / "frontier.png"
    sizes = ["--kv-cache-memory", str(1 << 22), "--kv-cache-dtype", "int8", "--block-size", "32", "--threads", "1"]
    done = plan(model, "--json", "--png", str(picture), "--quantization", "int8", *sizes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kv_cache_dtype"], found["quantization"], found["block_size"]) == ("int8", "int8", 32)
    assert picture.read_bytes().startswith(b"\x89PNG")
    given = {"quantization": "int8", "kv_cache_memory": 1 << 22, "kv_cache_dtype": "int8", "block_size": 32}
    built = build_engine(EngineConfig.from_keywords(model=model, threads=1, **given))
    try:
        assert found["num_blocks"] == built.facts.num_blocks
        assert found["max_model_len"] == built.facts.max_model_len
        assert found["kv_bytes_per_token"] == built.facts.kv_bytes_per_token
        words = f"{found['weight_bytes']:,} bytes of weights"
        assert any(words in line for line in built.facts.startup_lines)
    finally:
        built.engine.close()


def test_a_folder_with_config_json_alone(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "Qwen3-30B-A3B" / "config.json", tmp_path)
    done = plan(str(tmp_path), "--device-name", "H200", "--compare", "none")
    assert done.returncode == 0, done.stderr
    for words in ("30,532.1 M parameters, 3,041.9 M of them for a token", "note: sizes are those of config.json in"):
        assert words in " ".join(done.stdout.split())
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = plan(str(tmp_path), "--tokenizer", "embedded")
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr, "weights that are there are looked at"


def test_for_people_and_another_device() -> None:
    done = plan("embedded", "--device-name", "l40s", "--price-per-hour", "1.5", "--compare", "none")
    assert done.returncode == 0, done.stderr
    for words in ("on L40S: 362 TFLOP/s, 864 GB/s, published", "KV cache", "TTFT floor", "per M tokens", "KV in int4"):
        assert words in done.stdout
    tables = done.stdout.split("\nkv_cache_dtype=int4")[0]
    assert max(map(len, tables.splitlines()[1:])) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-name", "H1000"], "Known: T4, A10"),
        (["--memory", "10000000"], "would not fit either (int8 takes"),
        (["--device", "cpu", "--device-name", "L4"], "--device='cpu': contradicts --device-name L4, which is a GPU"),
        (["--memory", "-5"], "memory=-5"),
        (["--context", "4096"], "context=4096"),
        (["--prompt-lengths", "many"], "no whole number"),
        (["--max-model-len", "9999999"], "max_model_len=9999999"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments: list[str], words: str) -> None:
    done = plan("embedded", *arguments)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
