"""Bodies on their way in: what all of them hold together, and which is given up when there is no room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from twostroke.api.bodies import BodyReader, UnfinishedBodies
from twostroke.api.http_errors import HTTPError

ROOM = 1000
GONE = b"(the client leaves)"


def played(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


class Client:
    """Sends a body in parts, each when it is told to."""

    def __init__(self, reader: BodyReader, **headers: str) -> None:
        self._parts: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        given = Headers({name.replace("_", "-"): value for name, value in headers.items()})
        self.task = asyncio.ensure_future(reader.read(given, self._receive))

    async def _receive(self) -> dict[str, Any]:
        part, is_more = await self._parts.get()
        if part == GONE:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": is_more}

    async def send(self, part: bytes, *, is_last: bool = False) -> None:
        self._parts.put_nowait((part, not is_last))
        for _ in range(10):
            await asyncio.sleep(0)

    @property
    def status(self) -> int:
        """Return the status of the refusal; 0 while the body is read, 200 when it was read."""
        if not self.task.done():
            return 0
        error = self.task.exception()
        if error is None:
            return 200
        assert isinstance(error, HTTPError)
        return error.answer.status


def reader(room: int = ROOM, largest: int = 600) -> BodyReader:
    return BodyReader(largest, 1000.0, room)


def test_a_body_whose_client_has_left_is_no_body() -> None:
    """The beginning may be valid JSON and mean something else than the whole."""

    async def scene() -> None:
        for beginning in (b"", b'{"prompt": "a"}'):
            client = Client(reader())
            if beginning:
                await client.send(beginning)
            await client.send(GONE)
            assert client.status == 400

    played(scene)


def test_the_oldest_with_more_than_its_share_is_given_up() -> None:
    async def scene() -> None:
        bodies = reader()
        small, old, new = Client(bodies), Client(bodies), Client(bodies)
        await small.send(b"s")
        await old.send(b"o" * 500)
        await new.send(b"n" * 499)
        assert (small.status, old.status, new.status) == (0, 0, 0), "they fill the room, and no more"
        await new.send(b"n")
        assert (small.status, old.status, new.status) == (0, 503, 0)
        error = old.task.exception()
        assert isinstance(error, HTTPError)
        assert "hold more than 1,000 bytes (--max-unfinished-body-bytes)" in str(error)
        assert error.answer.headers == {"retry-after": "1"}
        await new.send(b"!", is_last=True)
        await small.send(b"!", is_last=True)
        assert (new.task.result(), small.task.result()) == (b"n" * 500 + b"!", b"s!")

    played(scene)


def test_who_sends_at_once_is_served_beside_two_hundred_who_never_end() -> None:
    async def scene() -> None:
        bodies = reader(room=100_000, largest=4000)
        slow = [Client(bodies) for _ in range(200)]
        for client in slow:
            await client.send(b"a" * 3999)
            honest = Client(bodies)
            await honest.send(b"h" * 2000)
            await honest.send(b"h" * 2000, is_last=True)
            assert honest.task.result() == b"h" * 4000
        assert sum(client.status == 503 for client in slow) >= 175
        assert {client.status for client in slow} == {0, 503}
        for client in slow:
            client.task.cancel()
        await asyncio.gather(*(client.task for client in slow), return_exceptions=True)

    played(scene)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 600), st.booleans()), max_size=60))
def test_no_more_than_the_room_is_ever_held(parts: list[tuple[int, int, bool]]) -> None:
    async def scene() -> None:
        bodies = reader()
        unfinished: UnfinishedBodies = bodies._unfinished  # pyright: ignore[reportPrivateUsage]
        clients = [Client(bodies) for _ in range(8)]
        sent = [0] * 8
        for number, size, is_last in parts:
            if clients[number].status:
                clients[number], sent[number] = Client(bodies), 0
            sent[number] += size
            await clients[number].send(b"x" * size, is_last=is_last)
            assert 0 <= unfinished.num_bytes <= ROOM
            reading = [held for client, held in zip(clients, sent, strict=True) if not client.status]
            assert unfinished.num_bytes == sum(reading), "those that are complete or given up count no more"
        for client in clients:
            client.task.cancel()
        await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
        assert unfinished.num_bytes == 0

    played(scene)


def test_limits_of_one_body() -> None:
    async def scene() -> None:
        said = Client(reader(), content_length="601")
        await asyncio.sleep(0)
        with pytest.raises(HTTPError, match="larger than 600 bytes"):
            await said.task
        grown = Client(reader())
        await grown.send(b"a" * 600)
        await grown.send(b"a")
        with pytest.raises(HTTPError, match="larger than 600 bytes"):
            await grown.task
        late = Client(BodyReader(600, 0.001, ROOM))
        with pytest.raises(HTTPError, match=r"did not arrive within 0\.001 s"):
            await late.task
        nothing = Client(reader())
        await nothing.send(b"", is_last=True)
        assert nothing.task.result() == b""
        ended = Client(reader())
        await ended.send(b"a")
        ended.task.cancel()
        with pytest.raises(HTTPError, match="shutting down"):
            await ended.task

    played(scene)


def test_a_body_in_single_bytes_takes_its_bytes_and_no_object_for_each() -> None:
    async def scene() -> None:
        bodies = reader(room=10**6, largest=10**6)
        client = Client(bodies)
        for _ in range(1000):
            await client.send(b"a")
        (body,) = bodies._unfinished._bodies  # pyright: ignore[reportPrivateUsage]
        assert body.num_bytes == 1000
        await client.send(b"", is_last=True)
        assert client.task.result() == b"a" * 1000

    played(scene)
