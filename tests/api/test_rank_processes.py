"""Ranks that are processes, and what happens when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from factories import submitted
from twostroke import LLM, SamplingParams
from twostroke.client.engine_client import OutputStream
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.config.engine import EngineConfig
from twostroke.errors import EngineError, SetupError

PATIENCE_S = 60.0
LONG = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, temperature=0)
SETTINGS = {"threads": 1, "num_kv_blocks": 600, "tensor_parallel_size": 2}


def ranks_of(parent: int) -> list[int]:
    """Return the process ids of the living ranks that a process has started."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(ppid) == parent and state != "Z" and b"twostroke.startup.rank_process" in command:
            found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


async def taken(stream: OutputStream) -> None:
    """Wait for the next output."""
    while not stream.take():
        something: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream.listen(lambda something=something: something.done() or something.set_result(None))
        await something


async def to_the_end(stream: OutputStream) -> None:
    while True:
        await taken(stream)


def test_two_processes_give_the_tokens_of_one_and_a_killed_one_is_named() -> None:
    with LLM(threads=1, num_kv_blocks=600) as one:
        expected = one.generate("The weather today", SHORT)[0].outputs[0].token_ids
    with LLM(**SETTINGS) as llm:
        assert llm.generate("The weather today", SHORT)[0].outputs[0].token_ids == expected
        (rank,) = ranks_of(os.getpid())
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 is lost"):
            llm.generate("The weather today", SHORT)
    assert not ranks_of(os.getpid())


def test_an_engine_whose_rank_died_since_the_last_step_still_closes() -> None:
    """Nothing is asked of that rank any more, and the others end as ever."""
    with LLM(**{**SETTINGS, "tensor_parallel_size": 4}) as llm:
        llm.generate("The weather today", SHORT)
        killed = ranks_of(os.getpid())[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not is_alive(killed), f"rank {killed} lives on")
    assert not ranks_of(os.getpid())


def test_an_engine_whose_rank_is_killed_is_replaced_and_a_killed_engine_leaves_no_rank() -> None:
    async def main() -> None:
        engine = RemoteEngine(EngineConfig.from_keywords(**SETTINGS))
        await engine.start()
        try:
            for by_rank in (True, False):
                while not engine.health().is_ready:
                    await asyncio.sleep(0.05)
                assert engine.pid is not None
                (rank,) = ranks_of(engine.pid)
                prepared = engine.inputs.process("The weather today", LONG)
                stream = engine.generate(submitted(engine, prepared, "r"))
                await taken(stream)
                os.kill(rank if by_rank else engine.pid, signal.SIGKILL)
                with pytest.raises(EngineError, match="rank 1 is lost" if by_rank else "signal 9"):
                    await to_the_end(stream)
                await asyncio.to_thread(wait_until, lambda rank=rank: not is_alive(rank), f"rank {rank} lives on")
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 3 * PATIENCE_S))


def test_a_rank_that_finds_nobody_says_so_and_one_that_cannot_load_ends_the_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "twostroke.startup.rank_process", "1", "2", str(tmp_path / "0")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "rank 1 of 2 found no rank 0" in found.stderr
    with pytest.raises(SetupError, match=r"tensor_parallel_address=203\.0\.113\.7:5555: ranks cannot meet there"):
        LLM(threads=1, tensor_parallel_size=2, tensor_parallel_address="203.0.113.7:5555")
