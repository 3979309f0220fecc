"""`twostroke`: the composition of the commands. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import NoReturn

from cyclopts import App, CycloptsError, UnknownOptionError

from twostroke.errors import TwostrokeError

app = App(
    name="twostroke",
    help="An LLM inference engine that shows what it does: prefill and decode, their memory and their schedule.",
)
app.command("twostroke.cli.generate:generate")
app.command("twostroke.cli.chat:chat")
app.command("twostroke.cli.serve:serve")
app.command("twostroke.cli.run_batch:run_batch", name="run-batch")
app.command("twostroke.cli.quantize:quantize")
app.command("twostroke.cli.train_medusa:train_medusa", name="train-medusa")
app.command("twostroke.cli.calibrate:calibrate")
app.command("twostroke.cli.plan:plan")
app.command("twostroke.cli.explain:explain")
app.command("twostroke.cli.view:view")
app.command("twostroke.cli.replay:replay")
app.command("twostroke.cli.doctor:doctor")
app.command("twostroke.cli.bench:app", name="bench")


def main() -> None:
    """Runs the command line; an error of ours is one line on stderr and exit code 1, one of usage exit code 2."""
    _make_streams_usable()
    try:
        try:
            app(exit_on_error=False)
        finally:
            sys.stdout.flush()  # while it can still be said, and decide the exit code, that it failed
    except CycloptsError as error:  # printed already
        if isinstance(error, UnknownOptionError) and "generate" in (error.command_chain or ()):
            sys.stderr.write('A prompt that begins with "-" goes behind "--": twostroke generate [FLAGS] -- PROMPT\n')
        sys.exit(2)
    except TwostrokeError as error:
        sys.stderr.write(f"twostroke: {type(error).__name__}: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
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
            sys.stderr.write(f"twostroke: OSError: the output cannot be written: {error.strerror}\n")
        sys.exit(1)


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
