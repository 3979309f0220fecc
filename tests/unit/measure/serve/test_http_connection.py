"""HTTP against a server that plays scripts: cuts, kept connections, and every way for an answer not to come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from openai_server import scripted
from twostroke.errors import InvalidParameter
from twostroke.measure.serve.load import HttpClient, HttpFailure, Origin

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"
)
SHORT = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Kept:
    """An AnswerReader that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.content = b""

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        self.status, self.headers = status, dict(headers)

    def on_body(self, part: bytes, time_s: float) -> None:
        self.content += part


async def ask(client: HttpClient) -> Kept:
    answer = Kept()
    await client.send(client.origin.request("GET", "/", {}), answer)
    return answer


def answers(count: int, *connections: Sequence[bytes | None]) -> list[Kept]:
    """Send one request after another with one client."""

    async def run() -> list[Kept]:
        async with scripted(*connections) as url:
            client = HttpClient(Origin.parse(url))
            try:
                return [await ask(client) for _ in range(count)]
            finally:
                await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("width", [1, 3, 7, len(CHUNKED)])
def test_cuts_of_the_transport_do_not_matter(width: int) -> None:
    parts = [CHUNKED[a:b] for a, b in pairwise([*range(0, len(CHUNKED), width), len(CHUNKED)])]
    (found,) = answers(1, [None, *parts])
    assert found.status == 200
    assert found.headers[b"content-type"] == b"text/plain"
    assert found.content == b"firstsecond"


def test_a_connection_is_kept_for_the_next_request() -> None:
    assert [found.content for found in answers(2, [None, SHORT, None, CHUNKED])] == [b"ok", b"firstsecond"]


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    assert [found.content for found in answers(2, [None, SHORT], [None, SHORT])] == [b"ok", b"ok"]


def test_a_connection_that_closes_upon_the_second_request_is_replaced() -> None:
    assert [found.content for found in answers(2, [None, SHORT, None], [None, SHORT])] == [b"ok", b"ok"]


def test_a_server_that_wants_to_close_gets_a_new_connection() -> None:
    closing = SHORT.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert [found.content for found in answers(2, [None, closing, None, b"never"], [None, SHORT])] == [b"ok", b"ok"]


def test_a_provisional_answer_is_passed_over() -> None:
    (found,) = answers(1, [None, b"HTTP/1.1 102 Processing\r\n\r\n", SHORT])
    assert (found.status, found.content) == (200, b"ok")


def test_a_body_without_length_ends_with_the_connection() -> None:
    (found,) = answers(1, [None, b"HTTP/1.1 200 OK\r\n\r\n", b"all of", b" it"])
    assert found.content == b"all of it"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([None, CHUNKED[:-8]], "closed during the answer"),
        ([None, SHORT[:-1]], "closed during the answer"),
        ([None, SHORT[:12]], "without an answer"),
        ([None], "without an answer"),
        ([None, b"HTTP/1.1 102 Processing\r\n\r\n"], "without an answer"),
        ([None, b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(script: list[bytes | None], message: str) -> None:
    with pytest.raises(HttpFailure, match=message):
        answers(1, script)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def run() -> None:
        await ask(HttpClient(Origin("127.0.0.1", port, tls=False, prefix="")))

    with pytest.raises(HttpFailure, match="no connection"):
        asyncio.run(run())


def test_urls() -> None:
    assert Origin.parse("https://api.example.org/team/v1/") == Origin("api.example.org", 443, True, "/team")
    assert Origin.parse("http://[::1]:81").request("GET", "/x", {}).startswith(b"GET /x HTTP/1.1\r\nhost: [::1]:81\r\n")
    for wrong in ("127.0.0.1:8000", "ftp://x", "http://", "http://h:port", "http://h/?key=1"):
        with pytest.raises(InvalidParameter, match="url="):
            Origin.parse(wrong)


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(InvalidParameter, match="--api-key") as caught:
        Origin.parse("http://user:secret@host:80/v1")
    assert "secret" not in str(caught.value)
