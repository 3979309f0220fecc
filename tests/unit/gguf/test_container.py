"""Our reader of GGUF files against the package `gguf`, on files of llama.cpp; what is damaged is refused by name."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import NAMES, changed, fixture
from tiers import examples
from twostroke.errors import CorruptCheckpoint, ModelNotFound, SetupError, UnsupportedModel
from twostroke.gguf.container import NAMES as OTHER_NAMES
from twostroke.gguf.container import TYPES, GGUFFile
from twostroke.model.model_path import gguf_path
from twostroke.startup.handover_setup import fingerprint

SMALL = fixture("qwen3-q4_0")
CONTENT = SMALL.read_bytes()
DATA_BEGIN = GGUFReader(SMALL).data_offset


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_read_as_gguf_reads_it(name: str) -> None:
    ours, theirs = GGUFFile(fixture(name)), GGUFReader(fixture(name))
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(expected)
    for key, value in expected.items():
        assert same_value(ours, key) == value, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.type.name == tensor.tensor_type.name
        assert list(found.shape) == tensor.shape.tolist()[::-1]
        assert np.array_equal(found.data, tensor.data.view(np.uint8))


def same_value(file: GGUFFile, key: str) -> Any:
    """Return the value by the accessor of its type."""
    metadata = file.metadata
    for question in (metadata.text, metadata.number_or_flag, metadata.texts, metadata.numbers):
        try:
            return question(key)
        except CorruptCheckpoint:
            continue
    raise AssertionError(key)


def test_types_have_the_sizes_and_names_of_ggml() -> None:
    for number, kind in TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (kind.name, kind.block_size, kind.block_bytes) == (theirs.name, *GGML_QUANT_SIZES[theirs])
    for number, name in OTHER_NAMES.items():
        assert GGMLQuantizationType(number).name == name


@pytest.mark.parametrize("end", [0, 3, 4, 8, 20, 24, 31, 100, 500, DATA_BEGIN - 1, DATA_BEGIN, len(CONTENT) - 33])
def test_a_truncated_file_is_refused(end: int, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(CONTENT[:end])
    with pytest.raises(CorruptCheckpoint, match=r"truncated|empty|cannot be read"):
        GGUFFile(path)


@settings(max_examples=examples(300))
@given(at=st.integers(0, DATA_BEGIN - 1), value=st.integers(0, 255))
def test_a_damaged_header_is_read_or_refused(at: int, value: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No byte makes it fail in any other way, or ask for memory that the file does not have."""
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(CONTENT[:at] + bytes([value]) + CONTENT[at + 1 :])
    with suppress(SetupError):
        GGUFFile(path)


def test_a_truncated_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(CONTENT[: DATA_BEGIN + 40])
    with pytest.raises(CorruptCheckpoint, match=r"truncated: output_norm.weight ends at byte \d+ of \d+"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK" + CONTENT[2:], "does not begin with 'GGUF'"),
        (CONTENT[:4] + struct.pack("<I", 1) + CONTENT[8:], "GGUF version 1; known: 2 and 3"),
        (CONTENT[:4] + struct.pack(">I", 3) + CONTENT[8:], "big-endian"),
    ],
    ids=["magic", "version", "byte-order"],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=message):
        GGUFFile(path)


def test_a_tensor_of_another_type_is_named(tmp_path: Path) -> None:
    path = changed("llama-f32", tmp_path / "x.gguf", tensors={"extra": np.zeros((2, 4), np.int32)})
    with pytest.raises(UnsupportedModel, match=r"extra has type I32; known: F32, F16, BF16, Q4_0"):
        GGUFFile(path)


