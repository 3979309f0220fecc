"""AsyncEngine: the engine in a thread of its own, its outputs as async streams."""

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
    """Where the outputs of one request go, from the engine's thread to the event loop that asked.

    A reader that is slower than the engine must not fill the memory. An output of everything so far is replaced by the
    next one until it is taken, so one waits at most; deltas wait in line, and hold each token once.

    Args:
        loop: of the reader.
        replaces: whether an output holds all that the one before it did.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, replaces: bool) -> None:
        self.request_id: str | None = None
        """Known once it is queued; belongs to the engine's thread."""
        self._loop = loop
        self._replaces = replaces
        self._lock = threading.Lock()
        self._items: deque[RequestOutput | Exception] = deque()
        self._has_items = asyncio.Event()

    @property
    def is_deaf(self) -> bool:
        """Whether the loop has closed and nobody will ever look."""
        return self._loop.is_closed()

    def put(self, item: RequestOutput | Exception) -> bool:
        """Hands an item over, in the engine's thread; False when nobody will ever look."""
        with self._lock:
            wakes = not self._items
            if self._replaces and self._items and isinstance(item, RequestOutput):
                self._items.pop()  # an output: nothing comes behind an error
            self._items.append(item)
        try:
            if wakes:  # once, however many come before the loop looks: what it has to call is a queue, too
                self._loop.call_soon_threadsafe(self._has_items.set)
        except RuntimeError:
            log.debug("the event loop of a stream has closed")
        return not self.is_deaf

    async def take(self) -> RequestOutput | Exception:
        """The next item, in the reader's loop."""
        await self._has_items.wait()
        with self._lock:
            item = self._items.popleft()
            if not self._items:
                self._has_items.clear()
        return item


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between steps, in the engine's thread."""

    run: Callable[[], None]
    """Raises nothing that is the fault of one request: what it raises ends the engine."""
    fail: Callable[[EngineError], object] = lambda _: None
    """Called instead when the engine has ended before."""


class _Worker:
    """The engine's thread, and what it shares with those who ask.

    It knows nothing of the AsyncEngine in front of it: a thread that held on to that would keep one that nobody has any
    more, and its model, forever.
    """

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self.commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self.streams: dict[str, _Stream] = {}
        # Held to look at `_end` and put a command in one: none is put behind the last one that the thread looks at.
        self._lock = threading.Lock()
        self._end: str | None = None
        """Why nothing more is taken; None while the engine runs."""
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    def check_runs(self) -> None:
        """Raises EngineError when it takes no more."""
        if self._end is not None:
            raise EngineError(self._end)

    def _put(self, command: _Command) -> None:
        """Has the thread do something; it will either run or fail."""
        with self._lock:
            self.check_runs()
            self.commands.put(command)

    def open(self, stream: _Stream, submit: Callable[[], str]) -> None:
        """Submits a request whose outputs go to the stream; what is refused goes there too."""
        self._put(_Command(lambda: self._open(stream, submit), stream.put))

    def abort(self, request_id: str) -> None:
        """Ends a request, if it runs."""
        self._put(_Command(lambda: self._abort(request_id)))

    def leave(self, stream: _Stream) -> None:
        """Nobody reads the stream any more; its request, if it still runs, is aborted."""
        with self._lock:
            if self._end is None:
                self.commands.put(_Command(lambda: self._drop(stream)))

    def close(self) -> None:
        """Ends the thread and waits for that; streams that are still open end with an EngineError."""
        with self._lock:
            if self._end is None:
                self._end = _CLOSED
                self.commands.put(_Command(lambda: None))  # wakes the thread
        self._thread.join()

    def abandon(self) -> None:
        """Nobody is left to close it. Called by the garbage collector, anywhere: only a queue may be touched here."""
        self.commands.put(_Command(self._end_abandoned))

    # ------------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        """The thread: commands between steps, steps while there is work, sleep otherwise."""
        end = "the engine has stopped; see the log."
        try:
            while True:
                self._obey(block=not self._engine.has_work)
                if self._end is not None:
                    end = self._end
                    break
                for output in self._engine.step():
                    self._deliver(output)
        except Exception as error:
            # told to everybody who waits or comes; nobody else would hear of it
            log.exception("the engine's thread has ended")
            end = f"the engine has stopped: {reason_of(error)}"
        finally:
            self._fail_all(end)
            self._engine.close()

    def _obey(self, *, block: bool) -> None:
        """Runs the commands that are waiting; with `block` at least one."""
        if block:
            self.commands.get().run()
        for command in self._waiting():
            command.run()

    def _waiting(self) -> Iterator[_Command]:
        """Take the commands that are waiting, until there are none."""
        while True:
            try:
                yield self.commands.get_nowait()
            except queue.Empty:
                return

    def _end_abandoned(self) -> None:
        log.warning("an AsyncEngine was dropped without close(); its thread ends, its model is given back")
        with self._lock:
            self._end = _CLOSED

    def _open(self, stream: _Stream, submit: Callable[[], str]) -> None:
        try:
            request_id = submit()
        except Exception as error:
            # handed to the one who asked; the thread serves the others
            stream.put(error)
            return
        stream.request_id = request_id
        self.streams[request_id] = stream
        if stream.is_deaf:
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        """Aborts the stream's request, and no other that has come by its id meanwhile."""
        if stream.request_id is not None and self.streams.get(stream.request_id) is stream:
            self._abort(stream.request_id)

    def _abort(self, request_id: str) -> None:
        """The stream gets its end here, not with the next step: its id may be used again before that."""
        self._engine.abort(request_id)
        for output in self._engine.take_ended():
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
        """Ends whoever waits, in a stream or for one to begin; each gets an error of its own, as each raises it."""
        with self._lock:
            self._end = end
        for stream in self.streams.values():
            stream.put(EngineError(end))
        self.streams.clear()
        for command in self._waiting():
            command.fail(EngineError(end))


