"""Requests with reproducible answers: they are seeded, so each must always get the same answer as the first time.

A fixed list of requests of every kind is made from a seed; clients draw from it. The server's other work (batches,
blocks, preemptions, cached prefixes) may change the time of a token, but never the token.

Clients that behave like real networks and users: they connect, send, and disconnect at the worst moment, each over its
own socket.

connect ─► half the head ─► half the body ─► the whole request ─► some events ─► the end
              MID_HEAD        MID_BODY          UNANSWERED        MID_STREAM        STAYS
                                                HALF_CLOSE        RESET
                                                                  STOPS_READING
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

import msgspec

from twostroke.measure.serve.load import Origin
from twostroke.measure.serve.openai_wire import EventReader
from twostroke.measure.serve.target import WholeAnswer

MAX_TOKENS = 480
"""Most prompt and output tokens of any request."""
_TEXTS = ("Sort a list.", "def area(r):", "Name three colours.", "Why is the sky blue?", "class Stack:")


class OrderKind(StrEnum):
    """Kind of a request."""

    STREAM = "a stream"
    LONG = "a stream behind a long prompt"
    PREFIX = "a stream behind a shared prefix"
    CHAT = "a chat with log-probabilities"
    SEVERAL = "several answers"
    CHOICE = "text of a given form"
    BACKGROUND = "background work"
    REFUSED = "what must be refused"


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """One request with a known answer."""

    number: int
    kind: OrderKind
    path: str
    body: bytes
    status: int = 200
    """Expected status of the answer."""

    @property
    def is_timed(self) -> bool:
        """Whether its latency is what an interactive user notices."""
        return self.kind in (OrderKind.STREAM, OrderKind.PREFIX)


def make_known_requests(count: int, seed: int) -> list[KnownRequest]:
    """Return requests of all kinds, alternating."""
    random = Random(seed)
    prefixes = [_tokens(random, 320) for _ in range(4)]
    kinds = list(OrderKind)
    return [_order(i, kinds[i % len(kinds)], random, prefixes) for i in range(count)]


def _order(number: int, kind: OrderKind, random: Random, prefixes: list[list[int]]) -> KnownRequest:
    asked: dict[str, Any] = {
        "max_tokens": random.randint(4, 64),
        "ignore_eos": True,
        "seed": number,
        "temperature": random.choice((0.0, 0.8)),
        "stream": kind not in (OrderKind.SEVERAL, OrderKind.CHOICE),
        "return_token_ids": True,
    }
    path, status, prompt = "/v1/completions", 200, _tokens(random, random.randint(1, 96))
    match kind:
        case OrderKind.LONG:
            prompt = _tokens(random, random.randint(256, MAX_TOKENS - 64))
        case OrderKind.PREFIX:
            prompt = prefixes[number % len(prefixes)] + prompt[:48]
        case OrderKind.CHAT:
            path = "/v1/chat/completions"
            asked |= {"logprobs": True, "top_logprobs": 2}
        case OrderKind.SEVERAL:
            asked |= {"n": 3, "stop": ["e", "\n"], "ignore_eos": False}
        case OrderKind.CHOICE:
            asked |= {"structured_outputs": {"regex": "[a-f]{4,20}[0-9]+x"}, "ignore_eos": False}
        case OrderKind.BACKGROUND:
            asked |= {"service_tier": "flex"}
        case OrderKind.REFUSED:
            asked, status = asked | {"temperature": -1.0}, 400
        case _:
            pass
    chat = {"messages": [{"role": "user", "content": random.choice(_TEXTS)}]}
    said: dict[str, Any] = chat if kind is OrderKind.CHAT else {"prompt": prompt}
    return KnownRequest(number, kind, path, msgspec.json.encode(said | asked), status)


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(300, 4000) for _ in range(count)]


class TimedAnswer(WholeAnswer):
    """Receiver of an answer, with the times of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stream = False
        self.times_s: list[float] = []
        """Times at which parts of the body arrived."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        super().on_head(status, headers, time_s)
        self.is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def on_body(self, part: bytes, time_s: float) -> None:
        super().on_body(part, time_s)
        self.times_s.append(time_s)

    @property
    def answer_digest(self) -> str:
        """Hash of everything that must be reproduced: texts, token ids, log-probabilities, finish reasons.

        Raises:
            ValueError: it is no whole answer.
        """
        choices = (_streamed if self.is_stream else _whole)(bytes(self.content))
        return hashlib.blake2b(msgspec.json.encode(choices), digest_size=16).hexdigest()


def _whole(body: bytes) -> Any:
    answer = msgspec.json.decode(body)
    if "error" in answer:
        return answer["error"]["message"]
    return [_parts(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def _streamed(body: bytes) -> Any:
    """Return a streamed answer as a whole; the distribution of tokens over events is not part of it."""
    texts: defaultdict[int, list[Any]] = defaultdict(lambda: ["", [], [], None])
    is_whole = False
    for data in EventReader().feed(body):
        if data == b"[DONE]":
            is_whole = True
            continue
        event = msgspec.json.decode(data)
        if "error" in event:
            raise ValueError(f"an error in the stream: {event['error']}")
        for choice in event["choices"]:
            text, ids, logprobs, reason = _parts(choice)
            found = texts[choice["index"]]
            found[0] += text
            found[1] += ids
            found[2] += logprobs
            found[3] = reason or found[3]
    if not is_whole:
        raise ValueError("a stream without its end")
    return sorted(texts.items())


def _parts(choice: Mapping[str, Any]) -> tuple[str, list[int], list[Any], str | None]:
    message = choice.get("message") or choice.get("delta") or {}
    text = choice.get("text") or message.get("content") or ""
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return text, choice.get("token_ids") or [], logprobs, choice.get("finish_reason")


class Answers:
    """Record of each request's first answer, and of later ones that differ."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self.num_repeated = 0
        self.differing: list[int] = []
        """Numbers of the requests whose answers differ."""
        self.wrong: list[str] = []
        """Descriptions of invalid answers."""

    def take(self, order: KnownRequest, heard: TimedAnswer) -> bool:
        """Record an answer; return whether it is complete and of the right kind."""
        if heard.status != order.status:
            self.wrong.append(f"{order.kind}: status {heard.status}")
            return False
        try:
            digest = heard.answer_digest
        except (ValueError, LookupError, TypeError) as error:
            self.wrong.append(f"{order.kind}: {error!r}"[:200])
            return False
        known = self._known.get(order.number)
        if known is None:
            self._known[order.number] = digest
            return True
        self.num_repeated += 1
        if known != digest:
            self.differing.append(order.number)
        return True


