"""Trial compilation of untrusted grammars in a child process: `python -m twostroke.grammar.trial`, grammar on stdin.

llguidance bounds most of its work, but not all. Intersections of a few dozen patterns (`allOf`), hundreds of
`patternProperties` or a large `multipleOf` take minutes in native code that no thread can interrupt. A child process
can be killed. The child's vocabulary is the 256 bytes, so it ends within some 50 ms. A grammar that names the model's
special tokens fails there, as it should: they are not text.
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
from twostroke.parent_death import signal_at_parent_death

MAX_CPU_S = 0.5
"""CPU seconds for one compilation. With a separate engine process, that process compiles again in its loop."""
MAX_WALL_S = 30.0
"""Wall-clock limit in seconds, for busy machines and for systems without CPU timers."""
MAX_LEXER_STATES = 50_000
"""Lexer states of one matcher. A state takes 1 to 2 KB; a schema of a few fields takes some hundred states."""
MAX_ITEMS_PER_TOKEN = 10_000
MAX_LEXER_FUEL_PER_TOKEN = 50_000
"""Lexer work per token. This limit and MAX_ITEMS_PER_TOKEN are a quarter and a fifth of llguidance's defaults, because
every request of the engine waits while a mask is made."""
MAX_WAYS = 2_100
"""Alternatives at one place; an optional property takes four.

500 optional properties of one object stay below the limit, with other properties allowed or not, and take some
milliseconds a mask. A request whose grammar exceeds the limit fails with an error; others continue.
"""


def parser_limits() -> LLParserLimits:
    """Return the limits of a grammar, the same wherever it is compiled."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_items_in_row=MAX_WAYS,
        step_max_items=MAX_ITEMS_PER_TOKEN,
        step_lexer_fuel=MAX_LEXER_FUEL_PER_TOKEN,
        verbose_errors=False,  # they would quote the schema
    )


def refusal_reason(grammar: str) -> str:
    """Return why the grammar cannot be compiled within the limits; empty if it can.

    Raises:
        EngineUnavailable: the trial got no CPU time, so the result is unknown.
    """
    command = child_command("twostroke.grammar.trial")
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=MAX_WALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        if not hasattr(signal, "setitimer"):
            return _TOO_LONG
        told = f"a grammar could not be checked within {MAX_WALL_S:g} s: the machine is too busy. Try again."
        raise EngineUnavailable(told) from error
    if done.returncode < 0:
        return _TOO_LONG
    return done.stdout.decode() if done.returncode == 0 else f"the compiler failed ({done.returncode})"


_TOO_LONG = f"it takes more than {MAX_CPU_S:g} s to compile"


def main() -> None:
    """Run the child: write the reason to stdout. A CPU timer kills the process at its limit."""
    grammar = sys.stdin.buffer.read().decode()
    if hasattr(os, "nice"):
        os.nice(10)  # the engine's steps have priority
    signal_at_parent_death(signal.SIGKILL)
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
"""Bytes that the walk prefers, because they open objects and continue them."""
_SPACE = frozenset(b" \t\r\n")


def _walk(matcher: LLMatcher, first: bytes) -> str:
    """Write some text that the grammar allows; return why that failed.

    Per-token limits are often exceeded only within a text, for example where an object with a thousand optional
    properties opens.
    """
    rng = random.Random(0)
    for _ in range(_WALK_BYTES):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_error() or not allowed:
            break
        wanted = next((byte for byte in first if byte in allowed), None)
        byte = wanted if wanted is not None else rng.choice([b for b in allowed if b not in _SPACE] or allowed)
        matcher.consume_token(byte)
    return matcher.get_error()


if __name__ == "__main__":
    main()
