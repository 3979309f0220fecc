"""Clients as networks and people make them: they come, ask, and leave at the worst moment, over sockets of their own.

connect ─► half the head ─► half the body ─► the whole request ─► some events ─► the end
              MID_HEAD        MID_BODY          UNANSWERED        MID_STREAM        STAYS
                                                HALF_CLOSE        RESET
                                                                  STOPS_READING
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from twostroke.measure.serve.http_connection import Origin

PATIENCE_S = 120.0
"""Without a byte for so long a client counts as stuck."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""struct linger of socket(7): on, for no time; close then sends RST, and what was not read is lost."""
_EVENT = b"data: "
_END = b"data: [DONE]"
_ERROR = b'data: {"error":'  # within an answer's text the quotes would be escaped
_HELD_S = 2.0
"""How long who stops reading, or sending, stays all the same, at most."""


class Way(StrEnum):
    """How a client leaves."""

    STAYS = "stays"
    NO_HTTP = "sends what is no HTTP"
    MID_HEAD = "leaves within its head"
    MID_BODY = "leaves within its body"
    UNANSWERED = "leaves with the request sent"
    MID_STREAM = "leaves within the stream"
    RESET = "resets within the stream"
    STOPS_READING = "stops reading, leaves later"
    HALF_CLOSE = "closes its side, reads on"


class Ending(StrEnum):
    """What a client saw last."""

    LEFT = "left"
    WHOLE = "a whole answer"
    REFUSED = "503 with Retry-After"
    ERROR = "an error of the server's"
    BROKEN = "an answer without an end"
    STUCK = "nothing, for too long"


@dataclass(frozen=True, slots=True)
class Visit:
    """What one client does."""

    way: Way
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stream: bool = True
    num_events: int = 1
    """Read before it leaves a stream."""
    held_s: float = 0.0
    """How long it holds the connection before it leaves."""


def drawn_visit(random: Random) -> Visit:
    """Any way of leaving, any moment of it.

    >>> drawn_visit(Random(1)) == drawn_visit(Random(1))
    True
    """
    way = random.choice(tuple(Way))
    return Visit(
        way=way,
        prompt_token_ids=tuple(random.randrange(300, 4000) for _ in range(random.randint(1, 96))),
        max_tokens=random.randint(1, 96),
        stream=way not in (Way.STAYS, Way.UNANSWERED, Way.HALF_CLOSE) or random.random() < 0.7,
        num_events=random.randint(1, 24),
        held_s=random.uniform(0, _HELD_S) if random.random() < 0.3 else 0.0,
    )


async def visit(origin: Origin, planned: Visit, on_event: Callable[[], object] = int) -> Ending:
    """Goes there and leaves as planned.

    Args:
        origin: without TLS.
        planned: what to do.
        on_event: called whenever something of the answer has come.
    """
    try:
        reader, writer = await asyncio.open_connection(origin.host, origin.port)
    except OSError:
        return Ending.BROKEN
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _spent(planned, origin, reader, writer, on_event)
    except TimeoutError:
        return Ending.STUCK
    except ConnectionError:  # the other side may leave, too, where we were about to
        return Ending.BROKEN if planned.way is Way.STAYS else Ending.LEFT
    finally:
        with contextlib.suppress(ConnectionError):
            writer.close()


async def _spent(
    planned: Visit,
    origin: Origin,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    on_event: Callable[[], object],
) -> Ending:
    head, body = _request(planned, origin)
    match planned.way:
        case Way.NO_HTTP:
            writer.write(bytes(reversed(head)))
        case Way.MID_HEAD:
            writer.write(head[: len(head) // 2])
        case Way.MID_BODY:
            writer.write(head + body[: len(body) // 2])
        case _:
            writer.write(head + body)
    await writer.drain()
    match planned.way:
        case Way.STAYS:
            return _ending(await _read(reader, None, on_event))
        case Way.HALF_CLOSE:
            writer.write_eof()
            await _read(reader, None, on_event)
        case Way.MID_STREAM | Way.RESET | Way.STOPS_READING:
            await _read(reader, planned.num_events, on_event)
        case _:
            pass
    await asyncio.sleep(_HELD_S if planned.way is Way.STOPS_READING else planned.held_s)
    if planned.way is Way.RESET:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        writer.transport.abort()
    return Ending.LEFT


def _request(planned: Visit, origin: Origin) -> tuple[bytes, bytes]:
    asked = {
        "prompt": planned.prompt_token_ids,
        "max_tokens": planned.max_tokens,
        "stream": planned.stream,
        "ignore_eos": True,
    }
    body = json.dumps(asked).encode()
    lines = (
        f"POST {origin.prefix}/v1/completions HTTP/1.1",
        f"host: {origin.host}:{origin.port}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode(), body


async def _read(reader: asyncio.StreamReader, num_events: int | None, on_event: Callable[[], object]) -> bytes:
    """What comes, until there are so many events or no more."""
    answer = b""
    while num_events is None or answer.count(_EVENT) < num_events:
        part = await reader.read(1 << 16)
        if not part:
            break
        answer += part
        on_event()
    return answer


def _ending(answer: bytes) -> Ending:
    """What a whole exchange was.

    >>> _ending(b"HTTP/1.1 503 X\\r\\nretry-after: 3\\r\\n\\r\\n{}").name, _ending(b"").name
    ('REFUSED', 'BROKEN')
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12]
    if status == b"503" and b"\r\nretry-after: " in head.lower():
        return Ending.REFUSED
    if status != b"200":
        return Ending.ERROR if body.startswith(b'{"error":') else Ending.BROKEN
    if _ERROR in body:
        return Ending.ERROR if _END in body else Ending.BROKEN
    is_whole = _END in body if b"text/event-stream" in head else body.endswith(b"}")
    return Ending.WHOLE if is_whole else Ending.BROKEN
