"""Streams from coroutines: in parallel, left early, refused, closed."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from twostroke import LLM, AsyncEngine, RequestOutput, SamplingParams
from twostroke.client.async_engine import _Stream
from twostroke.client.output_processor import OutputKind
from twostroke.errors import EngineError, InvalidParameter, InvalidPrompt
from twostroke.outputs import JoinedDeltas


@pytest.fixture(scope="module")
def folder(random_models: dict[str, Path]) -> str:
    return str(random_models["llama"])


def params(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=6 + i, seed=i, ignore_eos=True)


async def collect(engine: AsyncEngine, i: int) -> tuple[int, ...]:
    """Return all updates of one stream; each extends the previous one."""
    seen: tuple[int, ...] = ()
    finished = False
    async for output in engine.generate({"prompt_token_ids": [i + 1] * 20}, params(i)):
        ids = output.outputs[0].token_ids
        assert ids[: len(seen)] == seen
        assert not finished
        seen, finished = ids, output.finished
    assert finished
    return seen


def test_streams_run_together_and_equal_the_offline_answer(folder: str) -> None:
    async def main() -> list[tuple[int, ...]]:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            return await asyncio.gather(*(collect(engine, i) for i in range(8)))

    with LLM(folder, kv_cache_memory=1 << 24, threads=1) as llm:
        offline = llm.generate([{"prompt_token_ids": [i + 1] * 20} for i in range(8)], [params(i) for i in range(8)])
    assert asyncio.run(main()) == [o.outputs[0].token_ids for o in offline]


def test_leaving_early_aborts(folder: str) -> None:
    async def main() -> int:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            stream = engine.generate({"prompt_token_ids": [5] * 9}, SamplingParams(max_tokens=400, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()
            await collect(engine, 1)  # the engine continues, and has seen the abort by now
            return engine._engine.engine.kv_usage.num_used

    assert asyncio.run(main()) == 0


def test_abort_by_name_ends_the_stream(folder: str) -> None:
    async def main() -> str:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            last = None
            long = SamplingParams(max_tokens=500, ignore_eos=True)
            async for output in engine.generate({"prompt_token_ids": [5] * 9}, long, request_id="x"):
                if last is None:
                    await engine.abort("x")
                last = output
            assert last is not None
            return str(last.outputs[0].finish_reason)

    assert asyncio.run(main()) == "abort"


def test_a_bad_prompt_is_refused_where_it_was_asked(folder: str) -> None:
    async def main() -> None:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            with pytest.raises(InvalidPrompt):
                async for _ in engine.generate({"prompt_token_ids": []}):
                    pass
            await collect(engine, 2)

    asyncio.run(main())


def test_closing_ends_open_streams(folder: str) -> None:
    async def main() -> None:
        engine = AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1)
        long = SamplingParams(max_tokens=600, ignore_eos=True)

        async def close_at_the_first_token() -> None:
            async for _ in engine.generate({"prompt_token_ids": [5]}, long):
                await asyncio.to_thread(engine.close)

        with pytest.raises(EngineError, match="closed"):
            await close_at_the_first_token()
        with pytest.raises(EngineError):
            await collect(engine, 0)

    asyncio.run(main())


LONG = SamplingParams(max_tokens=600, ignore_eos=True)
PATIENCE_S = 20.0


class Gate:
    """Holds the engine's thread within a step, so that what comes meanwhile is seen between this step and the next."""

    def __init__(self, engine: AsyncEngine, failure: Exception | None = None) -> None:
        self.held, self.opened = threading.Event(), threading.Event()
        self._step, self._failure = engine._engine.engine.step, failure
        engine._engine.engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> Any:
        self.held.set()
        self.opened.wait(PATIENCE_S)
        if self._failure is not None:
            raise self._failure
        return self._step()


@contextmanager
def started(folder: str) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1)
    try:
        yield engine
    finally:
        engine.close()


async def last(engine: AsyncEngine, params: SamplingParams, request_id: str | None = None) -> str:
    """Return the stream's finish reason."""
    reason = ""
    async for output in engine.generate({"prompt_token_ids": [5] * 9}, params, request_id=request_id):
        reason = str(output.outputs[0].finish_reason)
    return reason


async def queued(engine: AsyncEngine, params: SamplingParams, request_id: str | None = None) -> asyncio.Task[str]:
    """A stream whose request waits for the engine's thread."""
    before = engine._worker.commands.qsize()
    task = asyncio.create_task(last(engine, params, request_id))
    while engine._worker.commands.qsize() == before:
        await asyncio.sleep(0.001)
    return task


