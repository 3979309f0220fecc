"""Events on their way out: at once where the connection takes them, later where it does not, and never out of order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import submitted
from twostroke.api.answering import WRITE_NOW, EventResponse, EventTemplate, event
from twostroke.api.generation import AnswerGeneration, Caller
from twostroke.client.engine_client import OutputStream
from twostroke.errors import EngineError
from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.request import FinishReason


class Engine:
    """Opens streams that the test fills."""

    def __init__(self) -> None:
        self.streams: list[OutputStream] = []
        self.num_abandoned = 0

    def generate(self, _: Any, **more: Any) -> OutputStream:
        stream = OutputStream(self.abandon)
        self.streams.append(stream)
        return stream

    def abandon(self, _: OutputStream) -> None:
        self.num_abandoned += 1


class Admission:
    """Admission that admits every request."""

    def admit(self, *_: Any, background: bool) -> None: ...

    def cache_salt(self, *_: Any) -> None: ...

    def max_wait_s(self, _: Any, *, background: bool) -> float:
        return 60.0


class Call:
    """Answers with an event per output."""

    def __init__(self, engine: Engine, num_prompts: int) -> None:
        caller = Caller(0.0, Admission())  # type: ignore[arg-type]
        prompts = [submitted(engine, None, f"a-{number}", arrival_time_s=0.0) for number in range(num_prompts)]  # type: ignore[arg-type]
        self.generation = AnswerGeneration(engine, prompts, caller)  # type: ignore[arg-type]
        self.breaks_at: str | None = None

    def events(self, number: int, output: RequestOutput) -> bytes:
        text = output.outputs[0].text
        if text == self.breaks_at:
            raise ValueError("this text cannot be written")
        return f"{number}{text} ".encode() if text else b""

    def last_events(self) -> bytes:
        return b"end"

    def close(self) -> None:
        self.generation.close()


class Connection:
    """A client that may stop reading: what is written at once is refused then, and what waits, waits."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.has_left = asyncio.Event()
        self.written: list[bytes] = []
        self.num_at_once = 0
        self.has_begun = False
        self.is_complete = False
        self.is_broken = False

    async def receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if not self.reads.is_set():
            await self.reads.wait()
        if message["type"] == "http.response.start":
            assert not self.has_begun
            self.has_begun = True
        else:
            assert self.has_begun
            assert not self.is_complete
            self.written.append(message["body"])
            self.is_complete = not message["more_body"]

    def write_now(self, part: bytes) -> bool:
        assert self.has_begun
        assert not self.is_complete
        assert part
        if self.is_broken:
            raise RuntimeError("the handler is closed")
        if not self.reads.is_set():
            return False
        self.written.append(part)
        self.num_at_once += 1
        return True


def output(text: str, finish_reason: FinishReason | None = None) -> RequestOutput:
    part = CompletionOutput(0, text, (), None, None, finish_reason, None, 0)
    return RequestOutput("a", None, (), None, [part], finished=finish_reason is not None)


class Scene:
    """A stream on its way to a client."""

    def __init__(self, num_prompts: int, *, writes_at_once: bool) -> None:
        self.engine, self.connection = Engine(), Connection()
        self.call = Call(self.engine, num_prompts)
        ways = {"call": self.connection.write_now, "may_begin": self.connection.reads.is_set}
        extensions = {WRITE_NOW: ways} if writes_at_once else {}
        scope = {"type": "http", "state": {}, "extensions": extensions}
        response = EventResponse(self.call, on_error=lambda error: f"failed: {error}".encode())
        self.task = asyncio.ensure_future(response(scope, self.connection.receive, self.connection.send))

    @property
    def text(self) -> str:
        return b"".join(self.connection.written).decode()


async def rest() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def played(scene: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scene(), 10))


@given(
    steps=st.lists(st.sampled_from(["0", "1", "2", "silent", "rest", "stop reading", "read"]), max_size=40),
    writes_at_once=st.booleans(),
)
def test_every_event_comes_once_and_in_order(steps: list[str], writes_at_once: bool) -> None:
    async def scene() -> None:
        stage = Scene(3, writes_at_once=writes_at_once)
        expected: list[str] = []
        for number, step in enumerate([*steps, "read"]):
            match step:
                case "rest":
                    await rest()
                case "read":
                    stage.connection.reads.set()
                case "stop reading":
                    stage.connection.reads.clear()
                case "silent":
                    stage.engine.streams[0].put(output(""))
                case _:
                    stage.engine.streams[int(step)].put(output(f"-{number}"))
                    expected.append(f"{step}-{number}")
        for stream in stage.engine.streams:
            stream.put(output("last", FinishReason.LENGTH))
        await stage.task
        assert stage.connection.is_complete
        events = stage.text.removesuffix("end").split()
        assert stage.text.endswith("end")
        for prompt in "012":  # prompts that run side by side may overtake each other
            mine = [told for told in events if told[0] == prompt]
            assert mine == [told for told in expected if told[0] == prompt] + [f"{prompt}last"]

    played(scene)


