"""OpenAI's completions and chat completions as a client: bodies of requests, and what the events of a stream say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from twostroke.measure.serve.event_stream import EventStream
from twostroke.measure.serve.exchange import Exchange

EndpointName = Literal["completions", "chat"]
PATHS: Mapping[EndpointName, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

TokenCounts = Literal["usage", "token-ids", "chunks"]
"""Where the number of tokens in a chunk is taken from."""

_KEPT_OF_A_FAILURE = 2000
"""Bytes of an error's body."""

_ASKED_FOR: Mapping[TokenCounts, dict[str, Any]] = {
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token-ids": {"stream_options": {"include_usage": True}, "return_token_ids": True},
    "chunks": {"stream_options": {"include_usage": True}},
}


def body(
    endpoint: EndpointName, prompt: str | tuple[int, ...], max_tokens: int, counts: TokenCounts, more: Mapping[str, Any]
) -> bytes:
    """The JSON of a streamed request; `more` has the last word on every field."""
    if endpoint == "completions":
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens}
    else:
        asked = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": max_tokens}
    return msgspec.json.encode({**asked, "stream": True, **_ASKED_FOR[counts], **more})


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether a token must have made this: the role that opens a chat, and the reason that closes it, are none."""
        if self.delta is None:
            return bool(self.text)
        of = self.delta
        return bool(
            of.content or of.reasoning or of.reasoning_content or bytes(of.tool_calls) not in (b"", b"null", b"[]")
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode_event = msgspec.json.Decoder(_Event).decode


class StreamedAnswer:
    """Reads the answer to a streamed request into an Exchange; an AnswerReader of http_connection.

    Args:
        exchange: filled while the answer comes.
        start_s: of the run, on the clock that times come from.
    """

    def __init__(self, exchange: Exchange, start_s: float) -> None:
        self._exchange = exchange
        self._start_s = start_s
        self._events = EventStream()
        self._failed = bytearray()
        self._is_done = False
        self._usage_counts_along = True
        """Until a chunk with tokens comes without: some servers send usage with the last chunk alone."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        """See AnswerReader."""
        self._exchange.status = status
        self._exchange.retry_after_s = _seconds(headers.get(b"retry-after"))
        if status != 200:
            self._exchange.failure = str(status)
        elif not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._fail("no stream", f"content-type is {headers.get(b'content-type', b'').decode('latin-1')!r}")

    def on_body(self, part: bytes, time_s: float) -> None:
        """See AnswerReader."""
        if self._exchange.status != 200:
            self._failed += part[: _KEPT_OF_A_FAILURE - len(self._failed)]
        elif self._exchange.failure is None:
            try:
                count = sum(map(self._take, self._events.feed(part)))
            except ValueError as error:  # msgspec's are
                self._fail("malformed", str(error))
            else:
                self._exchange.take_tokens(count, time_s - self._start_s)

    def end(self) -> None:
        """The transport has the whole answer; whether it is one is seen here."""
        if self._failed:
            self._exchange.message = self._failed.decode("utf-8", "replace")
        if self._exchange.failure is None and not self._is_done:
            self._fail("truncated", "the stream ended without data: [DONE]")

    def _take(self, data: bytes) -> int:
        """One event; returns how many tokens it brought."""
        exchange = self._exchange
        if data == b"[DONE]":
            self._is_done = True
            return 0
        event = _decode_event(data)
        if bytes(event.error) not in (b"", b"null"):
            self._fail("error event", bytes(event.error).decode("utf-8", "replace"))
            return 0
        count, has_ids = 0, False
        for choice in event.choices:
            exchange.finish_reason = choice.finish_reason or exchange.finish_reason
            has_ids = has_ids or choice.token_ids is not None
            count += choice.says_something if choice.token_ids is None else len(choice.token_ids)
        if event.usage is None or event.usage.completion_tokens is None:
            self._usage_counts_along = self._usage_counts_along and not count
            return count
        added = event.usage.completion_tokens - (exchange.completion_tokens or 0)
        self._bill(event.usage)
        # at the very end usage is the sum and brings no token
        return added if event.choices and self._usage_counts_along and not has_ids else count

    def _bill(self, usage: _Usage) -> None:
        self._exchange.completion_tokens = usage.completion_tokens
        self._exchange.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self._exchange.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _fail(self, kind: str, message: str) -> None:
        self._exchange.failure, self._exchange.message = kind, message[:_KEPT_OF_A_FAILURE]


def _seconds(header: bytes | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is not read."""
    try:
        return None if header is None else float(header)
    except ValueError:
        return None