async def held(engine: AsyncEngine, gate: Gate, request_id: str | None = None) -> asyncio.Task[str]:
    """A stream whose first step is held at the gate."""
    task = asyncio.create_task(last(engine, LONG, request_id))
    assert await asyncio.to_thread(gate.held.wait, PATIENCE_S)
    return task


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # such a caller gets this error
def test_a_caller_whose_loop_has_closed_harms_nobody(folder: str) -> None:
    with started(folder) as engine:
        gate = Gate(engine)

        async def ask_and_go() -> list[asyncio.Task[str]]:
            return [await held(engine, gate), await queued(engine, LONG)]

        loop = asyncio.new_event_loop()
        tasks = loop.run_until_complete(ask_and_go())
        loop.close()
        gate.opened.set()
        asyncio.run(asyncio.wait_for(collect(engine, 1), PATIENCE_S))
        assert engine._engine.engine.num_live == 0, "their streams are not read"
        del tasks
        gc.collect()


@pytest.mark.parametrize("failure", [None, ZeroDivisionError("broken")])
def test_who_waits_when_the_engine_ends_hears_of_it(folder: str, failure: Exception | None) -> None:
    async def main(engine: AsyncEngine) -> None:
        gate = Gate(engine, failure)
        tasks = [await held(engine, gate)]
        tasks += [await queued(engine, LONG) for _ in range(2)]
        closing = [asyncio.create_task(asyncio.to_thread(engine.close))] if failure is None else []
        await asyncio.sleep(0.05)
        gate.opened.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        await asyncio.gather(*closing)
        assert all(type(error) is EngineError for error in results)
        assert len({id(error) for error in results}) == 3, "each raises one of its own"
        assert ("closed" if failure is None else "broken") in str(results[-1])
        with pytest.raises(EngineError, match="closed" if failure is None else "broken"):
            await last(engine, LONG)

    with started(folder) as engine:
        asyncio.run(main(engine))


def test_closed_twice_and_used_afterwards(folder: str) -> None:
    async def main(engine: AsyncEngine) -> None:
        for stream in (engine.generate("a"), engine.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(EngineError, match="closed"):
                await anext(stream)
        with pytest.raises(EngineError, match="closed"):
            await engine.abort("x")

    with started(folder) as engine:
        engine.close()
        engine.close()
        asyncio.run(main(engine))


def test_an_aborted_name_can_be_used_at_once(folder: str) -> None:
    async def main(engine: AsyncEngine) -> list[str]:
        gate = Gate(engine)
        old = await held(engine, gate, "x")
        await engine.abort("x")
        new = await queued(engine, SamplingParams(max_tokens=3, ignore_eos=True), "x")
        gate.opened.set()
        return await asyncio.wait_for(asyncio.gather(old, new), PATIENCE_S)

    with started(folder) as engine:
        assert asyncio.run(main(engine)) == ["abort", "length"]


def test_leaving_a_stream_aborts_no_other_of_its_name(folder: str) -> None:
    """The old stream ended and another took its name before the reader of the old one went away."""

    async def main(engine: AsyncEngine) -> str:
        old = engine.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=4, ignore_eos=True), request_id="x")
        await anext(old)
        while engine._engine.engine.has_work:
            await asyncio.sleep(0.001)
        gate = Gate(engine)
        new = asyncio.create_task(last(engine, SamplingParams(max_tokens=5, ignore_eos=True), "x"))
        assert await asyncio.to_thread(gate.held.wait, PATIENCE_S)
        await old.aclose()
        gate.opened.set()
        return await asyncio.wait_for(new, PATIENCE_S)

    with started(folder) as engine:
        assert asyncio.run(main(engine)) == "length"


def test_cancelled_while_the_answer_is_on_its_way(folder: str) -> None:
    async def main(engine: AsyncEngine) -> int:
        task = asyncio.create_task(last(engine, LONG))
        while not engine._worker.streams:
            await asyncio.sleep(0)
        time.sleep(0.05)  # the answer arrives while this loop is busy, and is read in the next iteration
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await collect(engine, 1)
        return engine._engine.engine.num_live

    with started(folder) as engine:
        assert asyncio.run(main(engine)) == 0


def test_cancelled_while_it_waits_to_be_queued(folder: str) -> None:
    async def main(engine: AsyncEngine) -> int:
        gate = Gate(engine)
        first = await held(engine, gate)
        second = await queued(engine, LONG)
        for task in (first, second):
            task.cancel()
        gate.opened.set()
        await asyncio.gather(first, second, return_exceptions=True)
        await collect(engine, 1)
        return engine._engine.engine.num_live

    with started(folder) as engine:
        assert asyncio.run(main(engine)) == 0