TIMEOUT_S = 120.0
"""Seconds without a byte after which a client counts as stuck."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""struct linger of socket(7): on, zero seconds; close then sends RST, and unread data is lost."""
_EVENT = b"data: "
_END = b"data: [DONE]"
_ERROR = b'data: {"error":'  # within an answer's text the quotes would be escaped
_HELD_S = 2.0
"""Longest time that a client stays connected after it stops reading or sending, in seconds."""


class Way(StrEnum):
    """Ways in which a client leaves."""

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
    """Last observation of a client."""

    LEFT = "left"
    WHOLE = "a whole answer"
    REFUSED = "503 with Retry-After"
    ERROR = "an error of the server's"
    BROKEN = "an answer without an end"
    STUCK = "nothing, for too long"


@dataclass(frozen=True, slots=True)
class Visit:
    """Planned behaviour of one client."""

    way: Way
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stream: bool = True
    num_events: int = 1
    """Events to read before leaving a stream."""
    held_s: float = 0.0
    """Seconds to hold the connection before leaving."""


def drawn_visit(random: Random) -> Visit:
    """Return a random way of leaving at a random moment.

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
    """Connect, send and leave as planned.

    Args:
        origin: without TLS.
        planned: behaviour of the client.
        on_event: called whenever a part of the answer has arrived.
    """
    try:
        reader, writer = await asyncio.open_connection(origin.host, origin.port)
    except OSError:
        return Ending.BROKEN
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _spent(planned, origin, reader, writer, on_event)
    except TimeoutError:
        return Ending.STUCK
    except ConnectionError:  # the server may close a connection that the client was about to close
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
    request = origin.request("POST", "/v1/completions", {"connection": "close"}, body)
    return request.removesuffix(body), body


async def _read(reader: asyncio.StreamReader, num_events: int | None, on_event: Callable[[], object]) -> bytes:
    """Return the answer until it has `num_events` events or ends."""
    answer = b""
    while num_events is None or answer.count(_EVENT) < num_events:
        part = await reader.read(1 << 16)
        if not part:
            break
        answer += part
        on_event()
    return answer


def _ending(answer: bytes) -> Ending:
    """Return the ending of a complete exchange.

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
