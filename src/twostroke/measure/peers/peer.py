"""One engine in a process of its own, asked over a pipe (drivers/driver_loop.py), and stopped while others run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

_LAST_WORDS = 300
"""Characters of its stderr that a failure quotes."""


class PeerFailed(Exception):
    """This engine gives no more figures; the message says why. The others go on."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How an engine is driven."""

    name: str
    driver: Path
    """The file that drives it, or a script that answers by itself."""
    gguf_types: Mapping[str, str] | None = None
    """By precision, the type of GGUF file that is made for it from a model folder; None reads the folder."""
    reads_any: bool = False
    """It reads a GGUF file that was given, though none is made for it."""
    engine: str = ""
    """Its class in the driver; empty: the driver is a script of its own."""

    @property
    def reads_gguf(self) -> bool:
        """Whether it reads a GGUF file that was given."""
        return self.reads_any or self.gguf_types is not None

    def command(self, interpreter: Path) -> list[str]:
        """What starts it."""
        script = [str(_DRIVERS / "driver_loop.py")] if self.engine else []
        return [str(interpreter), *script, str(self.driver), *filter(None, [self.engine])]


_DRIVERS = Path(__file__).resolve().parent / "drivers"
_GGUF_TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
LLAMA_CPP = Peer("llama.cpp", _DRIVERS / "llama_cpp_driver.py", _GGUF_TYPES, engine="LlamaCpp")
IK_LLAMA_CPP = Peer("ik_llama.cpp", LLAMA_CPP.driver, _GGUF_TYPES, engine="IkLlamaCpp")


class PeerProcess:
    """A running driver.

    Between its turns it is stopped (SIGSTOP), with whatever it started: threads that look for work for a while after
    they had some would otherwise take the processor from the next engine.
    """

    def __init__(self, peer: Peer, interpreter: Path) -> None:
        """Starts it.

        Raises:
            PeerFailed: the interpreter cannot be run.
        """
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        try:
            # a process group of its own: signals reach its children too; and should we die while it is stopped, the
            # system ends it
            self._process = subprocess.Popen(
                peer.command(interpreter),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                process_group=0,
            )
        except OSError as error:
            self._log.close()
            raise PeerFailed(f"its interpreter cannot be run: {error.strerror}") from error
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")  # the end

    def load(self, order: Mapping[str, Any], limit_s: float) -> dict[str, str]:
        """Loads the model; returns what the engine says about itself.

        Raises:
            PeerFailed: it is missing, cannot run this model, failed, or did not answer in time.
        """
        about = self._ask({"do": "load", **order}, "loaded", limit_s)
        if not isinstance(about, dict):
            raise PeerFailed(f"it says about itself what is no object: {str(about)[:80]}")
        return {str(name): str(value) for name, value in cast(dict[Any, Any], about).items()}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, limit_s: float) -> Any:
        """Runs prompts; returns its tokens' times, unchecked.

        Raises:
            PeerFailed: it failed, or did not answer in time.
        """
        return self._ask({"do": "run", "prompts": prompts, "max_tokens": max_tokens}, "tokens", limit_s)

    def score(self, token_ids: Sequence[int], first: int, path: Path, limit_s: float) -> int:
        """Have the logits that token_ids[first:] are predicted from written to a file; return the number of rows.

        Raises:
            PeerFailed: it failed, shows no logits, or did not answer in time.
        """
        order = {"do": "score", "token_ids": list(token_ids), "first": first, "path": str(path)}
        return int(self._ask(order, "scored", limit_s))

    def _ask(self, order: Mapping[str, Any], wanted: str, limit_s: float) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=limit_s)
        except BrokenPipeError:
            line = b""
        except queue.Empty:
            raise PeerFailed(f"no answer to {order['do']!r} within {limit_s:g} s") from None
        if not line:
            raise PeerFailed(f"it ended (exit code {self._process.wait()}) while asked to {order['do']}{self._words()}")
        try:
            answer: Any = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and "failed" in answer:
            told = cast(dict[str, Any], answer)
            raise PeerFailed(f"{told.get('why', 'it gives no reason')}")
        if not isinstance(answer, dict) or wanted not in answer:
            raise PeerFailed(f"its answer to {order['do']!r} is none: {line[:80]!r}")
        return cast(dict[str, Any], answer)[wanted]

    def _words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][-_LAST_WORDS:]}" if lines else ""

    def pause(self) -> None:
        """Stops it, with its children, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, which the next question will tell
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends it and its children, stopped or not."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):  # an order that nobody will read any more
                    stream.close()
