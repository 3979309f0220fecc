"""Time at which a server was ready, and the parts of its start-up time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server_process import SERVE, ServerProcess
from twostroke.kernels import native

READY = re.compile(
    r"ready    (\d+\.\d\d) s after the start; imports (\d+\.\d\d) s here and (\d+\.\d\d) s in the engine's process, "
    r"where the model then took (\d+\.\d\d) s"
)


@contextmanager
def serving(*arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, command=SERVE)
    try:
        yield server
    finally:
        server.stop()


def times(server: ServerProcess) -> tuple[float, ...]:
    found = READY.search(server.stderr)
    assert found is not None, server.stderr
    return tuple(map(float, found.groups()))


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell when a process was started")
def test_imports_are_told_apart() -> None:
    with serving() as server:
        assert server.http.get("/ready").status_code == 200
        ready_s, here_s, engine_s, model_s = times(server)
        assert min(here_s, engine_s, model_s) > 0
        assert ready_s > here_s
        assert ready_s > engine_s + model_s - 0.02, "the engine process starts with the server, or later"


@pytest.mark.skipif(not native.is_built(), reason="the native kernels pack")
def test_the_next_start_takes_what_the_first_one_packed(tmp_path: Path) -> None:
    answers: list[str] = []
    for _ in range(2):
        with serving("--packed-cache", str(tmp_path), "--quantization", "int4") as server:
            asked = {"model": "embedded", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
            answers.append(server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"])
            assert "packed_cache" not in server.stderr
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    with serving("--packed-cache", str(tmp_path), "--quantization", "int4") as server:
        answers.append(server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"])
        assert f"{kept} cannot be used (it is cut short, or not a cache file) and is made again" in server.stderr
    assert len(set(answers)) == 1
