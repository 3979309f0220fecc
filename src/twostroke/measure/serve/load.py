"""Sends requests when they are due (open loop), or a new one whenever one has ended (closed loop), and notes each."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop
from tqdm.auto import tqdm

from twostroke.measure.serve.http_connection import HttpClient, HttpFailure
from twostroke.measure.serve.openai_wire import Exchange, StreamedAnswer

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that only has to be sent."""

    due_s: float
    """After the start of the run."""
    wire: bytes
    """Head and body."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What became of the requests, in the order in which they were planned."""

    exchanges: tuple[Exchange, ...]
    generator_cpu_s: float
    """Processor time that sending and reading took."""
    start_s: float = 0.0
    """Of the run, on the monotonic clock, which all processes of a machine share."""

    @property
    def duration_s(self) -> float:
        """Until the last request had ended."""
        return max((e.end_s for e in self.exchanges), default=0.0)


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs it to its end on uvloop, which takes about half of the processor time of asyncio's own loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextmanager
def giving_way() -> Generator[None]:
    """Within it, bytes that come for this thread do not interrupt whoever runs on its processor.

    Clients are on other machines. One that shares a core with the server it measures is woken by every event that the
    server writes, takes the core at once, and the server pays for coming back. Where the system has no such policy,
    nothing changes.
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
    """Sends a plan and awaits every answer.

    Args:
        client: of the server.
        plan: in the order of time.
        timeout_s: of one request, from when it is sent; then it is given up.
        max_concurrency: this many at a time, each due when there is room for it, and the plan's times mean nothing;
            None sends each when it is due, whatever became of the others.
        progress: title of a progress bar; None shows none.
    """
    sender = _Sender(client, timeout_s)
    # a collection in mid-run would hold up whatever is due; the exchanges are no garbage
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
            tasks.append(group.create_task(sender.send(request.wire, request.due_s)))
            tasks[-1].add_done_callback(lambda _: bar.update())
    return [task.result() for task in tasks]


async def _closed_loop(
    sender: _Sender, plan: Sequence[PlannedRequest], max_concurrency: int, bar: tqdm[Any]
) -> list[Exchange]:
    found: dict[int, Exchange] = {}
    places = iter(range(len(plan)))

    async def keep_sending() -> None:
        for i in places:  # shared: whoever is free takes the next
            found[i] = await sender.send(plan[i].wire, sender.elapsed_s)
            bar.update()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(max_concurrency, len(plan))):
            group.create_task(keep_sending())
    return [found[i] for i in range(len(plan))]


class _Sender:
    """Sends one request and notes what happens; its clock starts when it is made."""

    def __init__(self, client: HttpClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self.start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the start of the run."""
        return time.monotonic() - self.start_s

    async def send(self, wire: bytes, due_s: float) -> Exchange:
        """Sends it now; never raises."""
        exchange = Exchange(scheduled_s=due_s, sent_s=self.elapsed_s)
        answer = StreamedAnswer(exchange, self.start_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.send(wire, answer)
        except TimeoutError:
            exchange.failure, exchange.message = "timeout", f"no whole answer within {self._timeout_s:g} s"
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
