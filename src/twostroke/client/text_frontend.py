"""Text interface to an engine: admits requests and assembles their outputs, wherever the tokens are made.

prompt ─► enqueue ─► sequences of token ids ─► an engine in this process, or in another
RequestOutputs ◄── process_updates ◄──── updates of its steps ◄─┘

TextFrontend does this; StreamingFrontend adds a stream per request for an engine in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from twostroke.batch import NewRequest
from twostroke.client.engine_client import OutputStream
from twostroke.client.input_processor import InputProcessor, PromptInput
from twostroke.client.output_processor import OutputProcessor
from twostroke.client.submission import Submission
from twostroke.config.checks import check_unicode
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import EngineFacts
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.token_update import TokenUpdate
from twostroke.errors import EngineError, EngineUnavailable, InvalidParameter, SetupError
from twostroke.grammar.guidance import Guidance
from twostroke.outputs import NumericDrift, RequestOutput, merged_drift
from twostroke.plain_words import kind_of
from twostroke.request import FinishReason
from twostroke.tokenizer.gguf_tokenizer import load_tokenizer
from twostroke.tokenizer.tokenizer import Tokenizer

MAX_NAME_BYTES = 1024
"""Most bytes of a request_id or a cache_salt in UTF-8; ids go into every event of the log."""
MAX_PRIORITY = 2**31
"""Largest absolute priority: far beyond any scheme of priorities, and exact in the scheduler's floating-point keys."""


