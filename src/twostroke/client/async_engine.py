"""AsyncEngine: the engine in a thread of its own, with its outputs as async streams."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, Unpack

from twostroke.client.chat_inputs import ChatInputs, TemplateOptions
from twostroke.client.input_processor import Prompt
from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.client.text_engine import TextEngine, build_text_engine
from twostroke.config.engine import EngineConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.errors import EngineError, InvalidParameter
from twostroke.log import get_logger
from twostroke.outputs import RequestOutput
from twostroke.plain_words import kind_of, reason_of
from twostroke.sampling_params import SamplingParams

log = get_logger(__name__)

_CLOSED = "the engine is closed; it takes no more requests. Start a new one."


class _Stream:
    """The path of one request's outputs from the engine's thread to the event loop of the caller.

    A reader that is slower than the engine must not fill the memory. A cumulative output replaces the one before it,
    so at most one waits. Deltas are queued, and hold each token once.

    Args:
        loop: of the reader.
        replaces: whether an output contains the one before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, replaces: bool) -> None:
        self.request_id: str | None = None
        """Id of the request, known once it is queued; used only by the engine's thread."""
        self._loop = loop
        self._replaces = replaces
        self._lock = threading.Lock()
        self._items: deque[RequestOutput | Exception] = deque()
        self._has_items = asyncio.Event()

    @property
    def is_loop_closed(self) -> bool:
        """Whether the reader's event loop has closed."""
        return self._loop.is_closed()

    def put(self, item: RequestOutput | Exception) -> bool:
        """Add an item, in the engine's thread; return False if the reader's loop has closed."""
        with self._lock:
            wakes = not self._items
            if self._replaces and self._items and isinstance(item, RequestOutput):
                self._items.pop()  # it is an output: nothing follows an error
            self._items.append(item)
        try:
            if wakes:  # only once per queue, because each call grows the loop's own queue
                self._loop.call_soon_threadsafe(self._has_items.set)
        except RuntimeError:
            log.debug("the event loop of a stream has closed")
        return not self.is_loop_closed

    async def take(self) -> RequestOutput | Exception:
        """Wait for the next item, in the reader's loop."""
        await self._has_items.wait()
        with self._lock:
            item = self._items.popleft()
            if not self._items:
                self._has_items.clear()
        return item


@dataclass(frozen=True, slots=True)
class _Command:
    """An action to run between steps, in the engine's thread."""

    run: Callable[[], None]
    """Function to run. An exception from it ends the engine, so it handles errors of single requests itself."""
    fail: Callable[[EngineError], object] = lambda _: None
    """Function called instead if the engine has ended before."""


class _EngineThread:
    """The engine's thread, and the state it shares with its callers.

    It has no reference to the AsyncEngine in front of it. Otherwise an AsyncEngine that was dropped would stay alive
    for ever, with its model.
    """

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self.commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self.streams: dict[str, _Stream] = {}
        # Held while checking `_end` and queueing a command: otherwise one could be queued after the thread's last look.
        self._lock = threading.Lock()
        self._end: str | None = None
        """Reason why nothing more is accepted; None while the engine runs."""
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    def check_runs(self) -> None:
        """Raise EngineError if the engine has ended."""
        if self._end is not None:
            raise EngineError(self._end)

    def _put(self, command: _Command) -> None:
        """Queue a command for the thread; it will either run or fail."""
        with self._lock:
            self.check_runs()
            self.commands.put(command)

    def open(self, stream: _Stream, submit: Callable[[], str]) -> None:
        """Submit a request whose outputs, or refusal, go to the stream."""
        self._put(_Command(lambda: self._open(stream, submit), stream.put))

    def abort(self, request_id: str) -> None:
        """End a request, if it runs."""
        self._put(_Command(lambda: self._abort(request_id)))

    def drop_stream(self, stream: _Stream) -> None:
        """Abort the request of a stream that is not read any more, if it still runs."""
        with self._lock:
            if self._end is None:
                self.commands.put(_Command(lambda: self._drop(stream)))

    def close(self) -> None:
        """End the thread and wait for it; streams that are still open end with an EngineError."""
        with self._lock:
            if self._end is None:
                self._end = _CLOSED
                self.commands.put(_Command(lambda: None))  # wakes the thread
        self._thread.join()

    def abandon(self) -> None:
        """End the thread of a dropped AsyncEngine. The garbage collector calls it anywhere, so it may only use the
        queue."""
        self.commands.put(_Command(self._end_abandoned))

    # ------------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        """Run commands between steps, and steps while there is work; otherwise wait for a command."""
        end = "the engine has stopped; see the log."
        try:
            while True:
                self._run_commands(block=not self._engine.has_work)
                if self._end is not None:
                    end = self._end
                    break
                for output in self._engine.step():
                    self._deliver(output)
        except Exception as error:
            # reported to all waiting and later callers
            log.exception("the engine's thread has ended")
            end = f"the engine has stopped: {reason_of(error)}"
        finally:
            self._fail_all(end)
            self._engine.close()

    def _run_commands(self, *, block: bool) -> None:
        """Run the queued commands; with `block` wait for at least one."""
        if block:
            self.commands.get().run()
        for command in self._waiting():
            command.run()

    def _waiting(self) -> Iterator[_Command]:
        """Yield the queued commands, until there are none."""
        while True:
            try:
                yield self.commands.get_nowait()
            except queue.Empty:
                return

    def _end_abandoned(self) -> None:
        log.warning("an AsyncEngine was dropped without close(); its thread ends and its model is freed")
        with self._lock:
            self._end = _CLOSED

    def _open(self, stream: _Stream, submit: Callable[[], str]) -> None:
        try:
            request_id = submit()
        except Exception as error:
            # an error of this request only; the thread continues
            stream.put(error)
            return
        stream.request_id = request_id
        self.streams[request_id] = stream
        if stream.is_loop_closed:
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        """Abort the stream's request, but not a later one with the same id."""
        if stream.request_id is not None and self.streams.get(stream.request_id) is stream:
            self._abort(stream.request_id)

    def _abort(self, request_id: str) -> None:
        """Abort a request and end its stream at once, because its id may be used again before the next step."""
        self._engine.abort(request_id)
        for output in self._engine.take_aborted():
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self.streams.get(output.request_id)
        if stream is None:
            return
        if output.finished:
            del self.streams[output.request_id]
        if not stream.put(output):
            self._drop(stream)

    def _fail_all(self, end: str) -> None:
        """End all streams and queued commands, each with an EngineError of its own."""
        with self._lock:
            self._end = end
        for stream in self.streams.values():
            stream.put(EngineError(end))
        self.streams.clear()
        for command in self._waiting():
            command.fail(EngineError(end))


