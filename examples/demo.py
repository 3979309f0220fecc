"""A server with the embedded model, one completion streamed through it, and the command that asks for it again.

    python examples/demo.py [--port 8000] [--serve]

With --serve a small chat model is fetched then and served, and answers a question. Where it cannot be had, the server
goes on with the embedded model. It stays until Ctrl-C. Without --serve the example ends with the completion. Nothing
but Python's own library is needed to talk to a server.
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
CHAT_MODEL = "smollm2"
QUESTION = "Explain in two sentences why the sky is blue."
CHAT_REQUEST: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 120,
    "temperature": 0,
    "stream": True,
}
STOP_LIMIT_S = 30
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Past any proxy: the server is on this machine."""


def main() -> None:
    """Serve a model, send a request, and show both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="port of 127.0.0.1 (default 8000)")
    parser.add_argument("--serve", action="store_true", help="go on serving until Ctrl-C")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    is_fetched = False  # also where Ctrl-C ends the first server
    with server("embedded", arguments.port) as (process, url):
        sys.stdout.write("\n" + PROMPT)
        _show(completion(url))
        sys.stdout.write(f"\n\n{as_curl(f'{url}/v1/completions', REQUEST)}\n\n")
        if not arguments.serve:
            return
        is_fetched = _fetched(CHAT_MODEL)
        if not is_fetched:
            sys.stdout.write(f"{CHAT_MODEL} could not be fetched. The server goes on with the embedded model.\n")
            _serve_on(process, url)
    if not is_fetched:
        return
    with server(CHAT_MODEL, arguments.port) as (process, url):
        sys.stdout.write(f"\n> {QUESTION}\n")
        _show(chat(url))
        sys.stdout.write(f"\n\n{as_curl(f'{url}/v1/chat/completions', CHAT_REQUEST)}\n\n")
        _serve_on(process, url)


def _show(pieces: Iterator[str]) -> None:
    for text in pieces:
        sys.stdout.write(text)
        sys.stdout.flush()


def _fetched(model: str) -> bool:
    """Whether the model is here; its progress, or why not, is on stderr."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "twostroke", "models", model]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as fetching:
        try:
            return fetching.wait() == 0
        except BaseException:
            fetching.send_signal(signal.SIGINT)  # it removes what it began
            raise


def _serve_on(process: subprocess.Popen[str], url: str) -> NoReturn:
    sys.stdout.write(f"The page is {url}/ and the API {url}/v1; Ctrl-C ends the server.\n")
    sys.stdout.flush()
    sys.exit(process.wait())


@contextmanager
def server(model: str, port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`twostroke serve` in a process of its own, once it takes requests; ended at the end."""
    command = [sys.executable, "-m", "twostroke", "serve", model, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        is_up = False
        try:
            url = _wait_for_address(process, port)
            is_up = True
            yield process, url
        except KeyboardInterrupt:  # the way to end it; the server has heard it, too
            if not is_up:
                sys.exit(0)
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def completion(url: str) -> Iterator[str]:
    """Yield the text of a streamed completion in pieces."""
    return (choice["text"] for choice in choices(f"{url}/v1/completions", REQUEST))


def chat(url: str) -> Iterator[str]:
    """Yield the text of a streamed chat answer in pieces."""
    found = choices(f"{url}/v1/chat/completions", CHAT_REQUEST)
    return (choice["delta"].get("content") or "" for choice in found)


def choices(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the first choice of each event of a streamed answer."""
    body = json.dumps(request).encode()
    with _OPENER.open(urllib.request.Request(url, body, {"content-type": "application/json"})) as response:
        for line in response:  # server-sent events: "data: {...}", an empty line between two
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]


def as_curl(url: str, request: dict[str, Any]) -> str:
    """Return a request as a command line."""
    return f"curl -N {url} -H 'content-type: application/json' -d {shlex.quote(json.dumps(request))}"


def _wait_for_address(process: subprocess.Popen[str], port: int) -> str:
    """Print the server's lines and return its address, from the line that begins with "serving"."""
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
