"""The engine with text at both ends: the part that LLM, AsyncEngine and the command line share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.input_processor import InputProcessor, Prompt, PromptInput
from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.client.text_frontend import TextFrontend
from twostroke.config.engine import EngineConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.garbage import paused_gc
from twostroke.errors import EngineError, InvalidParameter
from twostroke.outputs import RequestOutput
from twostroke.runner.model_runner import Executor
from twostroke.sampling_params import SamplingParams
from twostroke.startup.assembly import BuiltEngine, build_engine


class TextEngine(TextFrontend):
    """An engine that takes prompts and returns RequestOutputs, one step at a time.

    Not thread-safe except for `prepare`: work that takes long for one prompt can be done outside the thread that steps.

    Args:
        built: the engine that runs sequences of token ids, with its tokenizer.
    """

    def __init__(self, built: BuiltEngine) -> None:
        super().__init__(built.engine, built.tokenizer, built.facts)
        self.engine = built.engine
        """The loop that runs the sequences."""
        self._inputs = InputProcessor.of_engine(built.facts, built.tokenizer, built.grammars)
        self.startup_lines = built.facts.startup_lines
        """Lines for people: what was loaded and how memory was divided."""
        self._is_closed = False
        self._is_whole = True

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return not self._is_closed and (self.engine.has_work or self.has_ended)

    @property
    def is_consistent(self) -> bool:
        """Whether no step was interrupted. After an interrupted step the state is inconsistent, and all calls raise
        EngineError."""
        return self._is_whole

    def prepare(self, prompt: Prompt | ChatInputs, params: SamplingParams | None = None) -> PromptInput:
        """Check and encode a prompt for `enqueue`, in any thread; raise what `submit` raises for it."""
        if isinstance(prompt, ChatInputs):
            return self._inputs.process_chat(prompt, params)
        return self._inputs.process(prompt, params)

    def submit(
        self,
        prompt: Prompt | ChatInputs,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> str:
        """Queue a prompt.

        Args:
            prompt: text, {"prompt_token_ids": [...]}, or a conversation.
            params: how to sample and when to stop.
            request_id: id of the request; None: one is made.
            priority: lower is served earlier.
            cache_salt: separates cached prefixes.
            kind: whether outputs have the whole text so far, the new text, or come only at the end.

        Returns:
            The request's id, as in its outputs.

        Raises:
            ClientError: the prompt or a parameter cannot be run; nothing was queued.
            EngineError: the engine is closed, or a step was interrupted.
        """
        arrival_time_s = monotonic_clock()
        return self.enqueue(
            Submission(
                prompt=self.prepare(prompt, params),
                arrival_time_s=arrival_time_s,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                kind=kind,
            )
        )

    def enqueue(self, submission: Submission) -> str:
        self.check_open()
        return super().enqueue(replace(submission, kind=_checked_kind(submission.kind)))

    def abort(self, request_id: str) -> bool:
        """End a request now; its last output, finish_reason "abort", comes with the next step.

        Returns:
            False if it had ended before or never existed.

        Raises:
            EngineError: the engine is closed.
        """
        self.check_open()
        return super().abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; return the outputs of requests that it, or an abort before it, has changed.

        An exception from it is never the fault of a request, and ends this engine (`is_consistent`). Callers in the
        main thread hold Ctrl-C back meanwhile (`hold_interrupts`).
        """
        self.check_open()
        self._is_whole = False
        ended = self.take_aborted()
        outputs = self.process_updates(self.engine.step())
        self._is_whole = True
        return [*ended, *outputs]

    def close(self) -> None:
        """Free the engine's memory; running requests end without an output. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.engine.close()

    def check_open(self) -> None:
        """Raise EngineError if the engine is closed, or if a step was interrupted."""
        if self._is_closed:
            raise EngineError("the engine is closed; it takes no more requests. Start a new one.")
        if not self._is_whole:
            raise EngineError(
                "a step of this engine was interrupted (by a second Ctrl-C, a signal handler that raises, or an "
                "internal error); its state is inconsistent. Start a new one."
            )


def build_text_engine(config: EngineConfig, wrap_executor: Callable[[Executor], Executor] | None = None) -> TextEngine:
    """Load a model and build the engine with text at both ends; arguments and errors are those of `build_engine`."""
    with paused_gc():
        return TextEngine(build_engine(config, wrap_executor))


# ------------------------------------------------------------------ Ctrl-C between two steps


@contextmanager
def hold_interrupts() -> Generator[Callable[[], None]]:
    """Hold SIGINT back. The yielded function, which is called between steps, delivers a held signal.

    The previous handler then runs, which raises KeyboardInterrupt unless the program has its own. A second Ctrl-C is
    not held back: it interrupts at once, and an engine interrupted in the middle of a step refuses all later calls.
    Only the main thread gets signals, so in other threads nothing is held.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        held.append((signum, frame))
        signal.signal(signal.SIGINT, before)

    def let_through() -> None:
        if held:
            before(*held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)
        let_through()


def _checked_kind(kind: Any) -> OutputKind:
    try:
        return OutputKind(kind)
    except ValueError:
        raise InvalidParameter("kind", kind, f"must be one of {', '.join(map(repr, map(str, OutputKind)))}") from None
