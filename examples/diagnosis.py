"""The story of docs/diagnosis.md, from the complaint to the proof: a few minutes with the embedded model.

    python examples/diagnosis.py FOLDER

Into the folder go the event logs, what each command printed, and the pictures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOAD = "--request-rate 2.5 --num-requests 60 --prompt-lengths uniform:16:1500 --output-lengths exponential:80"
SERVER = "--threads 1 --max-num-batched-tokens 2048 --no-enable-prefix-caching"
STOP_LIMIT_S = 60


def main() -> None:
    """Run the load, diagnose it, apply the advice, and run the load again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for logs, texts and pictures; made where it is missing")
    parser.add_argument("--port", type=int, default=8765, help="port of 127.0.0.1 (default 8765)")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    load = f"bench serve --url http://127.0.0.1:{arguments.port} {LOAD} --results {shlex.quote(str(folder))}"
    before, after = folder / "before.events", folder / "after.events"
    for old in (before, after):
        old.unlink(missing_ok=True)

    with server(arguments.port, f"{SERVER} --event-log {before}"):
        twostroke(folder / "load-before.txt", load)
    twostroke(folder / "doctor.txt", f"doctor {before}")
    found = json.loads(twostroke(None, f"doctor {before} --json"))
    twostroke(folder / "explain.txt", f"explain {shlex.quote(found['example'])} --event-log {before}")
    lever = next((lever for lever in found["levers"] if lever["settings"]), None)
    if lever is None:
        sys.exit("the doctor found nothing to change: is another load on this machine?")
    settings = " ".join(f"--set {name}={json.dumps(value)}" for name, value in lever["settings"].items())
    twostroke(folder / "replay.txt", f"replay {before} {settings} --png {folder / 'what-if.png'}")
    with server(arguments.port, f"{SERVER} {lever['flags']} --event-log {after}"):
        twostroke(folder / "load-after.txt", load)
    twostroke(folder / "replay-after.txt", f"replay {after} --png {folder / 'after.png'}")
    twostroke(folder / "doctor-after.txt", f"doctor {after}")


def twostroke(output: Path | None, words: str) -> str:
    """Run a command. Show it with its output and save that in a file; None: neither."""
    command = [sys.executable, "-m", "twostroke", *shlex.split(words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"twostroke {words}: exit code {done.returncode}")
    if output is not None:
        output.write_text(done.stdout, encoding="utf-8")
        sys.stdout.write(f"\n$ twostroke {words}\n{done.stdout}")
        sys.stdout.flush()
    return done.stdout


@contextmanager
def server(port: int, flags: str) -> Iterator[None]:
    """`twostroke serve` with the embedded model, from its first request until it has drained."""
    command = [sys.executable, "-m", "twostroke", "serve", "--port", str(port), *shlex.split(flags)]
    sys.stdout.write(f"\n$ twostroke serve {flags}\n")
    sys.stdout.flush()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            if not any(line.startswith("serving") for line in process.stderr):
                sys.exit(f"the server did not start: exit code {process.wait()}; is port {port} free?")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_LIMIT_S)


if __name__ == "__main__":
    main()
