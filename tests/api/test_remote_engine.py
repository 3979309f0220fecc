"""The engine in a process of its own: what happens when it dies, hangs, breaks, or one request does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alone_metrics import AloneMetrics
from factories import submitted
from faulty_engine import BREAK, HANG, POISON, ROT
from forked_process import forked_engines
from twostroke import LLM, SamplingParams
from twostroke.client.engine_client import EngineState, OutputStream
from twostroke.client.output_processor import OutputKind
from twostroke.cluster import engine_process, pool_worker
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.config.engine import EngineConfig
from twostroke.errors import EngineError, EngineUnavailable, SetupError
from twostroke.event_codec import PackedEvent, unpack
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    EventRing,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
)
from twostroke.explain.timeline import timeline_of
from twostroke.kv_check import Verdict
from twostroke.metrics import families
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.outputs import JoinedDeltas, RequestOutput
from twostroke.request import FinishReason

FAULTY = (sys.executable, str(Path(__file__).parents[1] / "faulty_engine.py"))
CONFIG = EngineConfig.from_keywords(threads=1, num_kv_blocks=600)
LONG = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, temperature=0)
PATIENCE_S = 60.0


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(CONFIG, **settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_awaited(main()), 3 * PATIENCE_S))


@dataclass(frozen=True)
class Shared:
    """An engine for several tests, on an event loop that outlives each of them."""

    runner: asyncio.Runner
    engine: RemoteEngine
    ring: Heard

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        self.runner.run(asyncio.wait_for(_awaited(main()), 3 * PATIENCE_S))


class Heard(EventRing):
    """Keeps events that come packed, too."""

    def append(self, event: Event | PackedEvent) -> None:
        super().append(unpack(event) if isinstance(event, PackedEvent) else event)


@contextmanager
def sharing(**settings: Any) -> Iterator[Shared]:
    ring = Heard(100_000)
    with asyncio.Runner() as runner:

        async def make() -> RemoteEngine:
            engine = RemoteEngine(CONFIG, listeners=[ring], **settings)
            await engine.start()
            return engine

        engine = runner.run(make())
        yield Shared(runner, engine, ring)
        runner.run(engine.close())


@pytest.fixture(autouse=True, scope="module")
def forking() -> Iterator[None]:
    """Let the processes of all engines but the faulty ones be forked."""
    with forked_engines():
        yield


@pytest.fixture(scope="module")
def sound() -> Iterator[Shared]:
    with sharing() as shared:
        yield shared


@pytest.fixture(scope="module")
def faulty() -> Iterator[Shared]:
    with sharing(command=FAULTY) as shared:
        yield shared


async def _awaited(main: Awaitable[None]) -> None:
    await main


def opened(
    engine: RemoteEngine, name: str, params: SamplingParams = SHORT, prompt: Any = "def f(", **more: Any
) -> OutputStream:
    prepared = engine.inputs.process(prompt, params)
    return engine.generate(submitted(engine, prepared, name, **more))


async def taken(stream: OutputStream) -> list[RequestOutput]:
    """Return the next output."""
    while not (outputs := stream.take()):
        something: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream.listen(lambda something=something: something.done() or something.set_result(None))
        await something
    return outputs


async def finished(stream: OutputStream) -> RequestOutput:
    deltas = JoinedDeltas()
    has_ended = False
    while not has_ended:
        for output in await taken(stream):
            deltas.add(output)
            has_ended = output.finished
    return deltas.joined()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_memory_that_goes_bad_is_found_told_and_survived(llm: LLM) -> None:
    """The event crosses the wire, the callback for dumps is called, and answers equal those of a sound machine."""
    prompt = {"prompt_token_ids": [10 + i % 50 for i in range(70)]}

    async def main() -> None:
        events, troubles = Heard(10_000), list[str]()
        config = EngineConfig.from_keywords(threads=1, num_kv_blocks=600, kv_check_rate=1.0)
        engine = RemoteEngine(config, command=FAULTY, listeners=(events,), on_trouble=troubles.append)
        await engine.start()
        try:
            first = await finished(opened(engine, "first", prompt=prompt))
            await finished(opened(engine, "rot", prompt={"prompt_token_ids": [ROT]}))
            again = await finished(opened(engine, "again", prompt=prompt))
            expected = llm.generate([prompt], SHORT)[0].outputs[0].token_ids
            assert [output.outputs[0].token_ids for output in (first, again)] == [expected, expected]
            assert again.num_cached_tokens == 0
            (check,) = [event for event in events if isinstance(event, KVBlockChecked)]
            assert check.verdict is Verdict.CORRUPTION
            await until(lambda: bool(troubles))
            assert troubles[0].startswith("KV memory is corrupt in the cached prefix of again")
            assert engine.health().num_restarts == 0
        finally:
            await engine.close()

    run(main)


def test_it_gives_the_tokens_of_the_offline_api(sound: Shared, llm: LLM) -> None:
    async def main() -> None:
        output = await finished(opened(sound.engine, "a"))
        assert output.outputs[0].token_ids == llm.generate(["def f("], SHORT)[0].outputs[0].token_ids
        assert output.metrics is not None
        final = opened(sound.engine, "a", kind=OutputKind.FINAL)
        (only,) = await taken(final)
        assert only.outputs[0].text == output.outputs[0].text
        assert final.take() == []

    sound.run(main)


def test_whoever_leaves_is_gone_from_the_engine_too(sound: Shared) -> None:
    async def main() -> None:
        engine = sound.engine
        streams = [opened(engine, f"r{i}", LONG) for i in range(8)]
        for stream in streams:
            await taken(stream)
        for stream in streams[:7]:
            stream.close()
            assert stream.take() == []
        assert engine.health().num_requests == 1
        ended = lambda: [e for e in sound.ring if isinstance(e, RequestFinishedByCaller)]  # noqa: E731
        await until(lambda: len(ended()) == 7)
        assert {e.reason for e in ended()} == {FinishReason.ABORT}
        streams[7].close()
        await finished(opened(engine, "r7", SHORT))  # the name is free again at once

    sound.run(main)


def test_a_process_that_is_killed_is_replaced_and_its_requests_are_told() -> None:
    async def main() -> None:
        ring = Heard(100_000)
        async with started(listeners=[ring]) as engine:
            streams = [opened(engine, f"r{i}", LONG) for i in range(4)]
            whole = opened(engine, "whole", LONG, kind=OutputKind.FINAL)
            await taken(streams[0])
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailable, match="Nothing of it was sent: ask again"):
                await taken(whole)
            for stream in streams:
                with pytest.raises(EngineError, match="signal 9"):
                    await finished(stream)
                assert stream.take() == []
            assert not engine.health().is_ready
            with pytest.raises(EngineUnavailable, match="signal 9"):
                opened(engine, "early")
            await until(lambda: engine.health().is_ready)
            assert engine.health().num_restarts == 1
            assert (await finished(opened(engine, "later"))).outputs[0].finish_reason == "length"
            assert sum(isinstance(event, EngineStarted) for event in ring) == 2
            _check_that_the_loss_is_told(list(ring))

    run(main)


def _check_that_the_loss_is_told(events: list[Event]) -> None:
    """Check that the loss is reported immediately, and not when another engine has started, which may never happen."""
    (lost,) = (place for place, event in enumerate(events) if isinstance(event, EngineLost))
    metrics = AloneMetrics("m")
    for event in events[:lost]:
        metrics.observe(event)
    assert _value(metrics, families.NUM_REQUESTS_RUNNING) > 0
    metrics.observe(events[lost])
    assert _value(metrics, families.NUM_REQUESTS_RUNNING) == 0
    assert _value(metrics, families.KV_CACHE_USAGE) == 0
    num_arrived = sum(isinstance(event, RequestArrived) for event in events[:lost])
    assert _value(metrics, families.REQUEST_SUCCESS, finished_reason="error") == num_arrived
    timeline = timeline_of(events[: lost + 1], "r0")
    assert timeline.is_complete
    assert timeline.lanes[0].finish_reason is FinishReason.ERROR


def _value(metrics: EngineMetrics, family: families.Family, **labels: str) -> float:
    samples = metrics.instruments[family].samples()
    (value,) = (value for _, of, value in samples if labels.items() <= dict(of).items())
    return value


def test_an_engine_whose_books_break_says_so_and_is_replaced(faulty: Shared) -> None:
    async def main() -> None:
        engine = faulty.engine
        other = opened(engine, "other", LONG)
        await taken(other)
        with pytest.raises(EngineError, match="a broken step"):
            await finished(opened(engine, "breaks", prompt={"prompt_token_ids": [5, BREAK]}))
        with pytest.raises(EngineError, match="a broken step"):
            await finished(other)
        await until(lambda: engine.health().is_ready)
        await finished(opened(engine, "later"))

    faulty.run(main)


def test_a_poisoned_request_ends_alone(faulty: Shared, llm: LLM) -> None:
    async def main() -> None:
        engine = faulty.engine
        num_restarts = engine.health().num_restarts
        healthy = [opened(engine, f"r{i}") for i in range(3)]
        poisoned = await finished(opened(engine, "poisoned", prompt={"prompt_token_ids": [5, POISON]}))
        assert (poisoned.outputs[0].finish_reason, poisoned.error) == ("error", "the model's logits are not finite")
        expected = llm.generate(["def f("], SHORT)[0].outputs[0].token_ids
        assert [(await finished(stream)).outputs[0].token_ids for stream in healthy] == [expected] * 3
        assert engine.health().num_restarts == num_restarts

    faulty.run(main)


def test_health_is_progress() -> None:
    async def main() -> None:
        async with started(command=FAULTY, stall_after_s=0.2) as engine:
            await asyncio.sleep(0.5)
            assert engine.health().state is EngineState.RUNNING  # idle is no stall
            stream = opened(engine, "hangs", prompt={"prompt_token_ids": [5, HANG]})
            await until(lambda: engine.health().state is EngineState.STALLED)
            assert not engine.health().is_alive
            assert "1 requests are queued" in engine.health().cause
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await finished(stream)
            await until(lambda: engine.health().is_ready)

    run(main)


@pytest.mark.parametrize("how", ["serving", "idle", "a step that hangs"])
def test_a_process_that_stands_still_is_ended_and_replaced(how: str) -> None:
    async def main() -> None:
        async with started(command=FAULTY, step_timeout_s=1.0) as engine:
            first, streams = engine.pid, list[OutputStream]()
            assert first is not None
            if how == "serving":
                streams = [opened(engine, f"r{i}", LONG) for i in range(3)]
                await taken(streams[0])
            elif how == "a step that hangs":
                streams = [opened(engine, "hangs", prompt={"prompt_token_ids": [5, HANG]})]
            if how != "a step that hangs":
                os.kill(first, signal.SIGSTOP)
            for stream in streams:
                with pytest.raises(EngineError, match="signal 9: it said nothing for 1 s"):
                    await finished(stream)
            await until(lambda: engine.health().is_ready and engine.pid != first)
            assert engine.health().num_restarts == 1
            assert not Path(f"/proc/{first}").exists()
            assert (await finished(opened(engine, "later"))).outputs[0].finish_reason == "length"

    run(main)


def test_one_that_lives_is_never_taken_for_one_that_stands_still() -> None:
    """Idle or at work, for several times as long as a silent one may take."""

    async def main() -> None:
        async with started(step_timeout_s=1.0) as engine:
            first = engine.pid
            await asyncio.sleep(3.0)
            stream = opened(engine, "long", LONG)
            await taken(stream)
            await asyncio.sleep(2.5)
            stream.close()
            assert (engine.pid, engine.health().num_restarts) == (first, 0)

    run(main)


def test_one_that_is_stopped_while_it_loads_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_worker, "LOADING_TIMEOUT_S", 0.5)

    async def main() -> None:
        engine = RemoteEngine(CONFIG, command=(sys.executable, "-c", "import time; time.sleep(1e6)"))
        with pytest.raises(SetupError, match=r"it said nothing for 0\.5 s while it was loaded"):
            await engine.start()
        await engine.close()

    run(main)


GATEWAY = """
import asyncio, os, sys
from twostroke.config.engine import EngineConfig
from twostroke.cluster.remote_engine import RemoteEngine

