"""Offline batch: a file of requests through the server's checks, conversions and engine, without its HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tqdm.auto import tqdm

from twostroke.api.batch_file import BatchRequest, InvalidLine, ResultsFile, count_lines, read_requests
from twostroke.api.calls import CALLS
from twostroke.api.context import ServerContext
from twostroke.api.dialect import check_parsers
from twostroke.api.generation import Caller
from twostroke.api.http_errors import ErrorAnswer, HTTPError, error_body, validation_answer
from twostroke.api.protocol.fields import WireObject
from twostroke.api.protocol.sampling import SamplingFields
from twostroke.api.routing import invalid_json_error, read_body
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.config.checks import check_int
from twostroke.config.engine import EngineConfig
from twostroke.config.server import ServerConfig
from twostroke.engine.facts import printed_lines
from twostroke.errors import EngineError, EngineUnavailable, TwostrokeError

ATTEMPTS = 2
"""Attempts for a request whose engine died. Another request may be the cause; if not, retries must end."""

_POLL_S = 0.2


@dataclass(slots=True)
class BatchCount:
    """Counts of lines by outcome."""

    answered: int = 0
    refused: int = 0
    """Requests answered with a status other than 200."""
    bad_lines: int = 0
    done_before: int = 0
    """Requests with results of an earlier run, which are not run again."""

    def __str__(self) -> str:
        """Return a summary line for users."""
        return (
            f"{self.answered:,} answered, {self.refused:,} refused, {self.bad_lines:,} invalid lines, "
            f"{self.done_before:,} done before"
        )


async def answer_file(
    engine_config: EngineConfig,
    config: ServerConfig,
    requests: Path,
    output: Path,
    *,
    max_concurrency: int | None = None,
    progress: bool = True,
) -> BatchCount:
    """Call `run_batch` with an engine in a new process.

    Raises:
        SetupError: the model cannot be loaded.
        InvalidParameter: as in run_batch.
        EngineError: as in run_batch.
    """
    if max_concurrency is not None:
        check_int("max_concurrency", max_concurrency, 1)
    check_parsers(config)
    count_lines(requests)  # before the model is loaded, so that an unreadable file is reported immediately
    ResultsFile(output).close()
    engine = RemoteEngine(engine_config)
    try:
        await engine.start()
        if progress:
            sys.stderr.writelines(line + "\n" for line in printed_lines(engine.facts.startup_lines))
        context = ServerContext.of(engine, config, engine_config.load.model)
        return await run_batch(context, requests, output, max_concurrency=max_concurrency, progress=progress)
    finally:
        await engine.close()


async def run_batch(
    context: ServerContext,
    requests: Path,
    output: Path,
    *,
    max_concurrency: int | None = None,
    progress: bool = True,
) -> BatchCount:
    """Run every request that has no result yet, and append its result.

    Args:
        context: context with a started engine.
        requests: file in OpenAI's batch format.
        output: result file; an existing one is continued.
        max_concurrency: requests at a time, each held in memory; default: twice the engine's max_num_seqs, so that new
            requests are waiting when others end.
        progress: whether to show a progress bar.

    Raises:
        InvalidParameter: a file cannot be read or written, or is not in the format.
        EngineError: the engine cannot be restarted. Results so far are kept.
    """
    num_lines = count_lines(requests)
    results = ResultsFile(output)
    try:
        with tqdm(total=num_lines, unit="req", disable=None if progress else True, file=sys.stderr) as bar:
            batch = _Batch(context, results, bar)
            lines = read_requests(requests, frozenset(CALLS))
            async with asyncio.TaskGroup() as group:
                for _ in range(max_concurrency or 2 * context.engine.facts.max_num_seqs):
                    group.create_task(batch.work(lines))
            return batch.count
    except ExceptionGroup as group:  # errors of the workers; the first one ended the others
        first = group.exceptions[0]
        raise EngineError(str(first)) if isinstance(first, _EngineGone) else first from None
    finally:
        results.close()


class _Batch:
    """Workers that share one reader and one writer. All run in one event loop, so neither needs a lock."""

    def __init__(self, context: ServerContext, results: ResultsFile, bar: tqdm[Any]) -> None:
        self._context = context
        self._results = results
        self._bar = bar
        self._num_tokens = 0
        self._unknown_fields: set[str] = set()
        self.count = BatchCount()

    async def work(self, lines: Iterator[BatchRequest | InvalidLine]) -> None:
        """Process lines until there are none left."""
        for found in lines:
            if self._results.has(found):
                self.count.done_before += 1
            elif isinstance(found, InvalidLine):
                self.count.bad_lines += 1
                self._results.add_error(found)
            else:
                await self._answer(found)
            self._bar.update()
            await asyncio.sleep(0)  # skipping finished requests must not block the running ones

    async def _answer(self, request: BatchRequest) -> None:
        try:
            body, status = await self._ask(request), 200
            self.count.answered += 1
            self._num_tokens += body.get("usage", {}).get("completion_tokens", 0)
            self._bar.set_postfix(tokens=self._num_tokens, refresh=False)
        except (TwostrokeError, HTTPError, ValidationError, RecursionError) as error:
            told = _told(error)
            body, status = told.body, told.status
            self.count.refused += 1
        self._results.add_response(request, status, body)

    async def _ask(self, request: BatchRequest) -> dict[str, Any]:
        attempt = 0
        while True:
            await self._engine_is_ready()
            try:
                return await self._ask_once(request)
            except EngineUnavailable:
                continue  # the engine died after the check
            except EngineError:
                attempt += 1
                if attempt == ATTEMPTS:
                    raise

    async def _ask_once(self, request: BatchRequest) -> dict[str, Any]:
        kind = CALLS[request.url]
        asked = kind.body.model_validate(_value_of(kind.body, request.body))
        if asked.stream:
            message = "stream: not supported in a batch. Leave it out."
            raise HTTPError(400, message, param="stream")
        self._check_fields(asked)
        call = kind.call(self._context, asked)
        try:
            await call.open(Caller(self._context.engine.now_s(), self._context.admission))
            return await call.answer()
        finally:
            call.close()

    def _check_fields(self, asked: WireObject) -> None:
        """Check the fields, and log unknown ones once, where the server would name them in a header of each answer."""
        if isinstance(asked, SamplingFields):
            self._context.admission.check_items(asked)
        new = set(self._context.unknown_fields(asked)) - self._unknown_fields
        if new or self._context.config.strict:
            self._context.check_fields(asked)
            self._unknown_fields |= new

    async def _engine_is_ready(self) -> None:
        """Wait while the engine restarts.

        Raises:
            _EngineGone: the engine will not be restarted.
        """
        while not (health := self._context.engine.health()).is_ready:
            if not health.is_alive:
                raise _EngineGone(f"the batch stops: {health.cause} Run it again to continue.")
            await asyncio.sleep(_POLL_S)


class _EngineGone(Exception):
    """The engine is gone, so no further request can be answered."""


def _value_of(kind: type[WireObject], body: dict[str, Any] | bytes) -> Any:
    """Return the value of a body; raise HTTPError if a large one cannot be of this type."""
    if not isinstance(body, bytes):
        return body
    try:
        return read_body(kind, body)
    except json.JSONDecodeError as error:
        raise invalid_json_error(str(error)) from error


def _told(error: Exception) -> ErrorAnswer:
    return validation_answer(error.errors()) if isinstance(error, ValidationError) else error_body(error)