def split(folder: Path, *, max_tensors: int = 5) -> list[Path]:
    """A fixture in parts, as gguf's writer splits it."""
    reader = GGUFReader(fixture("llama-f32"))
    writer = GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=max_tensors)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *of_items = field.types
            writer.add_key_value(key, field.contents(), kind, of_items[0] if of_items else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


def test_a_split_model_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    parts = split(tmp_path)
    whole = GGUFFile(fixture("llama-f32"))
    assert len(parts) > 2
    for path in (parts[0], parts[-1], gguf_path(str(tmp_path))):
        assert path is not None
        file = GGUFFile(path)
        assert file.path == parts[0]
        assert file.metadata.text("general.architecture") == "llama"
        assert file.tensors.keys() == whole.tensors.keys()
        for name, tensor in file.tensors.items():
            assert np.array_equal(tensor.data, whole.tensors[name].data)


def test_a_first_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    first, second, *_ = split(tmp_path)
    first.unlink()
    for path in (second, gguf_path(str(tmp_path))):
        assert path is not None
        with pytest.raises(
            ModelNotFound, match=rf"{first.name}, the first part of the model, does not exist\. Download"
        ):
            GGUFFile(path)


@pytest.mark.parametrize(
    ("place", "key", "kind", "value"),
    [(0, "split.no", "<H", 1), (1, "split.count", "<H", 9), (1, "split.tensors.count", "<i", 1)],
)
def test_parts_of_two_models_are_refused(place: int, key: str, kind: str, value: int, tmp_path: Path) -> None:
    parts = split(tmp_path)
    content = parts[place].read_bytes()
    at = content.index(key.encode()) + len(key) + 4
    found = struct.pack(kind, value)
    parts[place].write_bytes(content[:at] + found + content[at + len(found) :])
    with pytest.raises(CorruptCheckpoint, match=rf"{parts[place].name}: {key} must be \d+, as .* found {value}\."):
        GGUFFile(parts[0])


def test_all_parts_of_a_split_model_are_its_identity(tmp_path: Path) -> None:
    parts = split(tmp_path)
    before = fingerprint(parts[0])
    content = bytearray(parts[-1].read_bytes())
    content[-1] ^= 1
    parts[-1].write_bytes(content)
    assert fingerprint(parts[0]) != before


def test_parts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    first, second, *_ = split(tmp_path)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelNotFound, match=r"first of \d+ parts, but m-00002-of-\d+\.gguf is missing"):
        GGUFFile(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptCheckpoint, match=r"split.no must be 1, as the file's name says, found 0"):
        GGUFFile(first)
    at = content.index(b"split.no") + len("split.no") + 4
    second.write_bytes(content[:at] + struct.pack("<H", 7) + content[at + 2 :])
    with pytest.raises(CorruptCheckpoint, match=r"split.no must be 1, as the file's name says, found 7"):
        GGUFFile(first)
    renamed = tmp_path / "other.gguf"
    first.rename(renamed)
    with pytest.raises(CorruptCheckpoint, match=r"one of \d+ parts .* but its name does not say so"):
        GGUFFile(renamed)


def test_data_that_is_not_aligned_is_refused(tmp_path: Path) -> None:
    path = changed("llama-f32", tmp_path / "x.gguf", {"general.alignment": 4})
    with pytest.raises(CorruptCheckpoint, match=r"general.alignment must be a multiple of 8, found 4"):
        GGUFFile(path)
    at = CONTENT.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16 + 4
    path.write_bytes(CONTENT[:at] + struct.pack("<Q", 36) + CONTENT[at + 8 :])
    with pytest.raises(CorruptCheckpoint, match=r"attn_q.weight begins at 36; it must be a multiple of 8"):
        GGUFFile(path)


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"missing\.gguf"):
        GGUFFile(tmp_path / "missing.gguf")


def test_values_of_the_wrong_kind_are_named(tmp_path: Path) -> None:
    file = GGUFFile(changed("llama-f32", tmp_path / "x.gguf", {"a": "text", "b": True, "c": [1, 2], "d": -3}))
    for ask in (lambda: file.metadata.count("a"), lambda: file.metadata.count("b"), lambda: file.metadata.number("b")):
        with pytest.raises(CorruptCheckpoint, match=r"x.gguf: [ab] must be a .*number.*, found"):
            ask()
    with pytest.raises(CorruptCheckpoint, match="c must be a list of strings"):
        file.metadata.texts("c")
    with pytest.raises(CorruptCheckpoint, match=r"d must be a whole number, 1 to \d+, found -3"):
        file.metadata.count("d")
    with pytest.raises(CorruptCheckpoint, match="the metadata has no e; it must be a string"):
        file.metadata.text("e")
