"""A server with the embedded model, one completion streamed through it, and the command that asks for it again.

    python examples/demo.py [--port 8000] [--serve]

With --serve the server stays until Ctrl-C; without, the example ends with its answer. Nothing but Python's own library
is needed to talk to a server.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

PROMPT = Path(__file__).with_name("stack.txt").read_text(encoding="utf-8")
REQUEST: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 160,
    "temperature": 0.8,
    "frequency_penalty": 0.4,  # a model as small as this one goes round in circles
    "seed": 6,
    "stream": True,
}
STOP_LIMIT_S = 30


def main() -> None:
    """Serves, asks, shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="port of 127.0.0.1 (default 8000)")
    parser.add_argument("--serve", action="store_true", help="go on serving until Ctrl-C")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    with server(arguments.port) as (process, url):
        sys.stdout.write("\n" + PROMPT)
        for text in completion(url):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write(f"\n\n{as_curl(url)}\n\n")
        if arguments.serve:
            sys.stdout.write(f"The page is {url}/ and the API {url}/v1; Ctrl-C ends the server.\n")
            sys.stdout.flush()
            sys.exit(process.wait())


@contextmanager
def server(port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`twostroke serve` in a process of its own, once it takes requests; ended at the end."""
    command = [sys.executable, "-m", "twostroke", "serve", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, _wait_for_address(process, port)
        except KeyboardInterrupt:
            pass  # the way to end it; the server has heard it, too
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def completion(url: str) -> Iterator[str]:
    """The text of a streamed completion, piece by piece."""
    body = json.dumps(REQUEST).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        for line in response:  # server-sent events: "data: {...}", an empty line between two
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["text"]


def as_curl(url: str) -> str:
    """The same request as a command line."""
    return f"curl -N {url}/v1/completions -H 'content-type: application/json' -d {shlex.quote(json.dumps(REQUEST))}"


def _wait_for_address(process: subprocess.Popen[str], port: int) -> str:
    """Passes on what the server says; the line that begins with "serving" has its address."""
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)
        if "cannot be listened on" in line:
            sys.exit(f"Is another server running? Take another port: make run PORT={port + 1}")
        if line.startswith("serving"):
            threading.Thread(target=lambda: sys.stderr.writelines(process.stderr or ()), daemon=True).start()
            return line.split()[1]
    sys.exit(process.wait() or 1)


def _end(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
