"""Pools whose workers are threads of one process: the answers of processes, and what becomes of one that hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.drill import ask, prompts
from twostroke.batch import NewRequest, ScheduledBatch, StepResult
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.cluster.thread_launcher import MAX_ABANDONED, ThreadLauncher
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.runner.model_runner import Executor

CONFIG = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=1000)
REQUESTS = prompts(6)
THREADS: dict[str, Any] = {"pool_workers": "thread", "heartbeat_timeout_s": 0.4}


def answers(
    pools: PoolConfig, launcher: ThreadLauncher | None = None, begun: Callable[[], object] = lambda: None
) -> tuple[dict[str, list[int]], PooledEngine, list[str]]:
    """Return the answers to all requests at once, the engine, and the causes of its faults."""
    causes: list[str] = []

    async def run() -> tuple[dict[str, list[int]], PooledEngine]:
        engine = PooledEngine(CONFIG, pools, launcher=launcher, placer=LeastBusy(), on_trouble=causes.append)
        await engine.start()
        try:
            begun()
            asked = (ask(engine, str(i), *request) for i, request in enumerate(REQUESTS))
            return {str(i): token_ids for i, (token_ids, _, _) in enumerate(await asyncio.gather(*asked))}, engine
        finally:
            await engine.close()

    found, engine = asyncio.run(run())
    return found, engine, causes


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    """Answers of one process that does everything."""
    return answers(PoolConfig(decode=1))[0]


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("twostroke-prefill-", "twostroke-decode-"))]


def gone_in_time(names: Callable[[], object], timeout_s: float = 30.0) -> bool:
    until_s = time.monotonic() + timeout_s
    while names() and time.monotonic() < until_s:
        time.sleep(0.02)
    return not names()


def test_threads_answer_like_a_process_and_end_with_the_engine(undisturbed: dict[str, list[int]]) -> None:
    found, engine, _ = answers(PoolConfig(prefill=2, decode=2, **THREADS))
    assert found == undisturbed
    assert engine.dispatcher.num_resumed == 0
    assert gone_in_time(engine_threads)


class Hanging:
    """Around the real executor: once, when it is told to, a step does not come back before it is let go."""

    is_to_hang = threading.Event()
    let_go = threading.Event()

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    @property
    def max_in_flight(self) -> int:
        return self._inner.max_in_flight

    def add_request(self, request: NewRequest) -> None:
        self._inner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        if self.is_to_hang.is_set():
            self.is_to_hang.clear()
            self.let_go.wait(60)
        self._inner.submit(batch)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("sizes", [{"decode": 2}, {"prefill": 2, "decode": 1}], ids=str)
def test_one_that_hangs_is_left_and_its_requests_go_on_elsewhere(
    sizes: dict[str, int], undisturbed: dict[str, list[int]]
) -> None:
    Hanging.is_to_hang.clear()
    Hanging.let_go.clear()
    launcher = ThreadLauncher(Hanging, step_timeout_s=0.5)
    found, engine, causes = answers(PoolConfig(**sizes, **THREADS), launcher, Hanging.is_to_hang.set)
    assert found == undisturbed
    assert engine.dispatcher.num_resumed > 0
    assert any("was abandoned: a thread cannot be killed: it said nothing for 0.4 s" in cause for cause in causes), (
        causes
    )
    assert gone_in_time(lambda: engine_threads()[1:]), "one that was to take its place may still load its model"
    assert len(engine_threads()) == 1, "it still hangs"
    Hanging.let_go.set()
    assert gone_in_time(engine_threads), "it ends when it has come round"


def test_only_so_many_may_be_left() -> None:
    launcher = ThreadLauncher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_children", [Left() for _ in range(MAX_ABANDONED)])
        with pytest.raises(Exception, match=r"2 workers hang in threads .* --pool-workers process"):
            asyncio.run(launcher.launch("decode-0.3", *([None] * 3)))  # type: ignore[arg-type]


class Left:
    """A thread that hangs."""

    is_running = is_abandoned = True
