"""Entry point of the `twostroke` command line. Slow imports happen inside `main`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from twostroke.cli.interrupts import INTERRUPTED, before_exit, exit_quietly_on_interrupted_imports

if TYPE_CHECKING:
    from cyclopts import App

    app: App


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'twostroke.cli.main' has no attribute {name!r}")
    from twostroke.cli.commands import app

    return app


def main() -> None:
    """Run the command line; exit with 1 after an error of ours, printed as one line, and with 2 for wrong usage."""
    exit_quietly_on_interrupted_imports()
    _make_streams_usable()
    try:
        try:
            _start_engine_early(sys.argv[1:])
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()  # now, while a failure can still be reported and set the exit code
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich exits so from help and tables
            _exit_on_broken_pipe()
        raise
    except BrokenPipeError:
        _exit_on_broken_pipe()
    except OSError as error:
        if error.filename is not None:  # a file error that was not handled is a bug: show the traceback
            raise
        _discard_stdout()
        with contextlib.suppress(OSError):  # stderr may be full, too
            sys.stderr.write(f"twostroke: the output cannot be written: {error.strerror}\n")
        sys.exit(1)


_NO_ENGINE = ("-h", "--help", "--help-all", "--version", "--prefill", "--decode", "--cluster", "--pool-workers")
"""Flags of `serve` with which no engine is started, or is started in another way."""


def has_early_engine(arguments: Sequence[str]) -> bool:
    """Return whether a command starts its engine process before all else."""
    return list(arguments[:1]) == ["serve"] and not any(word.split("=")[0] in _NO_ENGINE for word in arguments)


def _start_engine_early(arguments: Sequence[str]) -> None:
    """Start a server's engine process early, so that both processes import in parallel; it exits if it is not used."""
    if has_early_engine(arguments):
        from twostroke.child_command import child_command
        from twostroke.cluster.child import drop_early, start_early
        from twostroke.engine.garbage import disable_gc

        disable_gc()
        before_exit(drop_early)
        start_early(child_command("twostroke.cluster.process"))


def _run(arguments: Sequence[str]) -> None:
    """Run a command; raise SystemExit if it is refused."""
    from twostroke.cli.commands import app  # slow; Ctrl-C may arrive meanwhile
    from twostroke.cli.other_programs import run_command_line

    run_command_line(app, arguments, "twostroke")


def _make_streams_usable() -> None:
    """Replace closed streams by the null device; escape characters that stdout cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process exits)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _exit_on_broken_pipe() -> NoReturn:
    """Exit with 141, which is 128 + SIGPIPE in shells: the reader closed our output, which is not an error."""
    _discard_stdout()
    sys.exit(141)


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that buffered output is not written again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
