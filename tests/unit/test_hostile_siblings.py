"""Model files and logs that mean harm, each in a way of its own: refused in words, soon, and with little memory."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hostile.sound_files import gguf_bytes, write_folder, write_gguf
from benchmarks.reproduce.hostile_files import KINDS, outcome_of
from twostroke.config.engine import EngineConfig
from twostroke.cost.calibration import Calibration
from twostroke.engine import event_sinks
from twostroke.engine.event_sinks import read_events
from twostroke.errors import TwostrokeError, UnreadableEvent
from twostroke.gguf.container import GGUFFile
from twostroke.model.checkpoint import Checkpoint
from twostroke.startup.assembly import build_engine
from twostroke.tokenizer.tokenizer import Tokenizer

MAX_S = 10.0
"""Of one file, on a machine that is busy; the benchmark holds 2 s."""
MOST_BYTES = 500 * 10**6
ONE_TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def load(path: Path) -> None:
    config = EngineConfig.from_keywords(model=str(path), threads=1, num_kv_blocks=8, block_size=16, max_model_len=64)
    build_engine(config).engine.close()


def refused(read: Callable[[], object]) -> str:
    """Read something hostile; return the words that it is refused with."""
    begun_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TwostrokeError) as told:
        read()
    assert time.monotonic() - begun_s < MAX_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
    assert len(str(told.value)) < 4000, "no file is sent back"
    return str(told.value)


def ended(read: Callable[[], object]) -> None:
    """Read something odd, which need not be refused; any other error than ours is wrong, and so is waiting."""
    begun_s = time.monotonic()
    outcome = outcome_of(lambda _: read(), Path())
    assert not outcome.startswith("!"), outcome
    assert time.monotonic() - begun_s < MAX_S


def safetensors(folder: Path, header: Any, data: bytes = bytes(64), size: int | None = None) -> Callable[[], object]:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<Q", len(content) if size is None else size)
    (folder / "model.safetensors").write_bytes(head + content + data)
    return lambda: Checkpoint(folder)


HEADERS: dict[str, tuple[Any, int | None]] = {
    "longer than any file": ({"a": ONE_TENSOR}, 2**40),
    "longer than a number holds": ({"a": ONE_TENSOR}, 2**64 - 1),
    "no header at all": ({}, 0),
    "tensors that share bytes": ({"a": ONE_TENSOR, "b": {**ONE_TENSOR, "data_offsets": [8, 24]}}, None),
    "a shape whose product overflows": ({"a": {**ONE_TENSOR, "shape": [2**32, 2**32]}}, None),
    "an end before its beginning": ({"a": {**ONE_TENSOR, "data_offsets": [16, 0]}}, None),
    "a type of the future": ({"a": {**ONE_TENSOR, "dtype": "F3"}}, None),
    "nested a thousand deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, None),
    "a hole between tensors": ({"a": ONE_TENSOR, "b": {**ONE_TENSOR, "data_offsets": [32, 48]}}, None),
    "ten thousand dimensions": ({"a": {**ONE_TENSOR, "shape": [1] * 10_000 + [2**63]}}, None),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(name: str, tmp_path: Path) -> None:
    header, size = HEADERS[name]
    assert "model.safetensors" in refused(safetensors(tmp_path, header, size=size))


CONFIGS: dict[str, dict[str, Any]] = {
    "a billion layers": {"num_hidden_layers": 10**9},
    "a vocabulary of a trillion": {"vocab_size": 10**12},
    "more heads than numbers": {"num_attention_heads": 2**31, "head_dim": 2**31},
    "no heads": {"num_key_value_heads": 0},
    "a context without end": {"max_position_embeddings": 10**18},
    "an epsilon that is none": {"rms_norm_eps": -1},
    "a theta of nothing": {"rope_theta": 0},
    "a factor of nothing": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "layers as text": {"num_hidden_layers": "2"},
    "a list of a million windows": {"layer_types": ["full_attention"] * 10**6},
    "an end token of the moon": {"eos_token_id": [2**70]},
    "an architecture of a megabyte": {"architectures": ["x" * 10**6]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | CONFIGS[name]))
    if name in ("a context without end", "a list of a million windows", "an end token of the moon"):
        ended(lambda: load(tmp_path))  # what is never used need not be refused
    else:
        refused(lambda: load(tmp_path))


def test_configs_of_any_size_and_kind(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**36)  # of which nothing is written
    assert "at most" in refused(lambda: load(tmp_path))


PIPES = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model-1.safetensors",
    "model.safetensors.index.json",
    "chat_template.jinja",
    "additional_chat_templates/x.jinja",
]


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_a_files_place_is_not_waited_for(name: str, tmp_path: Path) -> None:
    """Opening a pipe waits for a writer, and there is none."""
    write_folder(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    ended(lambda: load(tmp_path))


def tokenizer_json(folder: Path, **changes: Any) -> Callable[[], object]:
    write_folder(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return lambda: Tokenizer.from_folder(folder)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_tokenizer": split("(" * 300 + ")" * 300 + "[")}, "tokenizer.json"),
        ({"pre_tokenizer": split("a{1,99999999}")}, "tokenizer.json"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "tokenizer.json"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32}, "merges": []}}, "tokenizer.json"),
        ({"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}, "tokenizer.json"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": []}] * 3 + [{}]}}, "tokenizer"),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": "$A [X]", "pair": "$A", "special_tokens": {}}},
            "",
        ),
    ],
    ids=["groups", "repeats", "a merge of what is not there", "an id of 33 bits", "an id below 0", "decoders", "frame"],
)
def test_tokenizers(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refused(tokenizer_json(tmp_path, **changes))


@pytest.mark.parametrize("text", ["x" * 40, "x" * 5000, "x" * 100_000], ids=len)
def test_a_pattern_that_takes_for_ever_ends(text: str, tmp_path: Path) -> None:
    """`(x+x+)+y` tries every way to cut a run of x in two and more."""
    tokenizer_json(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [split("(x+x+)+y"), {**BYTES}]})
    tokenizer = Tokenizer.from_folder(tmp_path)
    ended(lambda: tokenizer.encode_compact(text))


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def gguf(path: Path, **changes: Any) -> Path:
    values = {"general.architecture": "llama", "general.alignment": 32} | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    path.write_bytes(gguf_bytes(values, {"token_embd.weight": np.zeros((2, 32), np.float32)}))
    return path


@pytest.mark.parametrize("offset", [8, 16], ids=["tensors", "keys"])
@pytest.mark.parametrize("number", [2**31, 2**63, 2**64 - 1])
def test_a_gguf_file_that_has_more_than_any(offset: int, number: int, tmp_path: Path) -> None:
    path = gguf(tmp_path / "a.gguf")
    content = bytearray(path.read_bytes())
    content[offset : offset + 8] = struct.pack("<Q", number)
    path.write_bytes(content)
    refused(lambda: GGUFFile(path))


@pytest.mark.parametrize("alignment", [0, 1, 3, 2**32 - 1])
def test_a_gguf_file_aligned_to_nothing(alignment: int, tmp_path: Path) -> None:
    refused(lambda: GGUFFile(gguf(tmp_path / "a.gguf", general__alignment=alignment)))


def test_a_gguf_file_of_gguf_files(tmp_path: Path) -> None:
    """Lists of lists, which nobody writes, a hundred thousand deep."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    (tmp_path / "a.gguf").write_bytes(head + struct.pack("<IQ", 9, 1) * 100_000)
    assert "array" in refused(lambda: GGUFFile(tmp_path / "a.gguf"))


