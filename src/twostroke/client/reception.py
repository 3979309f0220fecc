"""Reception: prompts in, streams out, for engines that run in other processes; it knows no process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from twostroke.client.engine_client import OutputStream
from twostroke.client.front_desk import FrontDesk, SequenceRunner
from twostroke.client.input_processor import InputProcessor
from twostroke.client.output_processor import OutputProcessor
from twostroke.client.submission import Submission
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import EngineFacts
from twostroke.engine.token_update import TokenUpdate
from twostroke.errors import EngineError, EngineUnavailable, SetupError
from twostroke.grammar.guidance import Guidance
from twostroke.outputs import NumericDrift, merged_drift
from twostroke.tokenizer.gguf_tokenizer import load_tokenizer
from twostroke.tokenizer.tokenizer import Tokenizer


class Reception:
    """The side that speaks text, and the streams of all requests that have not ended.

    Args:
        chat_template: Jinja source instead of the model's own.
    """

    def __init__(self, chat_template: str | None) -> None:
        self._chat_template = chat_template
        self._streams: dict[str, OutputStream] = {}
        self._tenants: dict[str, str] = {}
        """Whose each of them is."""
        self._drifts: dict[str, NumericDrift] = {}
        """Differing numerics, by request that workers of different numerics run."""
        self._facts: EngineFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._expected: tuple[Path, asyncio.Future[Tokenizer]] | None = None
        """A tokenizer that is being read, and where it lies."""
        self._inputs: InputProcessor | None = None
        self._desk: FrontDesk | None = None

    @property
    def facts(self) -> EngineFacts:
        """Of the engine."""
        assert self._facts is not None, "start() has not returned"
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        assert self._tokenizer is not None, "start() has not returned"
        return self._tokenizer

    @property
    def inputs(self) -> InputProcessor:
        """Checks and encodes."""
        assert self._inputs is not None, "start() has not returned"
        return self._inputs

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def expect(self, words: str) -> None:
        """Begin to read a tokenizer while its engine is loaded, where the words name a file or folder that is here."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # such words are refused by the engine
            path = Path(words).expanduser()
            if path.is_file() or (path / "tokenizer.json").is_file():
                self._expected = path, asyncio.ensure_future(asyncio.to_thread(load_tokenizer, path))
                self._expected[1].add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _read_tokenizer(self, path: Path) -> Tokenizer:
        """Read the tokenizer, or wait for that which was expected."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == path:
            with contextlib.suppress(SetupError):  # it is read again, and refused again if that was no accident
                return await expected[1]
        return await asyncio.to_thread(load_tokenizer, path)

    async def meet(self, facts: EngineFacts, runner: SequenceRunner) -> None:
        """Prepares for an engine; the tokenizer is read once, outside of the loop."""
        if self._tokenizer is None:
            self._tokenizer = await self._read_tokenizer(Path(facts.tokenizer_path))
        if facts != self._facts:
            grammars = Guidance(self._tokenizer, facts.vocab_size, facts.eos_token_ids, draws=False)
            await asyncio.to_thread(grammars.warm_up)
            self._inputs = InputProcessor.of_engine(facts, self._tokenizer, grammars, self._chat_template)
            self._facts = facts
        self._desk = FrontDesk(
            runner,
            self.inputs,
            OutputProcessor(self._tokenizer),
            clock=monotonic_clock,
            uses_priority=facts.uses_priority,
            serves_background=facts.serves_background,
        )

    def receive(self, submission: Submission, is_waiting: Callable[[str], bool]) -> OutputStream:
        """See EngineClient.generate; `is_waiting` says whether a sequence has not begun."""
        desk = self._desk
        assert desk is not None, "nobody asks before an engine was met"
        try:
            request_id = desk.enqueue(submission)
        except BaseException:
            name = submission.request_id
            if name is not None and name not in self._streams:  # else the note is about the name's present user
                self._forget(name)
            raise
        self._tenants[request_id] = submission.tenant

        def abandon(stream: OutputStream) -> None:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                self._forget(request_id)
                desk.abort(request_id)
                desk.take_ended()

        stream = self._streams[request_id] = OutputStream(abandon)
        if submission.start_by_s is not None:
            sequence_ids = desk.live_sequence_ids(request_id)
            stream.start_by(submission.start_by_s - monotonic_clock(), lambda: all(map(is_waiting, sequence_ids)))
        return stream

    def deliver(self, updates: Sequence[TokenUpdate]) -> None:
        """To whom they are for."""
        assert self._desk is not None, "an engine that runs has been met"
        for output in self._desk.take_in(updates):
            stream = self._streams.get(output.request_id)
            if self._drifts:
                output.numeric_drift = self._drifts.get(output.request_id, {})
            if stream is not None:
                if output.finished:
                    del self._streams[output.request_id]
                    self._forget(output.request_id)
                stream.put(output)

    def note_drift(self, sequence_id: str, drift: NumericDrift) -> None:
        """Record that workers of different numerics run a sequence; its request's outputs say so from now on."""
        assert self._desk is not None, "an engine that runs has been met"
        request_id = self._desk.request_of(sequence_id)
        if request_id is not None:  # its stream may not exist yet: a sequence gets its place first
            self._drifts[request_id] = merged_drift(self._drifts.get(request_id, {}), drift)

    def lose(self, cause: str) -> None:
        """Every stream ends; whoever reads one is told why."""
        self._drifts.clear()
        self._tenants.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            _fail(stream, cause)

    def lose_sequence(self, sequence_id: str, cause: str) -> None:
        """A sequence, and with it its request, will not end; unknown ones are ignored."""
        assert self._desk is not None, "an engine that runs has been met"
        request_id = self._desk.request_of(sequence_id)
        stream = None if request_id is None else self._streams.pop(request_id, None)
        if request_id is not None and stream is not None:
            self._forget(request_id)
            self._desk.abort(request_id)
            self._desk.take_ended()
            _fail(stream, cause)

    def abort(self, request_id: str, tenant: str) -> bool:
        """See EngineClient."""
        if not tenant or self._tenants.get(request_id) == tenant:
            stream = self._streams.get(request_id)
            if stream is not None and self._desk is not None:
                del self._streams[request_id]
                self._forget(request_id)
                self._desk.abort(request_id)
                for output in self._desk.take_ended():
                    stream.put(output)
                return True
        return False

    def _forget(self, request_id: str) -> None:
        """What is known of a request beside its stream."""
        self._tenants.pop(request_id, None)
        self._drifts.pop(request_id, None)


def _fail(stream: OutputStream, cause: str) -> None:
    if stream.has_begun:
        stream.fail(EngineError(f"the request was lost: {cause}."))
    else:
        stream.fail(EngineUnavailable(f"the request was lost: {cause}. Nothing of it was sent: ask again."))
