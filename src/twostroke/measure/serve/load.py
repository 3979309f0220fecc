"""Load generator: sends requests when they are due (open loop), or one whenever another has ended (closed loop).

Its HTTP/1.1 client writes prepared bytes and passes on each read of the socket with the time it came.

Client and server share the machine's cores in most benchmarks, so the client's work per chunk distorts what it
measures. Framing is done by llhttp (httptools); nothing else runs between the event loop and the reader.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import ssl
import time
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import uvloop
from tqdm.auto import tqdm

from twostroke.engine.clock import Clock, monotonic_clock
from twostroke.errors import InvalidParameter
from twostroke.measure.serve.openai_wire import Exchange, StreamedAnswer


class HttpFailure(Exception):
    """Error: no complete answer, because there was no connection, it ended early, or the data was not HTTP."""


class _Stale(HttpFailure):
    """Error: the server closed an idle connection before answering; the request is not at fault."""


class AnswerReader(Protocol):
    """Consumer of an answer as it arrives; all data of one read of the socket has one time, from the clock."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        """Receive the status and the headers, with names in lower case."""
        ...

    def on_body(self, part: bytes, time_s: float) -> None:
        """Receive a part of the body, split anywhere."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Address of a server.

    >>> Origin.parse("http://127.0.0.1:8000/v1")
    Origin(host='127.0.0.1', port=8000, tls=False, prefix='')
    """

    host: str
    port: int
    tls: bool
    prefix: str
    """Path before /v1, for servers behind a gateway."""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Parse a base URL, with or without /v1.

        Raises:
            InvalidParameter: it is not an http or https URL of a server.
        """
        remedy = "Give http://HOST:PORT of the server; the key is --api-key."
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            host = None if host is None else host.encode("idna").decode()
        except ValueError as error:
            raise InvalidParameter("url", url, f"is not a URL ({error})", remedy) from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
            shown = url.replace(parts.netloc, host or "") if parts.username else url
            raise InvalidParameter("url", shown, "must be an http or https URL without query or user name", remedy)
        if not (parts.path.isascii() and parts.path.isprintable()) or " " in url:
            raise InvalidParameter("url", url, "must be printable ASCII without spaces", remedy)
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> bytes:
        """Return a complete request as bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"host: {host}:{self.port}", "user-agent: twostroke-bench"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


class HttpClient:
    """Connections to one server; each carries one answer at a time and is kept for the next."""

    def __init__(self, origin: Origin, clock: Clock = monotonic_clock) -> None:
        self.origin = origin
        self._clock = clock
        self._tls = ssl.create_default_context() if origin.tls else None
        self._idle: list[_Connection] = []

    async def send(self, request: bytes, reader: AnswerReader) -> None:
        """Send a request and return when its answer is complete.

        Raises:
            HttpFailure: there is no complete answer.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._send_on(connection, request, reader)
                except _Stale:
                    continue
        await self._send_on(await self._connect(), request, reader)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._clock), self.origin.host, self.origin.port, ssl=self._tls
            )
        except OSError as error:
            raise HttpFailure(f"no connection ({error.strerror or error})") from error
        return connection

    async def _send_on(self, connection: _Connection, request: bytes, reader: AnswerReader) -> None:
        if await connection.send(request, reader):
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the event loop's next iteration


