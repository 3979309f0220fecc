"""Whatever stands in a file that comes from elsewhere: it is read, or refused by one of our own errors."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.hostile.mutations import mutated_bytes, mutated_json, mutated_template
from benchmarks.hostile.sound_files import CHATML, gguf_bytes, write_folder
from benchmarks.reproduce.hostile_files import KINDS, mutated_copy, outcome_of
from twostroke.cli.doctor import doctor
from twostroke.cli.explain import explain
from twostroke.cli.replay import replay
from twostroke.cost.calibration import Calibration
from twostroke.engine.event_sinks import consistent_events, read_events
from twostroke.errors import CorruptCheckpoint, InvalidParameter, UnreadableEvent
from twostroke.gguf.container import GGUFFile
from twostroke.tokenizer.tokenizer import Tokenizer

PARTS = 20
"""Of the files of one kind; the first tier takes the first part."""
FILES = {"template": 3}
"""In a part; a template may take a second."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with sound files of a kind."""
    folders: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("sound")
            KINDS[kind].write(folders[kind])
            KINDS[kind].read(folders[kind])
        return folders[kind]

    return of


@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in KINDS for part in range(PARTS)])
def test_mutated_files_end_in_our_errors(
    kind: str, part: int, sound: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    del capfd  # the tokenizer's library writes of its panics
    number = FILES.get(kind, 15)
    for seed in range(part * number, (part + 1) * number):
        path = mutated_copy(KINDS[kind], sound(kind), tmp_path / "copy", seed)
        outcome = outcome_of(KINDS[kind].read, path)
        assert not outcome.startswith("!"), f"{kind} {seed}: {outcome}"


def test_mutations_are_seeded_and_change_something() -> None:
    content, value = bytes(range(256)), {"a": [1, {"b": 2.5}], "c": "text"}
    makers: tuple[Callable[[Random], Any], ...] = (
        lambda random: mutated_bytes(content, random),
        lambda random: mutated_json(value, random),
        lambda random: mutated_template(CHATML, random),
    )
    for make in makers:
        found = [make(Random(seed)) for seed in range(40)]
        assert found == [make(Random(seed)) for seed in range(40)]
        assert len(set(found)) > 20


def test_a_text_of_gguf_that_is_longer_than_any_file(tmp_path: Path) -> None:
    values = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["first", "second", "third"]}
    whole = gguf_bytes(values, {})
    for length in (2**63 - 1, 2**63, 2**64 - 1):
        path = tmp_path / "a.gguf"
        path.write_bytes(whole.replace(struct.pack("<Q", 5) + b"first", struct.pack("<Q", length) + b"first"))
        with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.ggml\.tokens"):
            GGUFFile(path)


@pytest.mark.parametrize(
    "given",
    [
        {"eos_token": "\ud800"},
        {"eos_token": {"content": "a\udfff"}},
        {"additional_special_tokens": ["\ud800"]},
        {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}},
        {"added_tokens_decoder": {"5": {"content": "\ud800"}}},
    ],
    ids=str,
)
def test_tokens_that_no_tokenizer_can_have(given: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("event", "field", "value"),
    [
        ("StepCommitted", "time_s", "soon"),
        ("StepCommitted", "time_s", 1e300),
        ("StepCommitted", "step", 2**70),
        ("StepCommitted", "step", "first"),
        ("StepCommitted", "commits", [{"request_id": "a", "num_tokens": 1, "num_draft_tokens": 2**31}]),
        ("RequestArrived", "arrival", {"request_id": 5}),
        ("RequestArrived", "request_id", None),
        ("EngineStarted", "scheduler", []),
        ("EngineStarted", "num_blocks", 1.5),
        ("StepScheduled", "batch", {}),
    ],
)
def test_an_event_with_a_value_of_another_kind(
    event: str, field: str, value: Any, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = (sound("event log") / "events.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    place = next(i for i, record in enumerate(records) if record["event"] == event)
    records[place][field] = value
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UnreadableEvent, match=f"line {place + 1}"):
        list(read_events(path))


def test_events_are_read_as_they_were_written(sound: Callable[[str], Path]) -> None:
    assert len(list(read_events(sound("event log") / "events.jsonl"))) > 50


@pytest.mark.parametrize("most_drafts", [0, -1, 65, 2**40])
def test_a_calibration_with_drafts_that_nobody_can_make(
    most_drafts: int, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    content = json.loads((sound("calibration") / "calibration.json").read_text())
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content | {"most_drafts": most_drafts}))
    with pytest.raises(InvalidParameter, match="most_drafts"):
        Calibration.read(path)


@pytest.mark.parametrize("command", ["doctor", "replay", "explain"])
def test_a_log_whose_events_contradict_each_other(command: str, sound: Callable[[str], Path], tmp_path: Path) -> None:
    lines = (sound("event log") / "events.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"RequestArrived"' in line)
    request_id = json.loads(lines[place])["request_id"]
    path = tmp_path / "log"
    path.write_text("\n".join([*lines[: place + 1], *lines[place:]]) + "\n")
    commands: dict[str, Callable[[], object]] = {
        "doctor": lambda: doctor(path),
        "replay": lambda: replay(path),
        "explain": lambda: explain(request_id, event_log=(path,)),
    }
    with contextlib.suppress(InvalidParameter):
        commands[command]()
    with (
        pytest.raises(InvalidParameter, match=r"event_log=.*contradict each other \(1-3 is not unique\)"),
        consistent_events([path]),
    ):
        raise AssertionError("1-3 is not unique")
    with pytest.raises(UnreadableEvent), consistent_events([path]):
        raise UnreadableEvent("ours stays as it is")
