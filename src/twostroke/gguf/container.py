"""GGUF, the file format of llama.cpp: metadata and tensors in one file; tensor data stays on disk until it is read.

This reader replaces the package `gguf`, whose reader takes eight seconds for the 300,000 strings of a large
vocabulary (docs/decisions/012). The format is ggml's docs/gguf.md, versions 2 and 3:

    "GGUF"  version u32  num_tensors u64  num_keys u64
    key     text  type u32  value                                  for each key
    tensor  name  num_dims u32  dims u64[]  type u32  offset u64   for each tensor, innermost dimension first
    data    at the next multiple of general.alignment; offsets count from here

Texts are preceded by their length (u64), arrays by their type and length (u32, u64).

A model may be split into NAME-00001-of-00003.gguf and so on (`split.count`). The first part has the metadata; each
part has the infos and data of some tensors.

Two tables list ggml's number formats: the types that can be read, and the names of the others for messages. Names
and numbers are those of `enum ggml_type` in ggml.h. Blocks run along a row.
"""

from __future__ import annotations

import glob
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from twostroke.gguf.metadata import Metadata
from twostroke.lfs_pointer import remedy_for
from twostroke.plain_words import reason_of
from twostroke.weight_file import WeightFile


@dataclass(frozen=True, slots=True)
class TensorType:
    """A number format of ggml, stored in blocks along a row."""

    name: str
    block_size: int
    """Numbers per block."""
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether the numbers of a block share a scale."""
        return self.block_size > 1


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    21: TensorType("IQ3_S", 256, 110),
    18: TensorType("IQ3_XXS", 256, 98),
    22: TensorType("IQ2_S", 256, 82),
    17: TensorType("IQ2_XS", 256, 74),
    16: TensorType("IQ2_XXS", 256, 66),
    29: TensorType("IQ1_M", 256, 56),
    19: TensorType("IQ1_S", 256, 50),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}
"""Types that can be read, by their number in the file."""

NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
}
"""Names of types that cannot be read, for messages."""


_VERSIONS = (2, 3)
_MIN_READ_BYTES = 1 << 20
_DEFAULT_ALIGNMENT, _MIN_ALIGNMENT = 32, 8
_MAX_DIMS = 4
_MAX_NAME = 1024
"""Characters of a name; ggml limits tensor names to 64. Messages show names in full."""
_TEXT, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor stored in a file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    """Shape with the outermost dimension first, as in torch."""
    read: Callable[[int, int], npt.NDArray[np.uint8]]
    """Function of (first byte, number of bytes) that returns a copy of those bytes of the tensor."""
    file: WeightFile | None = None
    """File that contains the stored bytes unchanged; None: no file does."""
    begin: int = 0
    """Offset of its first byte in that file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is the innermost dimension."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """All bytes, [*shape[:-1], bytes of a row]; read from the file at each access."""
        return self.read(0, self.nbytes).reshape(*self.shape[:-1], self.row_bytes)

    def rows(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of some rows of a matrix, [end - begin, bytes of a row]."""
        assert len(self.shape) > 1, self.shape
        size = self.nbytes // self.shape[0]
        return self.read(begin * size, (end - begin) * size).reshape(end - begin, *self.shape[1:-1], self.row_bytes)


