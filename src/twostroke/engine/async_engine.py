"""AsyncEngine: the engine in a thread of its own, its outputs as async streams."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from twostroke.config.engine import EngineConfig
from twostroke.engine.assembly import build_text_engine
from twostroke.engine.input_processor import Prompt
from twostroke.engine.text_engine import TextEngine
from twostroke.errors import EngineError, RequestAborted
from twostroke.log import get_logger
from twostroke.outputs import RequestOutput
from twostroke.sampling_params import SamplingParams

log = get_logger(__name__)


@dataclass(slots=True)
class _Stream:
    """Where the outputs of one request go: a queue of the event loop that asked."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[RequestOutput | BaseException]

    def put(self, item: RequestOutput | BaseException) -> None:
        """Hands an item over from the engine's thread; a loop that has closed is no longer interested."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            log.debug("the event loop of a stream has closed")


class AsyncEngine:
    """Streams from many coroutines at once; the engine itself runs in one thread.

    >>> async def example():                                              # doctest: +SKIP
    ...     async with AsyncEngine("embedded") as engine:
    ...         async for output in engine.generate("def add(", SamplingParams(max_tokens=8)):
    ...             print(output.outputs[0].text)

    Args:
        model: folder, hub id or "embedded".
        config: the fields of EngineConfig's parts, by name.
    """

    def __init__(self, model: str = "embedded", **config: Any) -> None:
        self._engine: TextEngine = build_text_engine(EngineConfig.from_keywords(model=model, **config))
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields what is there so far, after each step that added to it; the last one is `finished`.

        Leaving the loop early, or cancelling it, aborts the request.

        Raises:
            ClientError: the prompt or the parameters cannot be run.
            EngineError: the engine has stopped.
        """
        params = sampling_params or SamplingParams()
        stream = self._open(
            lambda: self._engine.submit(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        )
        async for output in self._follow(*await stream):
            yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for a conversation rendered by the model's chat template."""
        params = sampling_params or SamplingParams()
        stream = self._open(
            lambda: self._engine.submit_chat(
                messages, params, request_id=request_id, priority=priority, cache_salt=cache_salt
            )
        )
        async for output in self._follow(*await stream):
            yield output

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream ends with finish_reason "abort". Unknown ids are no error: it may have ended."""
        self._commands.put(lambda: self._engine.abort(request_id))

    def close(self) -> None:
        """Stops the thread; streams that are still open end with an error."""
        if not self._is_closed:
            self._is_closed = True
            self._commands.put(lambda: None)
            self._thread.join()

    def _open(self, submit: Callable[[], str]) -> asyncio.Future[tuple[str, _Stream]]:
        """Submits in the engine's thread; the future is the request's id and stream, or why it was refused."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, _Stream]] = loop.create_future()
        stream = _Stream(loop, asyncio.Queue())

        def resolve(request_id: str | None, error: Exception | None) -> None:
            if answer.cancelled():
                if request_id is not None:
                    self._commands.put(lambda: self._engine.abort(request_id))
            elif error is not None:
                answer.set_exception(error)
            else:
                assert request_id is not None, "neither id nor error"
                answer.set_result((request_id, stream))

        def command() -> None:
            try:
                request_id = submit()
            except Exception as error:
                # handed to the one who asked; the engine's thread serves the others
                loop.call_soon_threadsafe(resolve, None, error)
                return
            self._streams[request_id] = stream
            loop.call_soon_threadsafe(resolve, request_id, None)

        if self._is_closed:
            raise EngineError("the engine is closed")
        self._commands.put(command)
        return answer

    async def _follow(self, request_id: str, stream: _Stream) -> AsyncIterator[RequestOutput]:
        ended = False
        try:
            while not ended:
                item = await stream.items.get()
                if isinstance(item, BaseException):
                    ended = True
                    raise item
                ended = item.finished
                yield item
        finally:
            if not ended:
                self._commands.put(lambda: self._engine.abort(request_id))

    def _run(self) -> None:
        """The thread: commands between steps, steps while there is work, sleep otherwise."""
        try:
            while not self._is_closed:
                self._obey(block=not self._engine.has_work)
                for output in self._engine.step():
                    self._deliver(output)
        except Exception as error:
            log.exception("the engine's thread has ended")
            self._fail_all(EngineError(f"the engine has stopped: {error}"))
            raise
        else:
            self._fail_all(RequestAborted("the engine was closed"))
        finally:
            self._is_closed = True
            self._engine.close()

    def _obey(self, *, block: bool) -> None:
        """Runs the commands that are waiting; with `block` at least one."""
        if block:
            self._commands.get()()
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finished:
            del self._streams[output.request_id]
        stream.put(output)

    def _fail_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