class SequenceRunner(Protocol):
    """A runner of sequences of token ids: the engine, or its representative in this process."""

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a sequence; its id is not in use."""
        ...

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> object:
        """End a sequence from outside; ignore one that has ended before.

        `num_output_tokens` is the number of tokens that count as output where a stop string cut off others.
        """
        ...


class TextFrontend:
    """The text side of a runner: queues requests, and turns the updates of its steps into RequestOutputs.

    Not thread-safe.

    Args:
        runner: runs the sequences.
        tokenizer: of the model.
        facts: of the engine.
    """

    def __init__(self, runner: SequenceRunner, tokenizer: Tokenizer, facts: EngineFacts) -> None:
        self._runner = runner
        self._facts = facts
        self.outputs = OutputProcessor(tokenizer)
        """Processor of the updates; it has all requests that have not ended."""
        self._names = (f"request-{number}" for number in itertools.count())
        self._ended: dict[str, RequestOutput] = {}

    @property
    def has_ended(self) -> bool:
        """Whether last outputs of aborted requests wait in `take_aborted`."""
        return bool(self._ended)

    def enqueue(self, submission: Submission) -> str:
        """Queue a prompt that was checked and encoded.

        Returns:
            The request's id, as in its outputs.

        Raises:
            InvalidParameter: a parameter cannot be used; nothing was queued.
        """
        prompt, request_id = submission.prompt, submission.request_id
        self._check_priority(submission.priority)
        if submission.background and not self._facts.serves_background:
            limit = "needs chunked prefill and continuous batches that mix prefill and decode; this engine has them off"
            raise InvalidParameter("service_tier", "flex", limit, "Leave it out.")
        if submission.cache_salt is not None:
            _check_salt(submission.cache_salt)
        if request_id is None:
            request_id = next(name for name in self._names if not self.is_live(name))
        else:
            _check_name("request_id", request_id)
            if not request_id:
                raise InvalidParameter("request_id", request_id, "must not be empty", "Leave it out to get a new one.")
            if self.is_live(request_id):
                raise InvalidParameter("request_id", request_id, "is in use by a request that has not ended")
        seed = secrets.randbits(63) if prompt.params.seed is None else prompt.params.seed
        seeds, arrival_time_s = [seed] * prompt.params.n, submission.arrival_time_s
        sequence_ids = self.outputs.add(
            request_id, prompt, seeds=seeds, arrival_time_s=arrival_time_s, kind=submission.kind
        )
        submitted_time_s = monotonic_clock()
        try:
            for index, sequence_id in enumerate(sequence_ids):
                new_request = _sequence(prompt, sequence_id, index, seed)
                self._runner.add_request(
                    GenerationRequest(
                        new_request,
                        arrival_time_s,
                        prompt.max_tokens,
                        submission.priority,
                        submission.cache_salt,
                        submitted_time_s,
                        submission.tenant,
                        submission.background,
                    )
                )
        except BaseException:
            # queue all sequences or none; the runner ignores unknown ones
            for sequence_id in sequence_ids:
                self._runner.finish(sequence_id, FinishReason.ABORT)
            self.outputs.discard(request_id)
            raise
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request now; its last output, finish_reason "abort", waits in `take_aborted`.

        The engine frees the blocks of its sequences as soon as it has the command (Engine.finish, Scheduler.finish).

        Returns:
            False if it had ended before or never existed.
        """
        sequence_ids = self.outputs.live_sequence_ids(request_id)
        for sequence_id in sequence_ids:
            self._runner.finish(sequence_id, FinishReason.ABORT)
        output = self.outputs.abort(request_id, monotonic_clock())
        if output is not None:
            self._ended[request_id] = output
        return bool(sequence_ids)

    def process_updates(self, updates: Sequence[TokenUpdate]) -> Sequence[RequestOutput]:
        """Return the outputs of a step's updates, and end the sequences in whose text a stop string was found."""
        processed = self.outputs.process(updates)
        for ended in processed.ended:
            # only this side detects stop strings; for sequences that the engine has ended this does nothing
            self._runner.finish(ended.request_id, ended.finish_reason, ended.num_output_tokens)
        return processed.outputs

    def take_aborted(self) -> list[RequestOutput]:
        """Return the last outputs of aborted requests; their names are free again."""
        ended, self._ended = list(self._ended.values()), {}
        return ended

    def is_live(self, request_id: str) -> bool:
        """Return whether the request still has an output to come; an aborted one has its last."""
        return self.outputs.is_live(request_id) or request_id in self._ended

    def _check_priority(self, priority: Any) -> None:
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidParameter("priority", priority, "must be a whole number")
        if abs(priority) > MAX_PRIORITY:
            raise InvalidParameter("priority", priority, f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
        if priority and not self._facts.uses_priority:
            raise InvalidParameter("priority", priority, "needs the policy 'priority'; this engine has another one")


def _check_salt(salt: Any) -> None:
    _check_name("cache_salt", salt)
    if not salt:
        remedy = "Leave it out to share with all requests without a salt."
        raise InvalidParameter("cache_salt", salt, "must not be empty", remedy)


def _check_name(parameter: str, value: Any) -> None:
    """Check a name that is hashed and written to the event log: valid Unicode, and not too long."""
    if not isinstance(value, str):
        raise InvalidParameter(parameter, value, f"must be a string, not {kind_of(value)}")
    check_unicode(parameter, value)
    num_bytes = len(value.encode("utf-8"))
    if num_bytes > MAX_NAME_BYTES:
        raise InvalidParameter(
            parameter, value, f"has {num_bytes} bytes in UTF-8, at most {MAX_NAME_BYTES}", "Send a hash of it."
        )


def _sequence(prompt: PromptInput, sequence_id: str, index: int, seed: int) -> NewRequest:
    """Return one of a prompt's n sequences, for the engine."""
    params = prompt.params
    if index:  # one sequence reports the prompt's log-probabilities; the others may use the prefix cache
        params = dataclasses.replace(params, prompt_logprobs=None)
    if prompt.grammar is not None:  # it replaces the schema
        params = dataclasses.replace(params, structured_outputs=None)
    return NewRequest(
        sequence_id,
        prompt.prompt_token_ids,
        params,
        seed=seed,
        sample_index=index,
        eos_token_ids=tuple(sorted(prompt.eos_token_ids)),
        bad_words_token_ids=prompt.bad_words_token_ids,
        grammar=prompt.grammar,
        wants_hidden_state=prompt.wants_hidden_state,
    )


# ------------------------------------------------------------------ streams


class StreamingFrontend:
    """The text side of an engine, with the streams of all requests that have not ended.

    Args:
        chat_template: Jinja source; None: the model's own.
    """

    def __init__(self, chat_template: str | None) -> None:
        self._chat_template = chat_template
        self._streams: dict[str, OutputStream] = {}
        self._tenants: dict[str, str] = {}
        """Tenants of the live requests."""
        self._drifts: dict[str, NumericDrift] = {}
        """Differing numerics, by request that workers of different numerics run."""
        self._facts: EngineFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._expected: tuple[Path, asyncio.Future[Tokenizer]] | None = None
        """A tokenizer that is being read, with its path."""
        self._inputs: InputProcessor | None = None
        self._frontend: TextFrontend | None = None

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine."""
        assert self._facts is not None, "start() has not returned"
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        assert self._tokenizer is not None, "start() has not returned"
        return self._tokenizer

    @property
    def inputs(self) -> InputProcessor:
        """Processor that checks and encodes prompts."""
        assert self._inputs is not None, "start() has not returned"
        return self._inputs

    @property
    def frontend(self) -> TextFrontend:
        """Text frontend of the current engine."""
        assert self._frontend is not None, "an engine that runs has been met"
        return self._frontend

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def preload_tokenizer(self, words: str) -> None:
        """Start reading a tokenizer while its engine loads, if the name is a local file or folder."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # the engine refuses such names
            path = Path(words).expanduser()
            if path.is_file() or (path / "tokenizer.json").is_file():
                self._expected = path, asyncio.ensure_future(asyncio.to_thread(load_tokenizer, path))
                self._expected[1].add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _read_tokenizer(self, path: Path) -> Tokenizer:
        """Return the tokenizer that is being read already, or read it."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == path:
            with contextlib.suppress(SetupError):  # read it again, and report a lasting error
                return await expected[1]
        return await asyncio.to_thread(load_tokenizer, path)

    async def prepare_for(self, facts: EngineFacts, runner: SequenceRunner) -> None:
        """Prepare for an engine; the tokenizer is read once, outside of the event loop."""
        if self._tokenizer is None:
            self._tokenizer = await self._read_tokenizer(Path(facts.tokenizer_path))
        if facts != self._facts:
            grammars = Guidance(self._tokenizer, facts.vocab_size, facts.eos_token_ids, draws=False)
            await asyncio.to_thread(grammars.warm_up)
            self._inputs = InputProcessor.of_engine(facts, self._tokenizer, grammars, self._chat_template)
            self._facts = facts
        self._frontend = TextFrontend(runner, self._tokenizer, facts)

    def open_stream(self, submission: Submission, is_waiting: Callable[[str], bool]) -> OutputStream:
        """Queue a request and return its stream, as EngineClient.generate; `is_waiting` tells whether a sequence has
        not begun."""
        try:
            request_id = self.frontend.enqueue(submission)
        except BaseException:
            name = submission.request_id
            if name is not None and name not in self._streams:  # else it belongs to a live request
                self._forget(name)
            raise
        self._tenants[request_id] = submission.tenant

        def abandon(stream: OutputStream) -> None:
            if self._streams.get(request_id) is stream:
                self._end(request_id)

        stream = self._streams[request_id] = OutputStream(abandon)
        if submission.start_by_s is not None:
            sequence_ids = self.frontend.outputs.live_sequence_ids(request_id)
            stream.start_by(submission.start_by_s - monotonic_clock(), lambda: all(map(is_waiting, sequence_ids)))
        return stream

    def deliver(self, updates: Sequence[TokenUpdate]) -> None:
        """Put the outputs of a step into their streams."""
        for output in self.frontend.process_updates(updates):
            stream = self._streams.get(output.request_id)
            if self._drifts:
                output.numeric_drift = self._drifts.get(output.request_id, {})
            if stream is not None:
                if output.finished:
                    del self._streams[output.request_id]
                    self._forget(output.request_id)
                stream.put(output)

    def note_drift(self, sequence_id: str, drift: NumericDrift) -> None:
        """Record that workers of different numerics run a sequence; its request's outputs include it from now on."""
        request_id = self.frontend.outputs.request_of(sequence_id)
        if request_id is not None:  # its stream may not exist yet: placing comes first
            self._drifts[request_id] = merged_drift(self._drifts.get(request_id, {}), drift)

    def fail_all(self, cause: str) -> None:
        """End all streams with the cause."""
        self._drifts.clear()
        self._tenants.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            _fail(stream, cause)

    def fail_sequence(self, sequence_id: str, cause: str) -> None:
        """End the request of a sequence that will not end by itself; unknown ones are ignored."""
        request_id = self.frontend.outputs.request_of(sequence_id)
        stream = None if request_id is None else self._streams.get(request_id)
        if request_id is not None and stream is not None:
            self._end(request_id)
            _fail(stream, cause)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        if not tenant or self._tenants.get(request_id) == tenant:
            stream = self._streams.get(request_id)
            if stream is not None:
                for output in self._end(request_id):
                    stream.put(output)
                return True
        return False

    def _end(self, request_id: str) -> list[RequestOutput]:
        """End a request and forget its stream; return the outputs that the stream did not get."""
        del self._streams[request_id]
        self._forget(request_id)
        self.frontend.abort(request_id)
        return self.frontend.take_aborted()

    def _forget(self, request_id: str) -> None:
        """Forget what is stored for a request beside its stream."""
        self._tenants.pop(request_id, None)
        self._drifts.pop(request_id, None)


def _fail(stream: OutputStream, cause: str) -> None:
    if stream.has_begun:
        stream.fail(EngineError(f"the request was lost: {cause}."))
    else:
        stream.fail(EngineUnavailable(f"the request was lost: {cause}. Nothing of it was sent: ask again."))