_REMEDY = "Download all parts into one folder."
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """Return the part that has the metadata of a split model, given any part; other paths are returned unchanged.

    >>> first_part(Path("m-00002-of-00003.gguf")).name
    'm-00001-of-00003.gguf'
    """
    part = _PART.fullmatch(path.name)
    return path if part is None else path.with_name(f"{part['name']}-00001-of-{part['count']}.gguf")


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model in order, given the path of any part."""
    part = _PART.fullmatch(path.name)
    return (
        [path]
        if part is None
        else sorted(path.parent.glob(f"{glob.escape(part['name'])}-?????-of-{part['count']}.gguf"))
    )


class GGUFFile:
    """Metadata and tensors of a model by name, from one file or from all parts of a split model."""

    path: Path
    """The file, or the first part of a split model."""
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]

    def __init__(self, path: Path) -> None:
        """Open the file, or all parts, and read everything except the tensors' data.

        Args:
            path: path of the file, or of any part.

        Raises:
            ModelNotFound: the file, or a part of it, does not exist.
            CorruptCheckpoint: the file is not GGUF or is truncated (the error names what was being read), or parts
                contradict each other.
            UnsupportedModel: the version, byte order or a tensor type cannot be read.
        """
        self.path = first_part(path)
        if _PART.fullmatch(self.path.name) and not self.path.exists():
            raise ModelNotFound(f"{self.path}, the first part of the model, does not exist. {_REMEDY}")
        first = _GGUFPart(self.path)
        self.metadata, self.tensors = first.metadata, first.tensors
        num_parts = self.metadata.count("split.count", 0, least=0)
        if num_parts > 1:
            self.tensors = self._of_all_parts(first, num_parts)

    def _of_all_parts(self, first: _GGUFPart, num_parts: int) -> dict[str, StoredTensor]:
        name = _PART.fullmatch(self.path.name)
        if name is None or int(name["count"]) != num_parts:
            raise CorruptCheckpoint(
                f"{self.path} is one of {num_parts} parts (split.count), but its name does not say so. Name the parts "
                f"NAME-00001-of-{num_parts:05}.gguf and so on, or join them with llama-gguf-split --merge."
            )
        names = [f"{name['name']}-{number:05}-of-{num_parts:05}.gguf" for number in range(2, num_parts + 1)]
        absent = [other for other in names if not self.path.with_name(other).exists()]
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            told = f"{self.path} is the first of {num_parts} parts, but {absent[0]}{more} is missing. {_REMEDY}"
            raise ModelNotFound(told)
        self._check_part(first, 1)
        tensors = dict(first.tensors)
        for number, other in enumerate(names, 2):
            part = _GGUFPart(self.path.with_name(other))
            self._check_part(part, number)
            twice = tensors.keys() & part.tensors.keys()
            if twice:
                raise CorruptCheckpoint(f"{part.path}: {min(twice)} is also in another part. Download it again.")
            tensors |= part.tensors
        expected = self.metadata.count("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise CorruptCheckpoint(
                f"{self.path}: its parts have {len(tensors)} tensors, but split.tensors.count is {expected}."
            )
        return tensors

    def _check_part(self, part: _GGUFPart, number: int) -> None:
        """Raise CorruptCheckpoint if a part's number or counts differ from its file name or from the first part."""
        if part.metadata.count("split.no", least=0) != number - 1:
            raise part.metadata.refuse("split.no", f"{number - 1}, as the file's name says")
        for key in ("split.count", "split.tensors.count"):
            if key in self.metadata and key in part.metadata:
                wanted = self.metadata.count(key)
                if part.metadata.count(key) != wanted:
                    raise part.metadata.refuse(key, f"{wanted}, as in {self.path.name}")


