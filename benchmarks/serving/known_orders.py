"""Requests whose answers are known once they have been answered once: seeded, so each must get the same ever after.

A deck of orders of every kind is made from a seed; clients draw from it. What a server does meanwhile (other batches,
other blocks, preemptions, cached prefixes) may change when a token comes and never which.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

import msgspec

from twostroke.measure.serve.openai_wire import EventReader

MOST_TOKENS = 480
"""Of prompt and output of any order."""
_TEXTS = ("Sort a list.", "def area(r):", "Name three colours.", "Why is the sky blue?", "class Stack:")


class OrderKind(StrEnum):
    """What is asked for."""

    STREAM = "a stream"
    LONG = "a stream behind a long prompt"
    PREFIX = "a stream behind a shared prefix"
    CHAT = "a chat with log-probabilities"
    SEVERAL = "several answers"
    CHOICE = "text of a given form"
    BACKGROUND = "background work"
    REFUSED = "what must be refused"


@dataclass(frozen=True, slots=True)
class KnownOrder:
    """One request."""

    number: int
    kind: OrderKind
    path: str
    body: bytes
    status: int = 200
    """That the answer has to have."""

    @property
    def is_timed(self) -> bool:
        """Whether its times say what an interactive user notices."""
        return self.kind in (OrderKind.STREAM, OrderKind.PREFIX)


def deck_of(count: int, seed: int) -> list[KnownOrder]:
    """Orders of every kind in turn."""
    random = Random(seed)
    prefixes = [_tokens(random, 320) for _ in range(4)]
    kinds = list(OrderKind)
    return [_order(i, kinds[i % len(kinds)], random, prefixes) for i in range(count)]


def _order(number: int, kind: OrderKind, random: Random, prefixes: list[list[int]]) -> KnownOrder:
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
            prompt = _tokens(random, random.randint(256, MOST_TOKENS - 64))
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
    return KnownOrder(number, kind, path, msgspec.json.encode(said | asked), status)


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(300, 4000) for _ in range(count)]


@dataclass(slots=True)
class Heard:
    """An answer while it comes; an AnswerReader."""

    status: int = 0
    is_stream: bool = False
    times_s: list[float] = field(default_factory=list[float])
    """When something of the body came."""
    _body: bytearray = field(default_factory=bytearray)

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        self.status = status
        self.is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def on_body(self, part: bytes, time_s: float) -> None:
        self._body += part
        self.times_s.append(time_s)

    @property
    def essence(self) -> str:
        """Of everything that has to be the same the next time: texts, token ids, log-probabilities, reasons.

        Raises:
            ValueError: it is no whole answer.
        """
        choices = _streamed(bytes(self._body)) if self.is_stream else _whole(bytes(self._body))
        return hashlib.blake2b(msgspec.json.encode(choices), digest_size=16).hexdigest()


def _whole(body: bytes) -> Any:
    answer = msgspec.json.decode(body)
    if "error" in answer:
        return answer["error"]["message"]
    return [_parts(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def _streamed(body: bytes) -> Any:
    """Put together; how tokens were dealt out to events is not part of an answer."""
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
    """What came of each order the first time, and whether it ever came out differently."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self.num_repeated = 0
        self.differing: list[int] = []
        """Numbers of orders."""
        self.wrong: list[str] = []
        """Answers that were none, in words."""

    def take(self, order: KnownOrder, heard: Heard) -> bool:
        """Whether it is a whole answer, of the right kind."""
        if heard.status != order.status:
            self.wrong.append(f"{order.kind}: status {heard.status}")
            return False
        try:
            essence = heard.essence
        except (ValueError, LookupError, TypeError) as error:
            self.wrong.append(f"{order.kind}: {error!r}"[:200])
            return False
        known = self._known.get(order.number)
        if known is None:
            self._known[order.number] = essence
            return True
        self.num_repeated += 1
        if known != essence:
            self.differing.append(order.number)
        return True
