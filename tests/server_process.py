"""A real server in a process of its own, for tests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from forked_process import ForkedProcess

SERVE = (sys.executable, "-m", "twostroke", "serve")
"""A server that imports everything itself, as a user's does."""
PATIENCE_S = 60.0


class ServerProcess:
    """`twostroke serve` on a free port; what it writes to stderr is kept.

    Args:
        arguments: of the command line, behind the model.
        model: to serve.
        command: starts it in a Python of its own; without one it is forked from a process that has imported everything.
        num_kv_blocks: of its KV cache.
        port: to listen on; 0 takes a free one.
    """

    def __init__(
        self,
        *arguments: str,
        model: str = "embedded",
        command: tuple[str, ...] = (),
        num_kv_blocks: int = 2000,
        port: int = 0,
    ) -> None:
        flags = [model, "--port", str(port), "--threads", "1", "--num-kv-blocks", str(num_kv_blocks), *arguments]
        if command:
            self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
        else:
            self.process = ForkedProcess(["serve", *flags], stderr=subprocess.PIPE)
        self.lines: list[str] = []
        self._has_address = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._has_address.wait(PATIENCE_S) or not self.url:
            self.process.kill()
            self.process.wait()  # streams left open by a failure would fail the test again, for another reason
            raise AssertionError("the server did not start:\n" + "\n".join(self.lines))
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return "\n".join(self.lines)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send a request with a JSON body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(path, json=body, headers=named)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Yield the events of a stream without the last one, which must be [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def wait_for(self, what: str, path: str, is_so: Any) -> Any:
        """Request repeatedly until the answer is as expected."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            answer = self.http.get(path)
            if is_so(answer):
                return answer
            time.sleep(0.02)
        raise AssertionError(f"never {what}; last: {answer.status_code} {answer.text}")

    def wait_until_idle(self) -> None:
        """Wait until the engine has no request."""
        self.wait_for("idle", "/health", lambda answer: answer.json()["num_requests"] == 0)

    def stop(self) -> int:
        """Stop the server as an operator would; return its exit code."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(5)
            assert self.process.stderr is not None
            self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.match(r"serving\s+(http\S+)", line)
            if found:
                self.url = found.group(1)
                self._has_address.set()
        self._has_address.set()


@contextmanager
def viewing(*paths: Path) -> Iterator[str]:
    """`twostroke view` on a free port; yields its address, and expects a quiet end."""
    process = ForkedProcess(["view", *map(str, paths), "--port", "0"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process.stderr:
        try:
            told = process.stderr.readline()
            assert told.startswith("viewing  http://"), told + process.stderr.read()
            yield told.split()[1].partition("/#")[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