class _GGUFPart:
    """One file of a possibly split model."""

    metadata: Metadata
    tensors: Mapping[str, StoredTensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file = WeightFile(path)
        except OSError as error:
            raise ModelNotFound(f"{path} cannot be read ({error.strerror}). Check the path.") from error
        if not file.size:
            raise CorruptCheckpoint(f"{path} is empty. Download it again.")
        cursor = _Cursor(file)
        num_tensors, num_keys = self._read_header(cursor)
        self.metadata = Metadata(path.name, dict(cursor.pair() for _ in range(num_keys)))
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.count("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment % _MIN_ALIGNMENT:
            raise self.metadata.refuse("general.alignment", f"a multiple of {_MIN_ALIGNMENT}")
        begin = -(-cursor.position // alignment) * alignment
        self.tensors = {info[0]: self._stored(file, begin, *info) for info in infos}
        if len(self.tensors) != len(infos):
            raise CorruptCheckpoint(f"{path}: two tensors have the same name. Download it again.")

    def _read_header(self, cursor: _Cursor) -> tuple[int, int]:
        cursor.what = "the header"
        if cursor.take(4) != b"GGUF":
            told = f"{self.path} is not a GGUF file: it does not begin with 'GGUF'."
            raise CorruptCheckpoint(f"{told} {remedy_for(self.path, 'Check the path.')}")
        version = cursor.number("<u4")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            order = " (or the file is big-endian)" if version % 2**16 == 0 else ""
            raise UnsupportedModel(f"{self.path}: GGUF version {version}{order}; known: {known}, little-endian.")
        return cursor.number("<u8"), cursor.number("<u8")

    def _stored(
        self, file: WeightFile, begin: int, name: str, shape: tuple[int, ...], type_id: int, offset: int
    ) -> StoredTensor:
        if type_id not in TYPES:
            raise UnsupportedModel(
                f"{self.path}: {name} has type {NAMES.get(type_id, type_id)}; "
                f"known: {', '.join(known.name for known in TYPES.values())}."
            )
        kind = TYPES[type_id]
        if not shape or not all(shape) or shape[-1] % kind.block_size:
            raise CorruptCheckpoint(
                f"{self.path}: {name} is {list(shape)}; {kind.name} needs rows of a multiple of {kind.block_size}."
            )
        if offset % _MIN_ALIGNMENT:
            raise CorruptCheckpoint(
                f"{self.path}: {name} begins at {offset}; it must be a multiple of {_MIN_ALIGNMENT}."
            )

        def read(first: int, num_bytes: int) -> npt.NDArray[np.uint8]:
            return file.read(begin + offset + first, num_bytes, name)

        found = StoredTensor(name, kind, shape, read, file, begin + offset)
        if begin + offset + found.nbytes > file.size:
            raise CorruptCheckpoint(
                f"{self.path} is truncated: {name} ends at byte {begin + offset + found.nbytes} of {file.size}. "
                "Download it again."
            )
        return found


class _Cursor:
    """Sequential reader of everything before the tensors' data."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self._path = file, file.path
        self._content = b""
        """The part of the file read so far."""
        self.position = 0
        self.what = ""
        """Name of what is being read, for error messages."""

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self._file.size:
            raise CorruptCheckpoint(
                f"{self._path} is truncated: {self.what} goes to byte {end} of {self._file.size}. Download it again."
            )
        while end > len(self._content):
            self._read_more()
        found = self._content[self.position : end]
        self.position = end
        return found

    def _read_more(self) -> bool:
        """Read about as much again as was read so far; return whether there was more."""
        begin = len(self._content)
        num_bytes = min(max(begin, _MIN_READ_BYTES), self._file.size - begin)
        self._content += self._file.read(begin, num_bytes, self.what).tobytes()
        return num_bytes > 0

    def number(self, kind: str) -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize), kind)[0].item()

    def text(self) -> str:
        found = self.take(self.number("<u8"))
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(
                f"{self._path}: {self.what} cannot be read ({reason_of(error)}). Download it again."
            ) from error

    def pair(self) -> tuple[str, Any]:
        """Read the next key and its value."""
        self.what = "the name of a metadata key"
        key = self._name()
        self.what = key
        return key, self._value(self.number("<u4"))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the next tensor's name, shape, type and offset."""
        self.what = "the name of a tensor"
        name = self._name()
        self.what = f"the shape of {name}"
        num_dims = self.number("<u4")
        if num_dims > _MAX_DIMS:
            raise CorruptCheckpoint(
                f"{self._path}: {name} has {num_dims} dimensions; at most {_MAX_DIMS} are possible."
            )
        dims = tuple(self.number("<u8") for _ in range(num_dims))
        return name, dims[::-1], self.number("<u4"), self.number("<u8")

    def _name(self) -> str:
        name = self.text()
        if len(name) > _MAX_NAME:
            told = f"{self._path}: {self.what} has {len(name):,} characters; at most {_MAX_NAME:,} are possible."
            raise CorruptCheckpoint(told)
        return name

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("<u4"), self.number("<u8"))
        if kind not in _NUMBERS:
            raise CorruptCheckpoint(f"{self._path}: {self.what} has type {kind}, which GGUF does not define.")
        return self.number(_NUMBERS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == _TEXT:
            return self._texts(length)
        if kind not in _NUMBERS:
            raise UnsupportedModel(f"{self._path}: {self.what} is an array of type {kind}; known: strings and numbers.")
        return np.frombuffer(self.take(length * np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind]).tolist()

    def _texts(self, length: int) -> list[str]:
        texts: list[str] = []
        try:
            self._take_strings(texts, length)
            while len(texts) < length and self._read_more():
                self._take_strings(texts, length)
            reason = f"it ends beyond the {self._file.size:,} bytes of the file"
        except UnicodeDecodeError as error:
            reason = reason_of(error)
        if len(texts) < length:
            raise CorruptCheckpoint(
                f"{self._path}: {self.what}, entry {len(texts)} of {length}, cannot be read ({reason}). "
                "Download it again."
            )
        return texts

    def _take_strings(self, texts: list[str], length: int) -> None:
        """Append the strings that lie in the content read so far, until there are `length`.

        A vocabulary has several hundred thousand strings, so this loop has to be fast.
        """
        content, position = self._content, self.position
        size = len(content)
        try:
            for _ in range(length - len(texts)):
                begin = position + 8
                end = begin + struct.unpack_from("<Q", content, position)[0]
                if end > size:
                    break
                texts.append(content[begin:end].decode("utf-8"))
                position = end
        except struct.error:  # the length itself is cut off
            pass
        finally:
            self.position = position