def test_what_can_be_written_at_once_wakes_nobody() -> None:
    async def scene() -> None:
        stage = Scene(1, writes_at_once=True)
        (stream,) = stage.engine.streams
        await rest()
        for number in range(5):
            stream.put(output(str(number)))  # in one iteration of the loop; the first output also writes the head
        assert stage.text == "00 01 02 03 04 "
        stream.put(output("last", FinishReason.STOP))
        assert stage.text == "00 01 02 03 04 0last end"
        assert stage.connection.num_at_once == 6
        await stage.task
        assert stage.connection.is_complete

    played(scene)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_that_fails_ends_as_what_was_sent_allows(is_first: bool) -> None:
    async def scene() -> None:
        stage = Scene(1, writes_at_once=True)
        (stream,) = stage.engine.streams
        await rest()
        if not is_first:
            stream.put(output("a"))
        failed = output("", FinishReason.ERROR)
        failed.error = "it went wrong."
        stream.put(failed)
        if is_first:  # nothing was sent, so the framework answers with a status
            with pytest.raises(EngineError, match="it went wrong"):
                await stage.task
            assert not stage.connection.has_begun
        else:
            await stage.task
            assert stage.text == "0a failed: it went wrong."

    played(scene)


@pytest.mark.parametrize("writes_at_once", [True, False])
def test_a_stream_that_fails_says_so_behind_what_has_come(writes_at_once: bool) -> None:
    async def scene() -> None:
        stage = Scene(1, writes_at_once=writes_at_once)
        (stream,) = stage.engine.streams
        stream.put(output("a"))
        await rest()
        stage.connection.reads.clear()
        stream.put(output("b"))
        stream.put(output("c"))
        stream.fail(EngineError("it died."))
        await rest()
        stage.connection.reads.set()
        await stage.task
        assert stage.text == "0a 0b 0c failed: it died."

    played(scene)


@pytest.mark.parametrize("writes_at_once", [True, False])
def test_an_event_that_cannot_be_written_ends_its_own_stream(writes_at_once: bool) -> None:
    async def scene() -> None:
        stage = Scene(1, writes_at_once=writes_at_once)
        (stream,) = stage.engine.streams
        stage.call.breaks_at = "b"
        stream.put(output("a"))
        await rest()
        stream.put(output("b"))  # the caller of put() sees no error
        await stage.task
        assert stage.text.startswith("0a failed: ")
        assert stage.engine.num_abandoned == 1

    played(scene)


def test_a_connection_that_breaks_is_nobody_elses_trouble() -> None:
    async def scene() -> None:
        stage = Scene(1, writes_at_once=True)
        (stream,) = stage.engine.streams
        stream.put(output("a"))
        await rest()
        stage.connection.is_broken = True
        stream.put(output("b"))  # the engine's reader calls this, and must see no error
        await stage.task
        assert stage.engine.num_abandoned == 1

    played(scene)


@pytest.mark.parametrize("writes_at_once", [True, False])
def test_a_client_that_leaves_ends_its_requests(writes_at_once: bool) -> None:
    async def scene() -> None:
        stage = Scene(2, writes_at_once=writes_at_once)
        stage.engine.streams[0].put(output("a"))
        await rest()
        stage.connection.has_left.set()
        await stage.task
        assert stage.engine.num_abandoned == 2
        assert not stage.connection.is_complete

    played(scene)


@given(st.text(), st.lists(st.integers(0, 200_000)), st.text())
def test_a_repeated_event_is_the_event(text: str, ids: list[int], other: str) -> None:
    def body(text: str, ids: list[int]) -> dict[str, Any]:
        return {"100%": other, "choices": [{"text": text, "n": None}], "%b": {"ids": ids}}

    assert EventTemplate(body, 2).filled(text, ids) == event(body(text, ids))
