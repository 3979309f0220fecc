"""The command line in a process of its own, without the seconds of its imports.

One process imports what the commands need and forks for each command. A child has its own streams, working directory
and exit code, and ends as any Python process does.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_PARENT = """
import json, os, sys
import torch
import twostroke.engine.assembly, twostroke.llm
from twostroke.cli import bench, calibrate, chat, commands, doctor, explain, generate, plan, replay, usage
from twostroke.cli.main import main

for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()

for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
    opened = os.open(os.path.join(task["folder"], name), flags)
    os.dup2(opened, number)
    os.close(opened)
sys.stdin, sys.stdout, sys.stderr = (
    open(0, closefd=False),
    open(1, "w", closefd=False),
    open(2, "w", closefd=False, errors="backslashreplace", buffering=1),
)
os.chdir(task["cwd"])
sys.argv = ["twostroke", *task["arguments"]]
main()
"""


def twostroke(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as a shell would; return its output, its errors and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
        streams["stdin"].write_bytes(stdin.encode())
        streams["stdout"].touch()
        streams["stderr"].touch()
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps({"arguments": arguments, "folder": folder, "cwd": os.getcwd()}) + "\n")
        parent.stdin.flush()
        code = int(parent.stdout.readline())
        output, errors = streams["stdout"].read_text(), streams["stderr"].read_text()
    return subprocess.CompletedProcess(["twostroke", *arguments], code, output, errors)


@cache
def _parent() -> subprocess.Popen[str]:
    """Start the process that forks, once."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    atexit.register(process.kill)
    return process
