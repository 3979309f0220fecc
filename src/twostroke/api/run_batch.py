"""A file of requests through the same checks, translation and engine as the server's, without its HTTP."""

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

from twostroke.api.batch_file import BadLine, BatchRequest, ResultsFile, count_lines, read_requests
from twostroke.api.calls import CALLS
from twostroke.api.context import ServerContext
from twostroke.api.dialect import check_parsers
from twostroke.api.generation import Caller
from twostroke.api.http_errors import ErrorAnswer, HTTPError, error_body, validation_answer
from twostroke.api.protocol.fields import WireObject
from twostroke.api.protocol.sampling import SamplingFields
from twostroke.api.routing import no_json, read_body
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.config.checks import whole_number
from twostroke.config.engine import EngineConfig
from twostroke.config.server import ServerConfig
from twostroke.engine.facts import lines_to_print
from twostroke.errors import EngineError, EngineUnavailable, TwostrokeError

ATTEMPTS = 2
"""Of a request whose engine died under it: that may be another's fault, and if not, it must not go on for ever."""

_POLL_S = 0.2


@dataclass(slots=True)
class BatchCount:
    """What became of the lines."""

    answered: int = 0
    refused: int = 0
    """With a status other than 200."""
    bad_lines: int = 0
    there_before: int = 0
    """Of these nothing was asked."""

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.answered:,} answered, {self.refused:,} refused, {self.bad_lines:,} lines that are no request, "
            f"{self.there_before:,} there before"
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
    """`run_batch` with an engine of its own, in a process of its own.

    Raises:
        SetupError: the model cannot be loaded.
        InvalidParameter, EngineError: see run_batch.
    """
    if max_concurrency is not None:
        whole_number("max_concurrency", max_concurrency, 1)
    check_parsers(config)
    count_lines(requests)  # before the model is loaded: a file that cannot be read is told at once
    ResultsFile(output).close()
    engine = RemoteEngine(engine_config)
    try:
        await engine.start()
        if progress:
            sys.stderr.writelines(line + "\n" for line in lines_to_print(engine.facts.startup_lines))
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
    """Answers every request that has no result yet, and appends its result.

    Args:
        context: with an engine that was started.
        requests: a file in OpenAI's batch format.
        output: results; a file that is there is gone on with.
        max_concurrency: requests at a time, each of which is held in memory; default: twice the engine's max_num_seqs,
            so that the next ones wait when some end.
        progress: show a progress bar.

    Raises:
        InvalidParameter: a file that cannot be read, written, or holds something else.
        EngineError: the engine is gone for good. What has results keeps them.
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
    except ExceptionGroup as group:  # of the workers; the first that failed ended the others
        first = group.exceptions[0]
        raise EngineError(str(first)) if isinstance(first, _EngineGone) else first from None
    finally:
        results.close()


class _Batch:
    """Workers that share one reader and one writer; all of them in one event loop, so neither needs a lock."""

    def __init__(self, context: ServerContext, results: ResultsFile, bar: tqdm[Any]) -> None:
        self._context = context
        self._results = results
        self._bar = bar
        self._num_tokens = 0
        self._unknown_fields: set[str] = set()
        self.count = BatchCount()

    async def work(self, lines: Iterator[BatchRequest | BadLine]) -> None:
        """Takes lines until there are none."""
        for found in lines:
            if self._results.has(found):
                self.count.there_before += 1
            elif isinstance(found, BadLine):
                self.count.bad_lines += 1
                self._results.add_error(found)
            else:
                await self._answer(found)
            self._bar.update()
            await asyncio.sleep(0)  # a file of finished requests must not hold up the ones that run

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
                continue  # it went between our look and our request
            except EngineError:
                attempt += 1
                if attempt == ATTEMPTS:
                    raise

    async def _ask_once(self, request: BatchRequest) -> dict[str, Any]:
        kind = CALLS[request.url]
        asked = kind.body.model_validate(_value_of(kind.body, request.body))
        if asked.stream:
            message = "stream: a batch has no streams. Leave it out."
            raise HTTPError(400, message, param="stream")
        self._check_fields(asked)
        call = kind.call(self._context, asked)
        try:
            await call.open(Caller(self._context.engine.now_s(), self._context.admission))
            return await call.answer()
        finally:
            call.close()

    def _check_fields(self, asked: WireObject) -> None:
        """What the server says in a header of each answer is said once here."""
        if isinstance(asked, SamplingFields):
            self._context.admission.check_items(asked)
        new = set(self._context.unknown_fields(asked)) - self._unknown_fields
        if new or self._context.config.strict:
            self._context.check_fields(asked)
            self._unknown_fields |= new

    async def _engine_is_ready(self) -> None:
        """Waits while the engine is started again.

        Raises:
            EngineError: it will not be.
        """
        while not (health := self._context.engine.health()).is_ready:
            if not health.is_alive:
                raise _EngineGone(f"the batch stops: {health.cause} Run it again to go on from here.")
            await asyncio.sleep(_POLL_S)


class _EngineGone(Exception):
    """Nothing more will be answered; not an answer to one request."""


def _value_of(kind: type[WireObject], body: dict[str, Any] | bytes) -> Any:
    """Return what a body says; raise HTTPError where a large one cannot be of this kind."""
    if not isinstance(body, bytes):
        return body
    try:
        return read_body(kind, body)
    except json.JSONDecodeError as error:
        raise no_json(str(error)) from error


def _told(error: Exception) -> ErrorAnswer:
    return validation_answer(error.errors()) if isinstance(error, ValidationError) else error_body(error)
