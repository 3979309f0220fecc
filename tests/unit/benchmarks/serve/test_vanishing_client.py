"""Clients that leave: what they send before, how they go, and what they make of an answer."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from benchmarks.serving.clients import Ending, Visit, Way, drawn_visit, visit
from openai_server import scripted
from twostroke.measure.serve.load import Origin

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"w"}]}\n\n'
LOST = b'data: {"error":{"message":"the request was lost"}}\n\n'
DONE = b"data: [DONE]\n\n"


def planned(way: Way, num_events: int = 1) -> Visit:
    return Visit(way, (300, 301), max_tokens=4, num_events=num_events)


def seen(way: Way, *script: bytes | None) -> Ending:
    async def run() -> Ending:
        async with scripted(script) as url:
            return await visit(Origin.parse(url), planned(way))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "ending"),
    [
        (STREAM + EVENT + DONE, Ending.WHOLE),
        (STREAM + EVENT, Ending.BROKEN),
        (STREAM + EVENT + LOST + DONE, Ending.ERROR),
        (STREAM + EVENT + LOST, Ending.BROKEN),
        (STREAM + b'data: {"choices":[{"text":"data: {\\"error\\":"}]}\n\n' + DONE, Ending.WHOLE),
        (JSON + b'{"choices":[]}', Ending.WHOLE),
        (JSON + b'{"choices":[', Ending.BROKEN),
        (b'HTTP/1.1 503 X\r\nRetry-After: 3\r\n\r\n{"error":{}}', Ending.REFUSED),
        (b'HTTP/1.1 503 X\r\n\r\n{"error":{}}', Ending.ERROR),
        (b'HTTP/1.1 500 X\r\n\r\n{"error":{}}', Ending.ERROR),
        (b"HTTP/1.1 500 X\r\n\r\nInternal Server Error", Ending.BROKEN),
        (b"", Ending.BROKEN),
    ],
)
def test_what_an_answer_was(answer: bytes, ending: Ending) -> None:
    assert seen(Way.STAYS, None, answer) is ending


def test_nobody_listens() -> None:
    async def run() -> Ending:
        async with scripted() as url:
            gone = Origin.parse(url)
        return await visit(gone, planned(Way.STAYS))

    assert asyncio.run(run()) is Ending.BROKEN


def received(way: Way) -> tuple[bytes, str]:
    """Return the bytes that a server gets from such a client, and how the connection ends after two events."""

    async def run() -> tuple[bytes, str]:
        heard: asyncio.Future[tuple[bytes, str]] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = b""
            try:
                while part := await reader.read(1 << 16):
                    data += part
                    if data.endswith(b"}"):
                        writer.write(STREAM + EVENT + EVENT)
                heard.set_result((data, "closed"))
            except ConnectionResetError:
                heard.set_result((data, "reset"))
            finally:
                writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await visit(Origin("127.0.0.1", port, False, ""), planned(way, num_events=2)) is Ending.LEFT
            data, end = await heard
            return data.replace(str(port).encode(), b"00000"), end  # free ports have five digits

    return asyncio.run(run())


def test_how_they_leave() -> None:
    whole, _ = received(Way.MID_STREAM)
    head, body = whole.split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b'"max_tokens": 4' in body
    assert received(Way.MID_HEAD) == (whole[: (len(head) + 4) // 2], "closed")
    assert received(Way.MID_BODY) == (head + b"\r\n\r\n" + body[: len(body) // 2], "closed")
    assert not received(Way.NO_HTTP)[0].startswith(b"POST")
    assert received(Way.HALF_CLOSE) == (whole, "closed")
    assert received(Way.UNANSWERED)[0] == whole
    assert received(Way.RESET) == (whole, "reset")


def test_a_seed_repeats_its_visits_and_draws_every_way() -> None:
    visits = [drawn_visit(Random(seed)) for seed in range(200)]
    assert visits == [drawn_visit(Random(seed)) for seed in range(200)]
    assert {each.way for each in visits} == set(Way)
    assert {each.stream for each in visits} == {True, False}