async def main():
    ranks = int(sys.argv[1])
    engine = RemoteEngine(EngineConfig.from_keywords(threads=1, num_kv_blocks=600, tensor_parallel_size=ranks))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a stopped process of its parent's end")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_process_outlives_the_one_that_serves(num_ranks: int, is_stopped: bool) -> None:
    """The engine and its ranks end even if they are stopped when the server process is killed."""

    async def main() -> None:
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GATEWAY, str(num_ranks), stdout=asyncio.subprocess.PIPE
        )
        assert gateway.stdout is not None
        engine = int(await asyncio.wait_for(gateway.stdout.readline(), PATIENCE_S))
        family = [engine, *_children_of(engine)]
        assert len(family) >= num_ranks
        if is_stopped:
            for pid in family:
                os.kill(pid, signal.SIGSTOP)
        gateway.kill()
        await gateway.wait()
        await until(lambda: all(map(_has_ended, family)))

    run(main)


def _children_of(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_what_cannot_be_loaded_is_refused() -> None:
    async def main() -> None:
        engine = RemoteEngine(EngineConfig.from_keywords(model="no-such-folder/at-all"))
        with pytest.raises(SetupError, match="no-such-folder"):
            await engine.start()
        await engine.close()

    run(main)


def test_a_start_that_nobody_waits_for_any_more_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, a process hears nothing; it has nothing to lose either."""
    deaf = (sys.executable, "-c", "import time; time.sleep(1e6)")
    for module in (engine_process, pool_worker):
        monkeypatch.setattr(module, "STOP_TIMEOUT_S", 1e6)

    async def main() -> None:
        engine = RemoteEngine(CONFIG, command=deaf)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.3)
        starting.cancel()
        await asyncio.wait_for(asyncio.wait([starting]), PATIENCE_S)
        assert starting.cancelled()
        await engine.close()

    run(main)


def test_one_that_dies_again_and_again_is_given_up() -> None:
    async def main() -> None:
        async with started(command=FAULTY) as engine:
            for _ in range(4):
                await until(lambda: engine.health().is_ready or engine.health().state is EngineState.FAILED)
                if engine.health().is_ready:
                    stream = opened(engine, "breaks", prompt={"prompt_token_ids": [5, BREAK]})
                    with pytest.raises(EngineError):
                        await finished(stream)
            await until(lambda: engine.health().state is EngineState.FAILED)
            assert "3 times in a row" in engine.health().cause
            with pytest.raises(EngineUnavailable) as refusal:
                opened(engine, "late")
            assert not refusal.value.may_return

    run(main)


def test_every_event_arrives_in_order(sound: Shared) -> None:
    async def main() -> None:
        num_before = len(list(sound.ring))
        await asyncio.gather(*(finished(opened(sound.engine, f"r{i}")) for i in range(5)))
        events = list(sound.ring)
        kinds = [type(event) for event in events]
        assert kinds[0] is EngineStarted
        assert kinds[num_before:].count(RequestArrived) == 5
        committed = [event for event in events if isinstance(event, StepCommitted)]
        assert [event.step for event in committed] == list(range(len(committed)))
        assert len(committed) > 12

    sound.run(main)