class AsyncEngine:
    """An engine in a thread, with streams for many coroutines at once.

    >>> async def example():                                              # doctest: +SKIP
    ...     async with AsyncEngine("embedded") as engine:
    ...         async for output in engine.generate("def add(", SamplingParams(max_tokens=8)):
    ...             print(output.outputs[0].text)

    Args:
        model: folder, hub id or "embedded".
        config: the fields of EngineConfig's parts, by name.

    Close it, or use it as a context manager. If it is dropped without that, and its streams have all ended, its thread
    ends and frees the model by itself, with a warning in the log.
    """

    def __init__(self, model: str = "embedded", **config: Any) -> None:
        self._engine: TextEngine = build_text_engine(EngineConfig.from_keywords(model=model, **config))
        self._worker = _EngineThread(self._engine)
        # not needed at the interpreter's end: the thread is a daemon
        weakref.finalize(self, self._worker.abandon).atexit = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far, after each step that added to it; the last one is `finished`.

        A reader that is slower than the engine gets the newest output without those between, so at most one waits
        for it.
        With kind "delta" each output holds what is new since the one before, and none is left out (JoinedDeltas
        joins them):
        n tokens cost n copies, not n squared. "final" yields the last output only.

        Leaving the loop early, or cancelling it, aborts the request.

        Raises:
            ClientError: the prompt or the parameters cannot be run.
            EngineError: the engine has stopped or was closed.
        """
        return self._stream(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt, kind=kind
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
        **template: Unpack[TemplateOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a conversation rendered by the model's chat template, as `generate` does.

        `template` has the fields of TemplateOptions by name: tools, documents, add_generation_prompt,
        continue_final_message, chat_template_kwargs.
        """
        chat = ChatInputs(messages, **template)
        return self._stream(
            chat, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt, kind=kind
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason "abort". Unknown ids are ignored: the request may have
        ended.

        The id can be used again at once.

        Raises:
            InvalidParameter: the id is no text.
            EngineError: the engine has stopped or was closed.
        """
        given: Any = request_id
        if not isinstance(given, str):  # in the engine's thread it would end the engine
            raise InvalidParameter("request_id", given, f"must be a string, not {kind_of(given)}")
        self._worker.abort(request_id)

    def close(self) -> None:
        """Stop the thread; streams that are still open end with an EngineError. A second call does nothing."""
        self._worker.close()

    async def _stream(
        self,
        prompt: Prompt | ChatInputs,
        sampling_params: SamplingParams | None,
        *,
        kind: OutputKind,
        **wanted: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt; `wanted` has the fields of its Submission that the caller gave."""
        arrival_time_s = monotonic_clock()
        self._worker.check_runs()
        # Rendering and encoding may take long, and must not delay the steps of other requests.
        prepared = await asyncio.to_thread(self._engine.prepare, prompt, sampling_params)
        stream = _Stream(asyncio.get_running_loop(), replaces=kind == OutputKind.CUMULATIVE)
        submission = Submission(prompt=prepared, arrival_time_s=arrival_time_s, kind=kind, **wanted)
        engine = self._engine

        def submit() -> str:
            return engine.enqueue(submission)

        self._worker.open(stream, submit)
        ended = False
        try:
            while not ended:
                item = await stream.take()
                ended = isinstance(item, Exception) or item.finished
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            # This also works if it is cancelled before the request is queued: commands keep their order.
            if not ended:
                self._worker.drop_stream(stream)
