"""Compiling a stranger's grammar where it may take for ever: `python -m twostroke.grammar.trial`, grammar on stdin.

llguidance bounds most of its work, but not all of it: intersections of a few dozen patterns (`allOf`), hundreds of
`patternProperties` or a large `multipleOf` take minutes, in native code that no thread can interrupt. A child process
can be ended. Its vocabulary is the bytes alone, so that it is gone again within some 50 ms; a grammar that names a
model's special tokens fails there, which is as well: they are no text.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from twostroke.child_command import child_command
from twostroke.errors import EngineUnavailable
from twostroke.parent_death import signal_at_parents_death

MAX_CPU_S = 0.5
"""CPU time of one compilation, which comes again in the engine's loop when that is another process."""
MAX_WALL_S = 30.0
"""For a machine that is too busy to give it that much, and systems without such timers."""
MAX_LEXER_STATES = 50_000
"""Of one matcher; a state takes one to two kilobytes, and a schema of a few fields some hundred states."""
MAX_ITEMS_PER_TOKEN = 10_000
MAX_LEXER_FUEL_PER_TOKEN = 50_000
"""A fifth and a quarter of llguidance's own limits: every request of the engine waits while a mask is made."""
MAX_WAYS = 2_100
"""Ways to go on at one place: an optional property takes four. So 500 of one object stay below, with others allowed or
not, and take some milliseconds a mask. A request whose grammar does not ends with an error, alone."""


def parser_limits() -> LLParserLimits:
    """What a grammar may take, wherever it is compiled."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_items_in_row=MAX_WAYS,
        step_max_items=MAX_ITEMS_PER_TOKEN,
        step_lexer_fuel=MAX_LEXER_FUEL_PER_TOKEN,
        verbose_errors=False,  # they would quote the schema
    )


def why_not(grammar: str) -> str:
    """Return why this grammar cannot be compiled within the limits; empty when it can.

    Raises:
        EngineUnavailable: that was not found out: the machine gave the trial no time.
    """
    command = child_command("twostroke.grammar.trial")
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=MAX_WALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        if not hasattr(signal, "setitimer"):
            return _TOO_LONG
        told = f"the trial of a grammar had no answer within {MAX_WALL_S:g} s: the machine gives it no time. Try again."
        raise EngineUnavailable(told) from error
    if done.returncode < 0:
        return _TOO_LONG
    return done.stdout.decode() if done.returncode == 0 else f"the compiler failed ({done.returncode})"


_TOO_LONG = f"it takes more than {MAX_CPU_S:g} s to compile"


def main() -> None:
    """The child: answers with the reason, and is ended by the system when its time is over."""
    grammar = sys.stdin.buffer.read().decode()
    if hasattr(os, "nice"):
        os.nice(10)  # the engine's steps go before strangers' grammars
    signal_at_parents_death(signal.SIGKILL)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # the signal's default is to end the process
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits())
    matcher.compute_bitmask()
    reason = matcher.get_error()
    for first in _FIRST:
        reason = reason or _walk(matcher.deep_copy(), first)
    sys.stdout.buffer.write(reason.encode())


_WALK_BYTES = 96
_FIRST = (b'{[,":', b'",:')
"""Bytes that a walk takes rather than others: what opens objects and goes on in them."""
_SPACE = frozenset(b" \t\r\n")


def _walk(matcher: LLMatcher, first: bytes) -> str:
    """Write some text that the grammar allows; return why that failed.

    Limits that hold for a token are often met only within a text: where an object opens that has a thousand optional
    properties, for example.
    """
    dice = random.Random(0)
    for _ in range(_WALK_BYTES):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_error() or not allowed:
            break
        wanted = next((byte for byte in first if byte in allowed), None)
        byte = wanted if wanted is not None else dice.choice([b for b in allowed if b not in _SPACE] or allowed)
        matcher.consume_token(byte)
    return matcher.get_error()


if __name__ == "__main__":
    main()
