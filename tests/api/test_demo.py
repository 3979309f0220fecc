"""`make run` and `make demo`: the example that a newcomer sees first."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
PROMPT = DEMO.with_name("stack.txt").read_text(encoding="utf-8")


def test_it_shows_a_completion_and_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, str(DEMO), "--port", "0", "--serve"]
    # a group of its own: Ctrl-C in a terminal reaches the whole group
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        shown = ""
        while not shown.endswith("ends the server.\n"):
            line = demo.stdout.readline()
            assert line, f"it ended early: {shown}"
            shown += line
        text, _, rest = shown.partition("\n\ncurl ")
        words = shlex.split(rest.splitlines()[0])
        url, body = words[1], json.loads(words[-1])
        answer = httpx.post(url, json={**body, "stream": False}, timeout=60).json()
        assert text == "\n" + PROMPT + answer["choices"][0]["text"]
        assert httpx.get(url.replace("/v1/completions", "/")).text.startswith("<!doctype html>")
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        ran = subprocess.run([sys.executable, str(DEMO), "--port", str(port)], capture_output=True, check=False)
    assert ran.returncode == 1
    assert f"make run PORT={port + 1}" in ran.stderr.decode()