LONG = "x" * 10**6


@pytest.mark.parametrize(
    "changes",
    [
        {"general__architecture": LONG},
        {"general__architecture": "gemma" + "9" * 10**6},
        {LONG: 1},
        {"general__alignment": LONG},
        {"tokenizer__ggml__model": LONG},
        {"tokenizer__ggml__pre": LONG},
        {"tokenizer__ggml__merges": [LONG]},
        {"tokenizer__ggml__tokens": [LONG, LONG]},
        {"llama__rope__scaling__type": LONG},
        {"llama__block_count": LONG},
    ],
    ids=lambda changes: f"{next(iter(changes))[:30]} {str(next(iter(changes.values())))[:6]}",
)
def test_no_text_of_a_gguf_file_is_sent_back(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {name.replace("__", "."): value for name, value in changes.items()})
    refused(lambda: load(path))


@pytest.mark.parametrize("name", ["x" * 1025, "blk." + "9" * 5000 + ".attn_q.weight", LONG], ids=len)
def test_a_gguf_file_whose_tensor_has_a_long_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({}, {name: np.zeros((2, 32), np.float32)}))
    assert f"the name of a tensor has {len(name):,} characters" in refused(lambda: GGUFFile(tmp_path / "a.gguf"))


@pytest.mark.parametrize("size", [1, 8, 23, 24, 40, 100, 500, 2000, 4000, 60_000])
def test_a_gguf_file_that_ends_early(size: int, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole[:size])
    told = refused(lambda: GGUFFile(tmp_path / "a.gguf"))
    assert "is truncated" in told or f"it ends beyond the {size:,} bytes of the file" in told


