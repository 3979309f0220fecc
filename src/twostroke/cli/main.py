"""`twostroke`: the way into the command line and out of it. Nothing that takes time is imported before `main` runs."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from twostroke.cli.interrupts import INTERRUPTED, before_ending, end_quietly_while_importing

if TYPE_CHECKING:
    from cyclopts import App

    app: App


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'twostroke.cli.main' has no attribute {name!r}")
    from twostroke.cli.commands import app

    return app


def main() -> None:
    """Runs the command line; an error of ours is one line on stderr and exit code 1, one of usage exit code 2."""
    end_quietly_while_importing()
    _make_streams_usable()
    try:
        try:
            _start_engine_early(sys.argv[1:])
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()  # while it can still be said, and decide the exit code, that it failed
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's way, of help pages and tables; it means 141, too
            _leave_to_nobody()
        raise
    except BrokenPipeError:
        _leave_to_nobody()
    except OSError as error:
        if error.filename is not None:  # of a file that somebody should have looked after: a bug, to be seen whole
            raise
        _drop_stdout()
        with contextlib.suppress(OSError):  # it may be stderr that is full
            sys.stderr.write(f"twostroke: the output cannot be written: {error.strerror}\n")
        sys.exit(1)


_NO_ENGINE = ("-h", "--help", "--help-all", "--version", "--prefill", "--decode", "--cluster", "--pool-workers")
"""Flags of `serve` with which no engine is started, or is started in another way."""


def has_early_engine(arguments: Sequence[str]) -> bool:
    """Return whether a command starts its engine's process before anything else."""
    return list(arguments[:1]) == ["serve"] and not any(word.split("=")[0] in _NO_ENGINE for word in arguments)


def _start_engine_early(arguments: Sequence[str]) -> None:
    """Have the engine process of a server import what it needs beside us; it ends with us if nobody wants it."""
    if has_early_engine(arguments):
        from twostroke.child_command import child_command
        from twostroke.cluster.child import drop_early, start_early
        from twostroke.engine.garbage import look_for_none_while_loading

        look_for_none_while_loading()
        before_ending(drop_early)
        start_early(child_command("twostroke.cluster.process"))


def _run(arguments: Sequence[str]) -> None:
    """Run a command; raise SystemExit for what it refuses."""
    from twostroke.cli.commands import app  # takes long, and a Ctrl-C may come meanwhile
    from twostroke.cli.habits import run_words

    run_words(app, arguments, "twostroke")


def _make_streams_usable() -> None:
    """A stream that was closed reads and writes nothing; a character that stdout has no code for is spelt out."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for as long as we run)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _leave_to_nobody() -> NoReturn:
    """The reader of our output has had enough: not our failure, and what a shell calls 128 + SIGPIPE."""
    _drop_stdout()
    sys.exit(141)


def _drop_stdout() -> None:
    """What is still buffered must not be tried again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
