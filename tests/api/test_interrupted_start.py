"""Ctrl-C while a server of two pools starts: it ends at once and says nothing of Python's."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn

from forked_process import forked_engines
from twostroke.api.serve import DrainingServer
from twostroke.client.engine_client import EngineState
from twostroke.cluster.engine_process import EngineProcess
from twostroke.cluster.launcher import LocalLauncher
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig

CONFIG = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=200)
MOMENTS: dict[str, tuple[type[Any], str]] = {
    "launched": (LocalLauncher, "launch"),
    "loading": (EngineProcess, "first_report"),
    "loaded": (PooledEngine, "worker_ready"),
}
STARTS = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
STARTS += "from twostroke.cli.main import main\nprint('begins', flush=True)\nmain()\n"
"""Minds Ctrl-C, although a shell may run the tests in the background, where it is ignored."""
MOMENTS_S = (0.02, 0.3, 0.7, 1.1, 1.5, 1.9, 2.3, 2.8, 3.4, 4.0)


@pytest.fixture
def forking() -> Iterator[None]:
    """Let the engine's processes be forked."""
    with forked_engines():
        yield


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_start_that_is_given_up_leaves_nothing_and_says_nothing(
    moment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name = MOMENTS[moment]
    done = getattr(owner, name)

    async def start() -> None:
        is_reached = asyncio.Event()

        async def noticed(*arguments: Any, **more: Any) -> Any:
            is_reached.set()
            return await done(*arguments, **more)

        monkeypatch.setattr(owner, name, noticed)
        engine = PooledEngine(CONFIG, PoolConfig(prefill=1, decode=1))
        starting = asyncio.create_task(engine.start())
        await is_reached.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert engine.health().state is EngineState.CLOSED
        assert not engine.pids

    asyncio.run(start())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("pools", [(), ("--prefill", "1", "--decode", "1")], ids=["one process", "two pools"])
@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_ctrl_c_at_any_moment_is_silent(moment_s: float, pools: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ["serve", "embedded", "--port", "0", "--threads", "1", "--num-kv-blocks", "200", *pools]
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        server = subprocess.Popen([sys.executable, "-c", STARTS, *arguments], stdout=subprocess.PIPE, stderr=file)
        with server:
            assert server.stdout is not None
            server.stdout.readline()
            time.sleep(moment_s)
            server.send_signal(signal.SIGINT)
            code = server.wait(60)
    said = errors.read_text()
    assert "Traceback" not in said, said
    assert "Error" not in said, said
    assert "never awaited" not in said, said
    assert code == (130 if "serving" not in said else 0), said


def test_a_start_that_is_given_up_does_not_say_that_it_serves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal came before uvicorn minded it, and what there is left to start does not wait for anything."""

    async def nothing(*_: object, **__: object) -> None:
        pass

    async def start() -> None:
        server = DrainingServer(uvicorn.Config("app"), cast(Any, None), 1.0, "http://here", on_end=nothing)
        await server.startup()
        assert capsys.readouterr().err == "serving  http://here\n"
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await server.startup()
        assert not capsys.readouterr().err
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        task.uncancel()

    monkeypatch.setattr(uvicorn.Server, "startup", nothing)
    asyncio.run(start())