NUL = {"lm_head.weight": "a\0.safetensors"}
EMOJI = {"lm_head.weight": "\U0001f600" * 99 + ".safetensors"}


def test_an_index_of_long_names(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for listed in ({LONG: "model-1.safetensors"}, {LONG: LONG}, {"lm_head.weight": LONG + ".safetensors"}, NUL, EMOJI):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        refused(lambda: load(tmp_path))


def test_a_vocabulary_with_a_hole_of_gigabytes(tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "a.gguf").read_bytes())
    place = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4 + 4
    content[place : place + 8] = struct.pack("<Q", 2**40)
    (tmp_path / "a.gguf").write_bytes(content)
    assert "tokenizer.ggml.tokens" in refused(lambda: GGUFFile(tmp_path / "a.gguf"))


def test_an_event_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sinks, "MAX_LINE_CHARS", 10**6)
    (tmp_path / "log").write_text('{"event": "' + "x" * 2 * 10**6)
    with pytest.raises(UnreadableEvent, match="line 1: a line of more than 1000000 characters"):
        list(read_events(tmp_path / "log"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"version": 2, "step_s": [[1, 1e400]]}',
        b'{"version": "' + b"9" * 10**6 + b'"}',
        b"\x00" * 1000,
        b"{}" * 1000,
    ],
    ids=["empty", "null", "deep", "infinite", "a long version", "zeros", "two"],
)
def test_calibrations(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(content)
    assert "calibration" in refused(lambda: Calibration.read(path))


def test_a_calibration_without_an_end() -> None:
    assert "more than 16777216 bytes" in refused(lambda: Calibration.read(Path("/dev/zero")))


LOGS: dict[str, Callable[[list[str]], list[str]]] = {
    "backwards": lambda lines: lines[::-1],
    "without its beginning": lambda lines: lines[len(lines) // 2 :],
    "twice": lambda lines: lines * 2,
    "only its beginning": lambda lines: lines[:1],
    "every second line": lambda lines: lines[::2],
    "with a blank line": lambda lines: [*lines[:5], "", *lines[5:]],
    "with a byte order mark": lambda lines: ["\ufeff" + lines[0], *lines[1:]],
    "times at one moment": lambda lines: [json.dumps({**json.loads(line), "time_s": 1.0}) for line in lines],
    "times that run backwards": lambda lines: [
        json.dumps({**json.loads(line), "time_s": 1e6 - place}) for place, line in enumerate(lines)
    ],
    "one request of all": lambda lines: [line.replace('"1-', '"0-') for line in lines],
}


@pytest.mark.parametrize("name", LOGS)
def test_event_logs(name: str, tmp_path: Path) -> None:
    kind = KINDS["event log"]
    kind.write(tmp_path)
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(LOGS[name](path.read_text().splitlines())) + "\n")
    ended(lambda: kind.read(tmp_path))