class _Connection(asyncio.Protocol):
    """One connection. The parser calls the methods with `on_`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reader: AnswerReader | None = None
        self._done: asyncio.Future[bool] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._has_head = False
        self._num_answers = 0
        self._now_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as known."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, reader: AnswerReader) -> bool:
        """Send a request and await the whole answer; return whether the connection can be reused."""
        assert self._transport is not None, "not connected"
        assert self._done is None, "one request at a time"
        self._reader, self._has_head = reader, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except BaseException:  # cancelled: the rest of the answer must not reach the next request
            self._transport.abort()
            raise
        finally:
            self._reader, self._done = None, None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpFailure(f"the answer is not HTTP ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if self._has_head and exc is None and not self._headers.keys() & {b"content-length", b"transfer-encoding"}:
            self._done.set_result(False)  # a body without a length ends with the connection
        elif self._has_head:
            self._fail(HttpFailure("the connection was closed during the answer"))
        elif self._num_answers:
            self._fail(_Stale("the connection was closed before the answer"))
        else:
            self._fail(HttpFailure("the connection was closed without an answer"))

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Pass on the head; provisional answers (1xx) are ignored."""
        status = self._parser.get_status_code()
        if status >= 200 and self._reader is not None:
            self._has_head = True
            self._reader.on_head(status, self._headers, self._now_s)

    def on_body(self, part: bytes) -> None:
        if self._reader is not None:
            self._reader.on_body(part, self._now_s)

    def on_message_complete(self) -> None:
        """Complete the answer."""
        if self._has_head and self._done is not None and not self._done.done():
            self._num_answers += 1
            self._done.set_result(self._parser.should_keep_alive())

    def _fail(self, failure: HttpFailure) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(failure)
        self.close()


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Request that is ready to be sent."""

    due_s: float
    """Seconds after the start of the run."""
    request_bytes: bytes
    """Bytes of head and body."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Exchanges of a run, in the order of the plan."""

    exchanges: tuple[Exchange, ...]
    generator_cpu_s: float
    """Processor seconds spent on sending and reading."""
    start_s: float = 0.0
    """Start of the run on the monotonic clock, which all processes of a machine share."""

    @property
    def duration_s(self) -> float:
        """Seconds until the last request had ended."""
        return max((e.end_s for e in self.exchanges), default=0.0)


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on uvloop, which takes about half of the processor time of asyncio's own loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextmanager
def batch_priority() -> Generator[None]:
    """Run the block under SCHED_BATCH, so that arriving data does not preempt other processes on this core.

    Real clients are on other machines. A client on the server's core is woken by every event that the server writes
    and takes the core at once, so the server pays for the switch. If the system has no such policy, nothing changes.
    """
    try:
        before = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


async def run_load(
    client: HttpClient,
    plan: Sequence[PlannedRequest],
    *,
    timeout_s: float,
    max_concurrency: int | None = None,
    progress: str | None = None,
) -> LoadRun:
    """Send all requests of a plan and await every answer.

    Args:
        client: client of the server.
        plan: requests in order of time.
        timeout_s: seconds after sending at which a request is given up.
        max_concurrency: number of requests in flight; each is then due when another has ended, and the plan's times
        are ignored. None sends each when it is due, regardless of the others.
        progress: title of a progress bar; None shows none.
    """
    sender = _Sender(client, timeout_s)
    # a garbage collection during the run would delay requests that are due; the exchanges are no garbage
    gc.disable()
    try:
        with tqdm(total=len(plan), desc=progress, unit="req", disable=None if progress else True, leave=False) as bar:
            cpu_s = _cpu_s()
            if max_concurrency is None:
                exchanges = await _open_loop(sender, plan, bar)
            else:
                exchanges = await _closed_loop(sender, plan, max_concurrency, bar)
            return LoadRun(tuple(exchanges), _cpu_s() - cpu_s, sender.start_s)
    finally:
        gc.enable()


async def _open_loop(sender: _Sender, plan: Sequence[PlannedRequest], bar: tqdm[Any]) -> list[Exchange]:
    tasks: list[asyncio.Task[Exchange]] = []
    async with asyncio.TaskGroup() as group:
        for request in plan:
            wait_s = request.due_s - sender.elapsed_s
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(sender.send(request.request_bytes, request.due_s)))
            tasks[-1].add_done_callback(lambda _: bar.update())
    return [task.result() for task in tasks]


async def _closed_loop(
    sender: _Sender, plan: Sequence[PlannedRequest], max_concurrency: int, bar: tqdm[Any]
) -> list[Exchange]:
    found: dict[int, Exchange] = {}
    places = iter(range(len(plan)))

    async def worker() -> None:
        for i in places:  # shared by all tasks: each takes the next index
            found[i] = await sender.send(plan[i].request_bytes, sender.elapsed_s)
            bar.update()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(max_concurrency, len(plan))):
            group.create_task(worker())
    return [found[i] for i in range(len(plan))]


class _Sender:
    """Sender of requests that records their exchanges; its clock starts when it is created."""

    def __init__(self, client: HttpClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self.start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.start_s

    async def send(self, wire: bytes, due_s: float) -> Exchange:
        """Send a request now; never raises."""
        exchange = Exchange(scheduled_s=due_s, sent_s=self.elapsed_s)
        answer = StreamedAnswer(exchange, self.start_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.send(wire, answer)
        except TimeoutError:
            exchange.failure, exchange.message = "timeout", f"no complete answer within {self._timeout_s:g} s"
        except HttpFailure as failure:
            exchange.failure = "connection" if exchange.status is None else "truncated"
            exchange.message = str(failure)
        else:
            answer.end()
        exchange.end_s = self.elapsed_s
        return exchange


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
