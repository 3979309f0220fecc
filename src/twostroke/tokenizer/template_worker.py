"""The process that renders chat templates: `python -m twostroke.tokenizer.template_worker DESCRIPTOR`.

Templates come with downloaded models. One expression may take minutes or gigabytes within a single operation of the
interpreter. Here the system enforces limits: allocations beyond the memory limit fail, and exceeding the processor
time ends the process. The parent reports it and starts another process (template_process.py). Files, sockets and
other processes cannot be reached (template_confinement.py).
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
from dataclasses import asdict
from functools import lru_cache

from twostroke.errors import InvalidPrompt
from twostroke.tokenizer.template_confinement import confine
from twostroke.tokenizer.template_program import TemplateProgram
from twostroke.tokenizer.template_wire import (
    ANSWER,
    COMPILE,
    EXHAUSTED,
    FACTS,
    MEMORY_MIB,
    PROBE,
    REFUSED,
    REQUEST,
    TEXT,
    cpu_limit_s,
    decoded,
    encoded,
    receive,
    unpacked,
)

_NO_LIMIT = 0.0
_MAX_COMPILED = 4
"""Maximum number of compiled templates in the cache."""


def answer(op: bytes, source: bytes, variables: bytes | bytearray) -> tuple[bytes, bytes]:
    """Return the kind of an answer and its text."""
    try:
        _allow(cpu_limit_s(len(source) + len(variables)))
        program = _compiled(source)
        if op == PROBE:
            _allow(cpu_limit_s(len(variables), PROBE))
        if op == COMPILE:
            return FACTS, encoded(json.dumps(asdict(program.facts)))
        return TEXT, encoded(program.render(unpacked(variables)))
    except InvalidPrompt as error:
        return REFUSED, encoded(str(error))
    except MemoryError:
        return EXHAUSTED, encoded(f"the chat template needs more than {MEMORY_MIB} MiB of memory.")


def _allow(cpu_s: float) -> None:
    """Let the system end this process after `cpu_s` more seconds of processor time."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


@lru_cache(maxsize=_MAX_COMPILED)
def _compiled(source: bytes) -> TemplateProgram:
    return TemplateProgram(decoded(source))


def serve(connection: socket.socket) -> None:
    """Answer requests until the other end closes, or until there is no memory left."""
    while len(head := receive(connection, REQUEST.size)) == REQUEST.size:
        op, num_source, num_variables = REQUEST.unpack(head)
        source, variables = bytes(receive(connection, num_source)), receive(connection, num_variables)
        kind, text = answer(op, source, variables)
        _allow(_NO_LIMIT)
        del source, variables
        connection.sendall(ANSWER.pack(kind, len(text)))
        connection.sendall(text)
        if kind == EXHAUSTED:
            return


def main() -> None:
    """Run the process: confine it, then answer requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    connection = socket.socket(fileno=int(sys.argv[1]))
    confine()
    with contextlib.suppress(OSError):  # the parent is gone
        serve(connection)


if __name__ == "__main__":
    main()
