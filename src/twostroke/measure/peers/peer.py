"""Another engine in its own process, driven over a pipe (drivers/driver_loop.py), and paused while others run."""

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

_QUOTED_CHARS = 300
"""Characters of its stderr that a failure quotes."""


class PeerFailed(Exception):
    """Error: this engine gives no more figures; the message says why. Other engines continue."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine and its driver."""

    name: str
    driver: Path
    """File of the driver, or a script that serves requests itself."""
    gguf_types: Mapping[str, str] | None = None
    """Type of the GGUF file made from a model folder, by precision; None: the engine reads the folder."""
    reads_any: bool = False
    """Whether it reads a given GGUF file although none is made for it."""
    engine: str = ""
    """Class in the driver; empty: the driver is a script of its own."""

    @property
    def reads_gguf(self) -> bool:
        """Whether it reads a given GGUF file."""
        return self.reads_any or self.gguf_types is not None

    def command(self, interpreter: Path) -> list[str]:
        """Return the command that starts it."""
        script = [str(_DRIVERS / "driver_loop.py")] if self.engine else []
        return [str(interpreter), *script, str(self.driver), *filter(None, [self.engine])]


_DRIVERS = Path(__file__).resolve().parent / "drivers"
_GGUF_TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
LLAMA_CPP = Peer("llama.cpp", _DRIVERS / "llama_cpp_driver.py", _GGUF_TYPES, engine="LlamaCpp")
IK_LLAMA_CPP = Peer("ik_llama.cpp", LLAMA_CPP.driver, _GGUF_TYPES, engine="IkLlamaCpp")


class PeerProcess:
    """Running driver process.

    While other engines are measured it is stopped (SIGSTOP) with its child processes. Otherwise threads that spin
    for a while after their last work would take processor time from the next engine.
    """

    def __init__(self, peer: Peer, interpreter: Path) -> None:
        """Start the process.

        Raises:
            PeerFailed: the interpreter cannot be run.
        """
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        try:
            # a process group of its own, so that signals reach its children too; if this process dies while the group
            # is stopped, the system ends the group
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
        """Load the model; return the engine's description of itself.

        Raises:
            PeerFailed: the engine is missing, cannot run this model, failed, or did not answer in time.
        """
        about = self._ask({"do": "load", **order}, "loaded", limit_s)
        if not isinstance(about, dict):
            raise PeerFailed(f"its answer to 'load' is not an object: {str(about)[:80]}")
        return {str(name): str(value) for name, value in cast(dict[Any, Any], about).items()}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, limit_s: float) -> Any:
        """Run prompts; return the unchecked times of their tokens.

        Raises:
            PeerFailed: the engine failed, or did not answer in time.
        """
        return self._ask({"do": "run", "prompts": prompts, "max_tokens": max_tokens}, "tokens", limit_s)

    def score(self, token_ids: Sequence[int], first: int, path: Path, limit_s: float) -> int:
        """Have the logits from which token_ids[first:] are predicted written to a file; return the number of rows.

        Raises:
            PeerFailed: the engine failed, cannot return logits, or did not answer in time.
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
            raise PeerFailed(
                f"it ended (exit code {self._process.wait()}) while asked to {order['do']}{self._stderr_tail()}"
            )
        try:
            answer: Any = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and "failed" in answer:
            told = cast(dict[str, Any], answer)
            raise PeerFailed(f"{told.get('why', 'it gave no reason')}")
        if not isinstance(answer, dict) or wanted not in answer:
            raise PeerFailed(f"its answer to {order['do']!r} is invalid: {line[:80]!r}")
        return cast(dict[str, Any], answer)[wanted]

    def _stderr_tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][-_QUOTED_CHARS:]}" if lines else ""

    def pause(self) -> None:
        """Stop the process and its children until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process and its children."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself; the next request will report it
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kill the process and its children, stopped or not."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):  # closing flushes an order that can no longer be delivered
                    stream.close()
