"""Events that take long to write are written by a thread, in order, while others use the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

import text_fakes
from factories import submitted
from twostroke.api.answering import WRITE_NOW, DeferredEvents, EventResponse
from twostroke.api.generation import AnswerGeneration, Caller
from twostroke.api.logprobs import MAX_ON_EVENT_LOOP, as_written, prompt_logprobs, takes_long
from twostroke.batch import TokenLogprobs
from twostroke.client.engine_client import OutputStream
from twostroke.client.prompt_scores import PromptScores
from twostroke.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput
from twostroke.request import FinishReason

TOKENIZER = text_fakes.tokenizer("byte_level")


class Engine:
    """Has one stream, which the test fills."""

    def generate(self, _: Any, **more: Any) -> OutputStream:
        self.stream = OutputStream(lambda _: None)
        return self.stream


class Admission:
    def admit(self, *_: Any, background: bool) -> None: ...

    def cache_salt(self, *_: Any) -> None: ...

    def max_wait_s(self, _: Any, *, background: bool) -> float:
        return 60.0


class Call:
    """Texts in capitals take long."""

    def __init__(self) -> None:
        self.engine = Engine()
        caller = Caller(0.0, Admission())  # type: ignore[arg-type]
        prompts = [submitted(self.engine, None, "a", arrival_time_s=0.0)]  # type: ignore[arg-type]
        self.generation = AnswerGeneration(self.engine, prompts, caller)  # type: ignore[arg-type]
        self.may_go_on = threading.Event()
        self.threads: dict[str, int] = {}

    def events(self, number: int, output: RequestOutput) -> bytes | DeferredEvents:
        text = output.outputs[0].text

        def write() -> bytes:
            if text.isupper():
                assert self.may_go_on.wait(20)
            if text == "FAILS":
                raise ValueError("cannot be written")
            self.threads[text] = threading.get_ident()
            return text.encode()

        return write if text.isupper() else write()

    def last_events(self) -> bytes:
        return b"."

    def close(self) -> None:
        self.generation.close()


def output(text: str, finish_reason: FinishReason | None = None) -> RequestOutput:
    part = CompletionOutput(0, text, (), None, None, finish_reason, None, 0)
    return RequestOutput("a", None, (), None, [part], finished=finish_reason is not None)


async def written(texts: list[str], call: Call, *, writes_at_once: bool) -> bytes:
    sent: list[bytes] = []

    def write_now(part: bytes) -> bool:
        sent.append(part)
        return True

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    ways = {WRITE_NOW: {"call": write_now, "may_begin": lambda: True}} if writes_at_once else {}
    stream = EventResponse(call, on_error=lambda error: f"failed: {error}".encode())
    task = asyncio.ensure_future(stream({"type": "http", "state": {}, "extensions": ways}, receive, send))
    for number, text in enumerate(texts, start=1):
        call.engine.stream.put(output(text, FinishReason.LENGTH if number == len(texts) else None))
        for _ in range(5):
            await asyncio.sleep(0)  # the loop turns, whatever the thread does
    call.may_go_on.set()
    await asyncio.wait_for(task, 20)
    return b"".join(sent)


@pytest.mark.parametrize("writes_at_once", [True, False])
@pytest.mark.parametrize(
    "texts", [["A", "b", "c"], ["a", "B", "c"], ["a", "b", "C"], ["A", "B", "C"], ["A"], ["a", "B", "C", "d"]]
)
def test_events_come_in_order_and_long_ones_from_a_thread(texts: list[str], writes_at_once: bool) -> None:
    async def scene() -> None:
        call = Call()
        assert await written(texts, call, writes_at_once=writes_at_once) == "".join(texts).encode() + b"."
        assert call.threads
        assert all(call.threads[text] != threading.get_ident() for text in texts if text.isupper())

    asyncio.run(scene())


def test_one_that_fails_ends_its_stream() -> None:
    async def scene() -> None:
        assert await written(["a", "FAILS", "c"], Call(), writes_at_once=True) == b"afailed: cannot be written"

    asyncio.run(scene())


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs((token_id, 70, 71), (-2.0, -0.5, -1.0), 3)


def scores(num_tokens: int) -> PromptScores:
    found = PromptScores(TOKENIZER, num_tokens)
    found.put(1, [entry(token_id % 60) for token_id in range(1, num_tokens)])
    return found


def test_scores_of_a_prompt_are_decoded_when_they_are_read() -> None:
    found = scores(8000)
    assert (len(found), found.num_missing, found.num_decoded) == (8000, 0, 0)
    assert found[0] is None
    assert list(found[7] or {}) == [7, 70, 71]
    assert found.num_decoded == 1
    assert len(found[10:20]) == 10
    assert found.num_decoded == 11
    assert found == list(found)
    assert found != scores(7999)


def test_what_takes_long_is_what_has_many_positions() -> None:
    logprobs: list[LogprobsAtPosition] = [{}] * (MAX_ON_EVENT_LOOP + 1)
    few = CompletionOutput(0, "", (), logprobs[1:], None, None, None, 0)
    many = CompletionOutput(0, "", (), logprobs, None, None, None, 0)
    assert not takes_long(RequestOutput("a", None, (), scores(MAX_ON_EVENT_LOOP), [few]))
    assert takes_long(RequestOutput("a", None, (), scores(MAX_ON_EVENT_LOOP + 1), [few]))
    assert takes_long(RequestOutput("a", None, (), None, [few, many]))
    assert not takes_long(RequestOutput("a", None, (), None, []))


def test_scores_are_written_as_they_were() -> None:
    found = scores(3)
    assert prompt_logprobs(None) is None
    told = msgspec.json.decode(msgspec.json.encode(prompt_logprobs(found)))
    first = found[1]
    assert told[0] is None
    assert first is not None
    assert told[1] == {
        str(token_id): {"logprob": of.logprob, "rank": of.rank, "decoded_token": of.decoded_token}
        for token_id, of in first.items()
    }
    many: dict[str, Any] = {"tokens": ["a"] * 100}
    assert as_written(many, 2) is many
    assert msgspec.json.encode(as_written(many, 100)) == msgspec.json.encode(many)
