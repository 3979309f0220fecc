"""PackedCache: a model's weights in packed form, kept in a file from one start to the next.

A file is written once under a temporary name and then renamed, so it is complete or absent. It begins with the
weights, each aligned to a page, and ends with their index:

    panels …            of each weight, as kernels read them
    index               JSON: the key, the place of each weight, hashes
    last 64 bytes       where the index begins, its length, its hash, MAGIC

The file is mapped: processes share its memory, and nothing is copied. Such a file is never modified. If it is
replaced or removed, processes that have mapped it keep the old content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from twostroke.errors import CorruptCheckpoint, SetupError
from twostroke.gguf.container import parts_of
from twostroke.kernels import native
from twostroke.kernels.interface import Weight
from twostroke.kernels.packed_weight import PackedWeight
from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.kernels.stacked_weight import StackedWeight
from twostroke.kernels.streamed_weight import StreamedWeight
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.version import __version__

log = get_logger(__name__)

MAGIC = b"twostroke pack 1"
_TAIL = struct.Struct("<QQ32s16s")
_PAGE = 4096
_HASHED_AT_ONCE = 1 << 24
_HEADER_BYTES = 1 << 24
"""First bytes of a GGUF file that the key hashes: the whole header, and some weights."""
_LARGEST_INDEX = 1 << 28
_DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}


def default_folder() -> Path:
    """Return the default folder of the cache.

    Raises:
        SetupError: the user's home folder is unknown.
    """
    try:
        return Path.home() / ".cache" / "twostroke" / "packed"
    except RuntimeError as error:
        raise SetupError("packed_cache: the home folder is not known. Set HOME, or give a folder.") from error


class PackedCache:
    """One file of the cache: read weight by weight if it fits this model and form, otherwise written anew.

    Enter it while the model is built: a file in progress is completed at the end, or removed.

    Args:
        folder: folder of the cache, created if absent.
        model: the folder or file of the model.
        form: settings that the packed form depends on beside the model's files: dtype, quantization, processor level.
        verify: hash the model's files and the cache's, and compare them with the stored hashes.

    Raises:
        SetupError: the folder cannot be created.
        CorruptCheckpoint: with `verify`, a hash differs.
    """

    def __init__(self, folder: Path, model: Path, form: Mapping[str, Any], *, verify: bool = False) -> None:
        self._sources = _source_files(model)
        self._key = _key(model, self._sources, form)
        named = json.dumps([str(model.absolute()), dict(form)], sort_keys=True)
        self.path = folder / f"{model.stem}-{hashlib.blake2b(named.encode(), digest_size=8).hexdigest()}.packed"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"packed_cache: {folder} cannot be created ({error.strerror}). Give another folder, or leave it out."
            ) from error
        self._kept = self._open(verify=verify)
        self._writer: _Writer | None = None

    def find(self, name: str) -> list[PackedWeight] | None:
        """Return the packed form of a weight, one for each separately packed part; None: it is not in the cache."""
        return None if self._kept is None else self._kept.get(name)

    def keep(self, name: str, packed: PackedWeight) -> None:
        """Add the packed form of a weight, or of its next part. A full disk disables the cache and does not stop the
        start."""
        if self._writer is not None:
            try:
                self._writer.add(name, packed)
            except OSError as error:
                self._disable(error)

    def __enter__(self) -> Self:
        if self._kept is None:
            try:
                self._writer = _Writer(self.path)
            except OSError as error:
                self._disable(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._writer is None:
            return
        if error is not None:
            self._writer.drop()
            return
        try:
            self._writer.finish({"key": self._key, "hashes": [_hash_of(path) for path in self._sources]})
        except OSError as trouble:
            self._disable(trouble)
        else:
            log.info("%s: packed weights are stored for later starts", self.path)

    def _disable(self, error: OSError) -> None:
        if self._writer is not None:
            self._writer.drop()
            self._writer = None
        log.warning(
            "packed_cache: %s cannot be written (%s); until it can, the model is packed at every start",
            self.path,
            error.strerror or reason_of(error),
        )

    def _open(self, *, verify: bool) -> dict[str, list[PackedWeight]] | None:
        """Return the cached weights; None if there are none, or (with a warning) if they do not fit or are damaged."""
        try:
            with self.path.open("rb") as file:
                index, content = _read(file)
        except FileNotFoundError:
            return None
        except (OSError, _InvalidCache) as error:
            log.warning("packed_cache: %s cannot be used (%s) and is made again", self.path, reason_of(error))
            return None
        other = [name for name, value in self._key.items() if index["key"].get(name) != value]
        if other:
            log.warning("packed_cache: %s was made for another %s and is made again", self.path, ", ".join(other))
            return None
        if verify:
            self._verify(index, content)
        if native_checksum(content) != index["checksum"]:
            log.warning("packed_cache: %s is damaged (its checksum differs) and is made again", self.path)
            return None
        return {name: [_packed(part, content) for part in parts] for name, parts in index["weights"].items()}

    def _verify(self, index: Mapping[str, Any], content: Tensor) -> None:
        """Compare the hashes of all files with those taken when the cache was made."""
        for path, expected in zip(self._sources, index["hashes"], strict=True):
            if _hash_of(path) != expected:
                raise CorruptCheckpoint(
                    f"{path}: its hash has changed since {self.path} was made, but not its size and time: the file is "
                    f"damaged or was modified. Download it again, and remove {self.path}."
                )
        digest = hashlib.blake2b(content.numpy().data, digest_size=32).hexdigest()
        if digest != index["hash"]:
            raise CorruptCheckpoint(f"{self.path}: its hash has changed since it was made. Remove it.")


class CachedWeights(Mapping[str, Weight]):
    """A model's weights; packed ones are read from the cache, or written to it when they are packed."""

    def __init__(self, weights: Mapping[str, Weight], packed: Set[str], cache: PackedCache) -> None:
        """Wrap weights, of which those named in `packed` are cached."""
        self._weights, self._packed, self._cache = weights, packed, cache

    def __getitem__(self, name: str) -> Weight:
        if name not in self._packed:
            return self._weights[name]
        kept = self._cache.find(name)
        if kept is not None:
            parts = tuple(StreamedWeight(part.shape, part.dtype, _unread, packed=part) for part in kept)
            return parts[0] if len(parts) == 1 else StackedWeight(parts)
        found = self._weights[name]
        keep = partial(self._cache.keep, name)
        if isinstance(found, StackedWeight):
            return StackedWeight(tuple(_caching(part, keep) for part in found.parts))
        return _caching(found, keep)

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # Mapping's default would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _caching(weight: Tensor | QuantizedWeight | StreamedWeight, keep: Callable[[PackedWeight], None]) -> StreamedWeight:
    if isinstance(weight, StreamedWeight):
        return StreamedWeight(weight.shape, weight.dtype, weight.rows, weight.stored, save_packed=keep)

    def rows(begin: int, end: int) -> Tensor | QuantizedWeight:
        return weight[begin:end] if isinstance(weight, Tensor) else weight.select_rows(slice(begin, end))

    return StreamedWeight((weight.shape[0], weight.shape[1]), weight.dtype, rows, save_packed=keep)