class AsyncEngine:
    """Streams from many coroutines at once; the engine itself runs in one thread.

    >>> async def example():                                              # doctest: +SKIP
    ...     async with AsyncEngine("embedded") as engine:
    ...         async for output in engine.generate("def add(", SamplingParams(max_tokens=8)):
    ...             print(output.outputs[0].text)

    Args:
        model: folder, hub id or "embedded".
        config: the fields of EngineConfig's parts, by name.

    Close it, or use it as a context manager. One that is dropped without that, and whose streams have all ended, ends
    its thread and gives back the model by itself, with a warning in the log.
    """

    def __init__(self, model: str = "embedded", **config: Any) -> None:
        self._engine: TextEngine = build_text_engine(EngineConfig.from_keywords(model=model, **config))
        self._worker = _Worker(self._engine)
        # at the interpreter's end the thread, a daemon, ends anyhow
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
        """Yields what is there so far, after steps that added to it; the last one is `finished`.

        A reader that is slower than the engine sees the newest output and not those between, so at most one waits for
        it. With kind "delta" each output holds what is new since the one before and none is left out (JoinedDeltas
        puts them together): n tokens cost n copies, not n squared. "final" yields the last output only.

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
        """Like `generate`, for a conversation rendered by the model's chat template.

        `template` has the fields of TemplateOptions by name: tools, documents, add_generation_prompt,
        continue_final_message, chat_template_kwargs.
        """
        chat = ChatInputs(messages, **template)
        return self._stream(
            chat, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt, kind=kind
        )

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream ends with finish_reason "abort". Unknown ids are no error: it may have ended.

        The id can be used again at once.

        Raises:
            InvalidParameter: the id is no text.
            EngineError: the engine has stopped or was closed.
        """
        given: Any = request_id
        if not isinstance(given, str):  # checked here: in the engine's thread it would be everybody's error
            raise InvalidParameter("request_id", given, f"must be a text, not {kind_of(given)}")
        self._worker.abort(request_id)

    def close(self) -> None:
        """Stops the thread; streams that are still open end with an EngineError. A second time does nothing."""
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
        # Rendering and encoding may take long, and the engine's thread has steps to do for everybody else.
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
            # Also when it was cancelled before it was queued: commands keep their order.
            if not ended:
                self._worker.leave(stream)