def test_a_slow_prompt_holds_nobody_up(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(engine: AsyncEngine) -> None:
        inputs = engine._engine._inputs
        process, may_end = inputs.process, threading.Event()

        def slow(prompt: Any, *args: Any, **kwargs: Any) -> Any:
            if prompt == "slow":
                assert may_end.wait(PATIENCE_S)
            return process({"prompt_token_ids": [5]} if prompt == "slow" else prompt, *args, **kwargs)

        monkeypatch.setattr(inputs, "process", slow)
        task = asyncio.create_task(anext(engine.generate("slow", SamplingParams(max_tokens=1))))
        try:
            await asyncio.sleep(0.05)
            await asyncio.wait_for(collect(engine, 1), PATIENCE_S / 2)
            assert not task.done()
        finally:
            may_end.set()
        output = await task
        assert output.finished
        assert output.metrics is not None
        assert output.metrics.queue_time_s > 0.05, "preparing counts as waiting"

    with started(folder) as engine:
        asyncio.run(main(engine))


async def read_slowly(engine: AsyncEngine, kind: OutputKind, *, blocks: bool) -> tuple[list[RequestOutput], int]:
    """Return all outputs, read only after the engine has made them all, and the most that waited."""
    seen: list[RequestOutput] = []
    num_waiting = 0
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, seed=3)
    async for output in engine.generate({"prompt_token_ids": [5] * 9}, sampling, kind=kind):
        seen.append(output)
        while engine._engine.has_work:
            for stream in list(engine._worker.streams.values()):
                num_waiting = max(num_waiting, len(stream._items))
            time.sleep(0.001)
            if not blocks:
                await asyncio.sleep(0)
    return seen, num_waiting


@pytest.mark.parametrize("blocks", [False, True], ids=["slow reader", "blocked loop"])
def test_at_most_one_output_waits_for_a_slow_reader(folder: str, blocks: bool) -> None:
    with started(folder) as engine:
        seen, num_waiting = asyncio.run(read_slowly(engine, OutputKind.CUMULATIVE, blocks=blocks))
    assert len(seen) <= 3, "those between were replaced"
    assert num_waiting == 1
    assert seen[-1].finished
    assert len(seen[-1].outputs[0].token_ids) == 60


@pytest.mark.parametrize("blocks", [False, True], ids=["slow reader", "blocked loop"])
def test_no_delta_is_left_out(folder: str, blocks: bool) -> None:
    with started(folder) as engine:
        (whole,), _ = asyncio.run(read_slowly(engine, OutputKind.FINAL, blocks=blocks))
        seen, num_waiting = asyncio.run(read_slowly(engine, OutputKind.DELTA, blocks=blocks))
    deltas = JoinedDeltas()
    for delta in seen:
        deltas.add(delta)
    assert deltas.joined().outputs == whole.outputs
    assert len(seen) == 60
    assert num_waiting > 1, "nothing waited: the test is too easy"


def test_what_came_before_an_error_is_read_first() -> None:
    def output(*token_ids: int) -> RequestOutput:
        return RequestOutput("x", None, token_ids, None)

    async def main() -> list[RequestOutput | Exception]:
        stream = _Stream(asyncio.get_running_loop(), replaces=True)
        assert all([stream.put(output(1)), stream.put(output(1, 2)), stream.put(EngineError("broken"))])
        return [await asyncio.wait_for(stream.take(), PATIENCE_S) for _ in range(2)]

    newest, error = asyncio.run(main())
    assert newest == output(1, 2)
    assert isinstance(error, EngineError)


def test_an_engine_that_is_dropped_ends_its_thread(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1)
    asyncio.run(collect(engine, 1))
    thread, inner = engine._worker._thread, weakref.ref(engine._engine)
    del engine
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    gc.collect()
    assert inner() is None, "the model is still referenced"
    assert "without close()" in caplog.text


def test_an_engine_lives_as_long_as_its_streams(folder: str) -> None:
    async def main() -> int:
        engine = AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1)
        stream = engine.generate({"prompt_token_ids": [5]}, params(2))
        del engine
        gc.collect()
        return len([output async for output in stream][-1].outputs[0].token_ids)

    assert asyncio.run(main()) == 8


def test_bad_names_are_the_callers_own_problem(folder: str) -> None:
    async def main(engine: AsyncEngine) -> None:
        bad: Any = ["x"]
        with pytest.raises(InvalidParameter, match="request_id"):
            await last(engine, LONG, bad)
        with pytest.raises(InvalidParameter, match="request_id"):
            await engine.abort(bad)
        await collect(engine, 1)

    with started(folder) as engine:
        asyncio.run(main(engine))


def test_a_chat_takes_what_its_template_takes(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].name }}{{ mood }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)

    async def main(engine: AsyncEngine) -> str | None:
        stream = engine.chat(
            [{"role": "user", "content": "abc"}],
            SamplingParams(max_tokens=1),
            tools=[{"name": "tool"}],
            add_generation_prompt=False,
            chat_template_kwargs={"mood": "!"},
        )
        return [output.prompt async for output in stream][-1]

    with started(str(tmp_path / "model")) as engine:
        assert asyncio.run(main(engine)) == "abctool!"
