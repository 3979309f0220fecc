"""Hanging processes are detected and replaced: a rank, a worker that loads, the fork server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drill import Drill, ask, prompts, run
from twostroke.client.engine_client import EngineState
from twostroke.cluster import pool_worker
from twostroke.cluster.forking import can_fork
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.pools.member import Role

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are looked up in /proc")
CONFIG = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=2000)
REQUESTS = prompts(6)
SOON_S = 60.0


@pytest.fixture(scope="module")
def undisturbed() -> Drill:
    """Answers of one process that does everything."""
    return asyncio.run(run(CONFIG, PoolConfig(decode=1), REQUESTS))


@contextlib.asynccontextmanager
async def pools(config: EngineConfig = CONFIG, **given: Any) -> AsyncGenerator[PooledEngine]:
    """Pools with short timeouts."""
    engine = PooledEngine(config, PoolConfig(**{"heartbeat_timeout_s": 1.0, "step_timeout_s": 2.0} | given))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def asked(engine: PooledEngine, in_the_middle: Callable[[], Any]) -> list[list[int]]:
    """Return all answers; call a function when the first token arrives."""
    begun = asyncio.Event()
    asking = [
        asyncio.create_task(ask(engine, str(i), *request, delivered=lambda *_: begun.set()))
        for i, request in enumerate(REQUESTS)
    ]
    await begun.wait()
    found = in_the_middle()
    if asyncio.iscoroutine(found):
        await found
    async with asyncio.timeout(SOON_S):
        return [token_ids for token_ids, _, _ in await asyncio.gather(*asking)]


async def until(is_so: Callable[[], Any]) -> Any:
    """Wait until the function returns a true value, and return it."""
    async with asyncio.timeout(SOON_S):
        while not (found := is_so()):
            await asyncio.sleep(0.02)
    return found


def pids(engine: PooledEngine, role: Role = Role.DECODE) -> list[int]:
    return [member.pid for member in engine.members() if member.role is role and member.pid is not None]


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def expected(undisturbed: Drill) -> list[list[int]]:
    return [undisturbed.token_ids[str(i)] for i in range(len(REQUESTS))]


def test_a_rank_that_is_stopped_costs_a_pause(undisturbed: Drill) -> None:
    """The engine waits for the rank while its heartbeat goes on; the missing step shows the fault."""

    async def scenario() -> None:
        config = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=2000, tensor_parallel_size=2)
        async with pools(config, decode=1) as engine:
            (worker,) = pids(engine)
            (rank,) = [child for child in children_of(worker) if b"startup.rank_process" in cmdline(child)]
            found = await asked(engine, lambda: os.kill(rank, signal.SIGSTOP))
            assert found == expected(undisturbed)
            assert pids(engine) != [worker]
            await until(lambda: not Path(f"/proc/{rank}").exists() or state_of(rank) in "ZX")

    asyncio.run(scenario())


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_dies_while_the_process_that_forks_is_stopped(undisturbed: Drill) -> None:
    async def scenario() -> None:
        async with pools(decode=2) as engine:
            first, second = pids(engine)
            server = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(server, signal.SIGSTOP)
            try:
                found = await asked(engine, lambda: os.kill(first, signal.SIGKILL))
                assert found == expected(undisturbed)
                assert pids(engine) == [second], "the dead one is not shown as if it ran"
            finally:
                os.kill(server, signal.SIGCONT)
            await until(lambda: len(pids(engine)) == 2)

    asyncio.run(scenario())


def test_a_worker_that_is_stopped_while_it_loads_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_worker, "LOADING_TIMEOUT_S", 3.0)

    async def scenario() -> None:
        async with pools(decode=2) as engine:
            first, second = pids(engine)
            server = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(first, signal.SIGKILL)
            loading = await until(lambda: [pid for pid in children_of(server) if pid not in (first, second)])
            os.kill(loading[0], signal.SIGSTOP)
            there = await until(lambda: set(pids(engine)) - {first, second})
            assert loading[0] not in there
            await until(lambda: all(member.state is EngineState.RUNNING for member in engine.members()))

    asyncio.run(scenario())


def test_resets_that_a_death_answers_are_all_answered() -> None:
    async def scenario() -> None:
        async with pools(decode=2) as engine:
            first, _ = pids(engine)
            os.kill(first, signal.SIGSTOP)
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*(engine.reset_prefix_cache() for _ in range(4)))

    asyncio.run(scenario())


def test_the_load_speaks_for_a_ratio() -> None:
    async def scenario() -> None:
        async with pools(prefill=1, decode=1) as engine:
            assert engine.suggested_ratio() is None, "nothing is known yet"
            asking = (ask(engine, str(i), *request, delivered=lambda *_: None) for i, request in enumerate(REQUESTS))
            await asyncio.gather(*asking)
            ratio = engine.suggested_ratio()
            assert ratio is not None
            assert ratio.num_prefill > 0
            assert ratio.num_decode > 0

    asyncio.run(scenario())
