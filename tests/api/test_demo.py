"""`make run` and `make demo`: the example that a newcomer sees first."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gguf_files import fixture
from twostroke.model.named_models import NAMED_MODELS

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
PROMPT = DEMO.with_name("stack.txt").read_text(encoding="utf-8")


@contextmanager
def started(home: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[subprocess.Popen[str]]:
    """Start `make run` with a separate home and an index without packages."""
    for name, value in (("HOME", str(home)), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(home))):
        monkeypatch.setenv(name, value)
    command = [sys.executable, str(DEMO), "--port", "0", "--serve"]
    # a group of its own: Ctrl-C in a terminal reaches the whole group
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        try:
            yield demo
        except BaseException:
            os.killpg(demo.pid, signal.SIGKILL)
            raise


def shown_by(demo: subprocess.Popen[str]) -> str:
    assert demo.stdout is not None
    shown = ""
    while not shown.endswith("ends the server.\n"):
        line = demo.stdout.readline()
        assert line, f"it ended early: {shown}"
        shown += line
    return shown


def asked_again(command: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the address and body of a shown command, without its first word, and the whole answer to it."""
    words = shlex.split(command)
    url, body = words[1], json.loads(words[-1])
    return url, body, httpx.post(url, json={**body, "stream": False}, timeout=60).json()


def end(demo: subprocess.Popen[str], url: str) -> None:
    os.killpg(demo.pid, signal.SIGINT)
    assert demo.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_without_a_chat_model_the_embedded_one_is_served_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch) as demo:
        text, _, rest = shown_by(demo).partition("\n\ncurl ")
        url, _, answer = asked_again(rest.splitlines()[0])
        assert text == "\n" + PROMPT + answer["choices"][0]["text"]
        assert "smollm2 could not be fetched. The server goes on with the embedded model." in rest
        assert httpx.get(url.replace("/v1/completions", "/")).text.startswith("<!doctype html>")
        end(demo, url)


def test_a_chat_model_that_is_here_answers_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small random one stands in for it."""
    smollm2 = NAMED_MODELS["smollm2"]
    place = tmp_path / smollm2.path.relative_to(Path.home())
    place.parent.mkdir(parents=True)
    shutil.copy(fixture("qwen3-f32"), place)
    os.truncate(place, smollm2.num_bytes)  # one of another size would be fetched again
    receipt = tmp_path / smollm2.checked_file.relative_to(Path.home())
    receipt.write_text(f"{smollm2.sha256} {smollm2.num_bytes} {place.stat().st_mtime_ns}\n", encoding="utf-8")
    with started(tmp_path, monkeypatch) as demo:
        _, _, chat = shown_by(demo).partition("\n> ")
        question, _, rest = chat.partition("\n")
        text, _, rest = rest.partition("\n\ncurl ")
        url, body, answer = asked_again(rest.splitlines()[0])
        assert body["messages"] == [{"role": "user", "content": question}]
        assert text == answer["choices"][0]["message"]["content"]
        end(demo, url)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        ran = subprocess.run([sys.executable, str(DEMO), "--port", str(port)], capture_output=True, check=False)
    assert ran.returncode == 1
    assert f"make run PORT={port + 1}" in ran.stderr.decode()