def _unread(begin: int, end: int) -> Tensor:
    raise AssertionError(f"rows {begin} to {end} of a weight that is packed")


def native_checksum(content: Tensor) -> int:
    """Return the checksum of bytes, computed by all threads."""
    from twostroke.kernels.native.extension import native as module

    return module.checksum(content.data_ptr(), len(content))


class _InvalidCache(Exception):
    """The file is not a complete cache."""


class _Writer:
    """Writer of a cache file under a temporary name in the same folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".part", dir=path.parent)
        self._file, self._part = os.fdopen(descriptor, "w+b"), Path(name)
        self._weights: dict[str, list[dict[str, Any]]] = {}

    def add(self, name: str, packed: PackedWeight) -> None:
        entry: dict[str, Any] = {
            "shape": list(packed.shape),
            "dtype": str(packed.dtype),
            "is_gated": packed.is_gated,
            "format": None if packed.format is None else _described(packed.format),
            "panels": self._put(packed.panels),
            "order": None if packed.order is None else self._put(packed.order.contiguous().view(torch.uint8)),
        }
        self._weights.setdefault(name, []).append(entry)

    def _put(self, content: Tensor) -> list[int]:
        """Write content; return its first byte and its size in bytes."""
        begin = -(-self._file.tell() // _PAGE) * _PAGE
        self._file.write(b"\0" * (begin - self._file.tell()))
        self._file.write(content.numpy().data)
        return [begin, len(content)]

    def finish(self, known: Mapping[str, Any]) -> None:
        """Write the index, and rename the file to its final path."""
        self._file.flush()
        num_bytes = self._file.tell()
        content = _mapped(self._file, num_bytes)
        digest = hashlib.blake2b(content.numpy().data, digest_size=32).hexdigest()
        index = dict(known) | {"weights": self._weights, "hash": digest, "checksum": native_checksum(content)}
        encoded = json.dumps(index).encode()
        self._file.write(encoded)
        self._file.write(_TAIL.pack(num_bytes, len(encoded), _digest(encoded), MAGIC))
        self._file.close()
        self._part.replace(self._path)

    def drop(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()


def _read(file: BinaryIO) -> tuple[dict[str, Any], Tensor]:
    """Return the index, and the bytes of all weights.

    Raises:
        _InvalidCache: the file is not complete.
    """
    size = file.seek(0, os.SEEK_END)
    if size < _TAIL.size:
        raise _InvalidCache("it is cut short")
    file.seek(size - _TAIL.size)
    begin, length, digest, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic != MAGIC or length > _LARGEST_INDEX or begin + length + _TAIL.size != size or not begin:
        raise _InvalidCache("it is cut short, or not a cache file")
    file.seek(begin)
    encoded = file.read(length)
    if _digest(encoded) != digest:
        raise _InvalidCache("its index is damaged")
    return json.loads(encoded), _mapped(file, begin)


def _mapped(file: BinaryIO, num_bytes: int) -> Tensor:
    pages = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # few file systems support huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _packed(entry: Mapping[str, Any], content: Tensor) -> PackedWeight:
    def part(place: Sequence[int]) -> Tensor:
        return content[place[0] : place[0] + place[1]]

    return PackedWeight(
        (entry["shape"][0], entry["shape"][1]),
        _DTYPES[entry["dtype"]],
        entry["is_gated"],
        None if entry["format"] is None else _format_of(entry["format"]),
        part(entry["panels"]),
        None if entry["order"] is None else part(entry["order"]).view(torch.int32),
    )


def _described(found: QuantizedFormat) -> dict[str, Any]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(found).items()}


def _format_of(described: Mapping[str, Any]) -> QuantizedFormat:
    digest = described["order_digest"]
    found = QuantizedFormat(**{name: value for name, value in described.items() if name != "order_digest"})
    return found if digest is None else replace(found, order_digest=bytes.fromhex(digest))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _source_files(model: Path) -> list[Path]:
    """Return the files that weights are read from: parts of a GGUF file, or a folder's safetensors and config files."""
    if model.is_dir():
        found = [*model.glob("*.safetensors"), *model.glob("*.json")]
        return sorted(path for path in found if not path.name.startswith(("tokenizer", "generation_config")))
    return parts_of(model)


def _key(model: Path, sources: Sequence[Path], form: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that has to match, under names used in the warning of a mismatch."""
    states = [path.stat() for path in sources]
    return {
        "path": str(model.absolute()),
        "size": [state.st_size for state in states],
        "time": [state.st_mtime_ns for state in states],
        "header": [_hash_of(path, _header_bytes(path)) for path in sources],
        "form": dict(form),
        "version of twostroke": [__version__, _hash_of(Path(native.module_file()))],
    }


def _header_bytes(path: Path) -> int:
    if path.suffix != ".safetensors":
        return _HEADER_BYTES
    with path.open("rb") as file:
        length = file.read(8)
    return 8 + (int.from_bytes(length, "little") if len(length) == 8 else 0)


def _hash_of(path: Path, most: int | None = None) -> str:
    """Return the hash of a file, or of its first bytes."""
    digest, left = hashlib.blake2b(digest_size=32), path.stat().st_size if most is None else most
    with path.open("rb", buffering=0) as file:
        while left > 0 and (content := file.read(min(left, _HASHED_AT_ONCE))):
            digest.update(content)
            left -= len(content)
    return digest.hexdigest()
