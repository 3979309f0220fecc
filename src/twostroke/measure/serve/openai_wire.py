"""Client side of OpenAI's completions and chat completions: request bodies, and the events of streamed answers.

Events are server-sent and may be split anywhere: https://html.spec.whatwg.org/multipage/server-sent-events.html

An Exchange is one request as its sender saw it: when it was due, when each of its tokens came, and how it ended.

       scheduled  sent      chunk of 1   chunk of 2       end
           |--------|-----------|------------|-------------|
           lateness                    gap = 2 ITL samples of gap / 2
           |------ ttft --------|
           |---------------------- e2e --------------------|

Latencies count from when the request was due, not from when it was sent. A sender that is delayed by the server it
measures would otherwise leave out the very requests that wait (coordinated omission). Chunks that came in one read
of the socket have one time and count as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import msgspec

MAX_EVENT_BYTES = 1 << 24
"""Limit for the bytes of an event, far above any real one, so that a stream without line ends cannot fill memory."""


class EventReader:
    """Parser that joins the parts of a stream and returns the data of each complete event.

    Only `data` fields are used, and lines end in LF or CR LF. The standard also allows a CR alone, but no server of
    this API sends it, and accepting it would make every chunk that ends in CR wait for the next.

    >>> stream = EventReader()
    >>> [list(stream.feed(part)) for part in (b'data: {"a"', b': 1}\\n\\nda', b'ta:[DONE]\\r\\n\\r\\n')]
    [[], [b'{"a": 1}'], [b'[DONE]']]
    """

    def __init__(self) -> None:
        self._rest = b""
        """Bytes of the line that has not ended."""
        self._data: list[bytes] = []
        """Data of the event that has not ended."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Parse the next bytes; yield the data of the events that they complete.

        Raises:
            ValueError: a line is longer than MAX_EVENT_BYTES.
        """
        *lines, self._rest = (self._rest + part if self._rest else part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip(b" \r"))
            elif line in (b"", b"\r") and self._data:
                yield self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data.clear()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES:,} bytes")


@dataclass(slots=True)
class Exchange:
    """One request and its answer; times are in seconds after the start of the run."""

    scheduled_s: float
    sent_s: float = 0.0
    status: int | None = None
    """HTTP status; None if there was no answer."""
    chunk_times_s: list[float] = field(default_factory=list[float])
    """Times at which tokens came."""
    chunk_tokens: list[int] = field(default_factory=list[int])
    """Tokens that came at each of these times, as far as the server reports them."""
    end_s: float = 0.0
    failure: str | None = None
    """Kind of failure, such as "429", "timeout" or "truncated"; None if it succeeded."""
    message: str = ""
    """Text of the server or the socket about the failure."""
    retry_after_s: float | None = None
    prompt_tokens: int | None = None
    """Server's count, as for the next two; None if not reported."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens as reported by the server, or else as counted in the chunks."""
        return sum(self.chunk_tokens) if self.completion_tokens is None else self.completion_tokens

    @property
    def lateness_s(self) -> float:
        """Seconds from when it was due until it was sent."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from when it was due to the first token; None without one."""
        return self.chunk_times_s[0] - self.scheduled_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float:
        """Seconds from when it was due to the end of the answer, or to the failure."""
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first chunk's first; None for a single token."""
        num_gaps = self.num_output_tokens - 1
        return (
            (self.chunk_times_s[-1] - self.chunk_times_s[0]) / num_gaps if self.chunk_times_s and num_gaps > 0 else None
        )

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between reads that brought tokens."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]

    @property
    def itl_s(self) -> list[float]:
        """One sample for each token after the first chunk: a chunk of m tokens gives m samples of gap / m."""
        return [gap / m for gap, m in zip(self.gaps_s, self.chunk_tokens[1:], strict=True) for _ in range(m)]

    def add_tokens(self, count: int, time_s: float) -> None:
        """Record tokens that arrived; those with equal times form one chunk."""
        if count <= 0:
            return
        if self.chunk_times_s and self.chunk_times_s[-1] == time_s:
            self.chunk_tokens[-1] += count
        else:
            self.chunk_times_s.append(time_s)
            self.chunk_tokens.append(count)


EndpointName = Literal["completions", "chat"]
PATHS: Mapping[EndpointName, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

TokenCounts = Literal["usage", "token-ids", "chunks"]
"""Source of the number of tokens in a chunk."""

_KEPT_OF_A_FAILURE = 2000
"""Bytes kept of an error's body."""

_ASKED_FOR: Mapping[TokenCounts, dict[str, Any]] = {
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token-ids": {"stream_options": {"include_usage": True}, "return_token_ids": True},
    "chunks": {"stream_options": {"include_usage": True}},
}


def body(
    endpoint: EndpointName, prompt: str | tuple[int, ...], max_tokens: int, counts: TokenCounts, more: Mapping[str, Any]
) -> bytes:
    """Return the JSON body of a streamed request; fields in `more` override all others."""
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
    def has_token(self) -> bool:
        """Whether it contains a token: the role that opens a chat and the reason that closes it do not."""
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
    """Reader of a streamed answer that fills an Exchange; an `AnswerReader`.

    Args:
        exchange: filled while the answer arrives.
        start_s: start of the run, on the clock of the times passed in.
    """

    def __init__(self, exchange: Exchange, start_s: float) -> None:
        self._exchange = exchange
        self._start_s = start_s
        self._events = EventReader()
        self._failed = bytearray()
        self._is_done = False
        self._has_continuous_usage = True
        """Whether every chunk with tokens had usage so far: some servers send it only with the last chunk."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        self._exchange.status = status
        self._exchange.retry_after_s = _seconds(headers.get(b"retry-after"))
        if status != 200:
            self._exchange.failure = str(status)
        elif not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._fail("no stream", f"the content-type is {headers.get(b'content-type', b'').decode('latin-1')!r}")

    def on_body(self, part: bytes, time_s: float) -> None:
        if self._exchange.status != 200:
            self._failed += part[: _KEPT_OF_A_FAILURE - len(self._failed)]
        elif self._exchange.failure is None:
            try:
                count = sum(map(self._take, self._events.feed(part)))
            except ValueError as error:  # msgspec's decoding errors are ValueErrors
                self._fail("malformed", str(error))
            else:
                self._exchange.add_tokens(count, time_s - self._start_s)

    def end(self) -> None:
        """Check the answer after the transport has received all of it."""
        if self._failed:
            self._exchange.message = self._failed.decode("utf-8", "replace")
        if self._exchange.failure is None and not self._is_done:
            self._fail("truncated", "the stream ended without data: [DONE]")

    def _take(self, data: bytes) -> int:
        """Process one event; return the number of tokens that it brought."""
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
            count += choice.has_token if choice.token_ids is None else len(choice.token_ids)
        if event.usage is None or event.usage.completion_tokens is None:
            self._has_continuous_usage = self._has_continuous_usage and not count
            return count
        added = event.usage.completion_tokens - (exchange.completion_tokens or 0)
        self._record_usage(event.usage)
        # the final usage event has the total and brings no token
        return added if event.choices and self._has_continuous_usage and not has_ids else count

    def _record_usage(self, usage: _Usage) -> None:
        self._exchange.completion_tokens = usage.completion_tokens
        self._exchange.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self._exchange.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _fail(self, kind: str, message: str) -> None:
        self._exchange.failure, self._exchange.message = kind, message[:_KEPT_OF_A_FAILURE]


def _seconds(header: bytes | None) -> float | None:
    """Return a Retry-After value in seconds; None for its other form, a date."""
    try:
        return None if header is None else float(header)
    except ValueError:
        return None
