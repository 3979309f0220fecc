"""Rendering of chat templates in a separate process, which is reused, and replaced when a template exceeds its limits.

    a chat          one round trip to a waiting process: some 0.2 ms
    a limit         exceeding it ends the process (template_worker.py); the next chat starts another, in some 0.1 s
    a stop          SIGSTOP of the process is noticed within a second; the process is ended and another one is asked

There is one such process, a child of this one; a process forked from this one starts its own. Chats are rendered one
at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.child_command import child_command
from twostroke.errors import EngineError, EngineUnavailable, InvalidPrompt
from twostroke.tokenizer.template_confinement import confined_environment
from twostroke.tokenizer.template_wire import (
    ANSWER,
    COMPILE,
    EXHAUSTED,
    MAX_ANSWER_BYTES,
    PROBE,
    REFUSED,
    RENDER,
    REQUEST,
    TemplateFacts,
    cpu_limit_s,
    decoded,
    encoded,
    packed,
)

WALL_S = 30.0
"""Wall time allowed beyond the processor time, for a machine that is too busy to run the process."""
STOP_POLL_S = 0.5
"""Seconds between checks whether the working process was stopped by a signal."""
_EXIT_TIMEOUT_S = 1.0
_EXTERNAL_EXIT_CODES = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP})
"""Exit codes that no template causes; the request is repeated in another process."""


class TemplateSource:
    """A chat template that was compiled once and can be rendered.

    Args:
        source: Jinja source.

    Raises:
        InvalidPrompt: it is not a Jinja template, or takes too long to compile.
        EngineError: the system starts no process, or ends or stops each one.
    """

    def __init__(self, source: str) -> None:
        self._source = encoded(source)
        try:
            self.facts = TemplateFacts(**json.loads(_runner.ask(COMPILE, self._source, b"")))
        except _ProcessEnded as error:
            why = _exceeded_limit(error, len(self._source))
            raise InvalidPrompt(f"the model's chat template cannot be compiled: it {why}.") from None

    def render(self, variables: Mapping[str, Any], *, probes: bool = False) -> str:
        """Return the prompt text of a conversation.

        Args:
            variables: JSON values by name.
            probes: whether this is a probe, a conversation of ours that tests the template and gets little time.

        Raises:
            InvalidPrompt: the template refuses or fails.
            TemplateStopped: it takes too much time or memory.
            EngineError: the system starts no process, or ends or stops each one.
        """
        try:
            content = packed(variables)
        except ValueError as error:
            raise InvalidPrompt(f"the conversation cannot be given to the chat template ({error}).") from error
        try:
            return decoded(_runner.ask(PROBE if probes else RENDER, self._source, content))
        except _ProcessEnded as error:
            why = _exceeded_limit(error, len(self._source) + len(content))
            raise TemplateStopped(f"the chat template was stopped: it {why}.") from None


def template_process_id() -> int | None:
    """Return the id of the process waiting for work, or None; for benchmarks and tests."""
    return _runner.pid


class TemplateStopped(InvalidPrompt):
    """A template took too much time or memory."""


class _ProcessStopped(Exception):
    """The process was stopped by a signal and will not answer."""


class _ProcessEnded(Exception):
    """The process ended before it answered.

    Args:
        code: its exit code, negative for a signal; None: it was ended here because it gave no answer.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


def _exceeded_limit(ended: _ProcessEnded, num_bytes: int) -> str:
    """Return how a template exceeded its limits, by the way in which its process ended.

    Raises:
        EngineUnavailable: the template is not the cause.
    """
    if ended.code == -signal.SIGPROF:
        return f"takes more than {cpu_limit_s(num_bytes):.2f} s of processor time"
    if ended.code is None:
        told = f"the process for chat templates gave no answer for {WALL_S:g} s: the machine gives it no time."
        raise EngineUnavailable(f"{told} Try again.") from ended
    if ended.code in _EXTERNAL_EXIT_CODES:
        told = f"the process for chat templates was stopped or ended from outside (exit code {ended.code}), and so was"
        raise EngineUnavailable(f"{told} another. Try again.") from ended
    return f"ended its process (exit code {ended.code})"


