"""`twostroke`: the composition of the commands. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys

from cyclopts import App, CycloptsError, UnknownOptionError

from twostroke.errors import TwostrokeError

app = App(
    name="twostroke",
    help="An LLM inference engine that shows what it does: prefill and decode, their memory and their schedule.",
)
app.command("twostroke.cli.generate:generate")
app.command("twostroke.cli.chat:chat")
app.command("twostroke.cli.bench:app", name="bench")


def main() -> None:
    """Runs the command line; an error of ours is one line on stderr and exit code 1, one of usage exit code 2."""
    try:
        app(exit_on_error=False)
    except CycloptsError as error:  # printed already
        if isinstance(error, UnknownOptionError) and "generate" in (error.command_chain or ()):
            sys.stderr.write('A prompt that begins with "-" goes behind "--": twostroke generate [FLAGS] -- PROMPT\n')
        sys.exit(2)
    except TwostrokeError as error:
        sys.stderr.write(f"twostroke: {type(error).__name__}: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # the reader of our output has had enough; what is still buffered must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
