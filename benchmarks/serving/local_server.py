"""`twostroke serve` in processes of its own, for measurements that compare it with something."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twostroke.errors import SetupError

_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 60.0
_LAST_LINES = 10
_TEMPLATES = b"twostroke.tokenizer.template_worker"
_URL = re.compile(r"https?://\S+")


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that takes requests."""

    url: str
    pid: int
    """Of the process that speaks HTTP; the engine's is another."""

    def http_cpu_s(self) -> float:
        """Processor time of the HTTP process so far, in the kernel's ticks of 10 ms."""
        # proc(5): fields 14 and 15 are utime and stime; the second, a name in parentheses, may hold spaces
        after_name = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    def engine_pid(self) -> int:
        """Of the engine's process, the only child of the other beside that of chat templates.

        Raises:
            SetupError: there is none now.
        """
        for children in Path(f"/proc/{self.pid}/task").glob("*/children"):
            for child in children.read_text(encoding="utf-8").split():
                if _TEMPLATES not in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        raise SetupError(f"the server (process {self.pid}) has no engine process now.")

    def num_open_files(self) -> int:
        """Of the HTTP process, connections among them."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def resident_bytes(pid: int) -> int:
    """Memory that a process has in RAM now."""
    # proc(5): the second field of statm counts resident pages
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line; of a tuple each item is one.

    >>> as_flags({"max_num_seqs": 4, "enable_prefix_caching": False, "api_key": ("a", "b")})
    ['--max-num-seqs', '4', '--no-enable-prefix-caching', '--api-key', 'a', '--api-key', 'b']
    """
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag}")
        else:
            items = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
            flags += [word for item in items for word in (f"--{flag}", str(item))]
    return flags


@contextlib.contextmanager
def local_server(model: str, settings: Mapping[str, Any]) -> Generator[LocalServer]:
    """Starts a server on a free port of this machine, and ends it.

    Args:
        model: as `twostroke serve` takes it.
        settings: of the engine and the server, by their names.

    Raises:
        SetupError: it did not start; with its last words.
    """
    command = [sys.executable, "-m", "twostroke", "serve", model, "--port", "0", *as_flags(settings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            yield LocalServer(_url(process), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    """What the server says where it is; what it says later is read, too, so that it never waits to say it."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    said: list[str] = []
    while True:
        try:
            line = lines.get(timeout=_START_LIMIT_S)
        except queue.Empty:
            line = ""
        if not line:
            last = "".join(said[-_LAST_LINES:]).strip()
            raise SetupError(f"twostroke serve did not start within {_START_LIMIT_S:g} s, or ended; it said: {last}")
        said.append(line)
        if found := _URL.search(line):
            return found[0]