class _Process:
    """One process, which handles one request at a time."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                self.child = subprocess.Popen(
                    child_command("twostroke.tokenizer.template_worker", str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=confined_environment(os.environ),  # noqa: TID251 (read only to filter it)
                    start_new_session=True,  # so that Ctrl-C does not reach it
                )
        except BaseException as error:
            self._connection.close()
            if isinstance(error, OSError):
                raise EngineError(f"no process for chat templates could be started ({error}).") from error
            raise

    def ask(self, op: bytes, source: bytes, variables: bytes) -> tuple[bytes, bytearray]:
        """Send a request; return the kind of the answer and its text.

        Raises:
            _ProcessEnded: there is no answer, and the process has been ended.
        """
        until_s = time.monotonic() + WALL_S + cpu_limit_s(len(source) + len(variables))
        try:
            for part in (REQUEST.pack(op, len(source), len(variables)), source, variables):
                self._send(part, until_s)
            kind, num_bytes = ANSWER.unpack(self._receive(ANSWER.size, until_s))
            if num_bytes > MAX_ANSWER_BYTES:
                raise EOFError
            return kind, self._receive(num_bytes, until_s)
        except TimeoutError:
            self.end()
            raise _ProcessEnded(None) from None
        except _ProcessStopped:
            raise _ProcessEnded(self.end()) from None
        except (OSError, EOFError):
            raise _ProcessEnded(self.end()) from None
        except BaseException:  # Ctrl-C: a late answer would be taken for that of the next request
            self.end()
            raise

    def end(self) -> int:
        """End the process, also if it is stopped, and return its exit code."""
        self._connection.close()
        if self.is_stopped():
            self.child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(_EXIT_TIMEOUT_S)
        self.child.kill()
        return self.child.wait()

    def forget(self) -> None:
        """Drop the process in a fork of its parent, without ending it."""
        self._connection.close()
        self.child.returncode = 0  # Popen must not wait for another process's child

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal, as far as the system tells."""
        try:
            stat = Path(f"/proc/{self.child.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] in b"Tt"  # proc(5): the state follows the name

    def _send(self, part: bytes, until_s: float) -> None:
        with memoryview(part) as view:
            sent = 0
            while sent < len(view):
                self._wait(select.POLLOUT, until_s)
                self._connection.settimeout(0)
                with view[sent:] as rest, contextlib.suppress(BlockingIOError):
                    sent += self._connection.send(rest)

    def _receive(self, num_bytes: int, until_s: float) -> bytearray:
        found = bytearray()
        while len(found) < num_bytes:
            self._wait(select.POLLIN, until_s)
            self._connection.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                piece = self._connection.recv(min(num_bytes - len(found), 1 << 20))
                if not piece:
                    raise EOFError
                found += piece
        return found

    def _wait(self, event: int, until_s: float) -> None:
        """Wait until the connection is ready.

        Raises:
            TimeoutError: it is not ready in time.
            _ProcessStopped: the process is stopped.
        """
        poll = select.poll()
        poll.register(self._connection, event)
        while True:
            left_s = max(0.01, until_s - time.monotonic())
            if poll.poll(1000 * min(left_s, STOP_POLL_S)):
                return
            if self.is_stopped():
                raise _ProcessStopped
            if left_s <= STOP_POLL_S:
                raise TimeoutError


class _Runner:
    """The template process of this process, started on demand."""

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def ask(self, op: bytes, source: bytes, variables: bytes) -> bytearray:
        """Return the text of the answer.

        Raises:
            InvalidPrompt: the answer is a refusal.
            TemplateStopped: the process has no memory left.
            _ProcessEnded: the request made the process end.
        """
        with self._lock:
            try:
                kind, text = self._ask_once(op, source, variables)
            except _ProcessEnded as error:
                if error.code not in _EXTERNAL_EXIT_CODES:
                    raise
                kind, text = self._ask_once(op, source, variables)
        if kind == EXHAUSTED:
            raise TemplateStopped(decoded(text))
        if kind == REFUSED:
            raise InvalidPrompt(decoded(text))
        return text

    @property
    def pid(self) -> int | None:
        """Id of the waiting process; None while it works, and if there is none."""
        process = self._process
        return None if process is None else process.child.pid

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def forget(self) -> None:
        """Drop the process after a fork: it is the parent's child, and no thread of the fork can release the lock."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        if process is not None:
            process.forget()

    def _ask_once(self, op: bytes, source: bytes, variables: bytes) -> tuple[bytes, bytearray]:
        process, self._process = self._process, None
        if process is not None and (process.child.poll() is not None or process.is_stopped()):  # while idle
            process.end()
            process = None
        process = process or _Process()
        kind, text = process.ask(op, source, variables)
        if kind == EXHAUSTED:
            process.end()
        else:
            self._process = process
        return kind, text


_runner = _Runner()
atexit.register(_runner.close)
os.register_at_fork(after_in_child=_runner.forget)
