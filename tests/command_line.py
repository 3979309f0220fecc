"""The command line in a process of its own, without the seconds of its imports.

The process is forked from one that has imported what the commands need (fork_parent.py). It has its own streams,
working directory and exit code, and ends as any Python process does.
"""

from __future__ import annotations

import subprocess
import tempfile

from forked_process import ForkedProcess


def twostroke(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as a shell would; return its output, its errors and its exit code."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        process = ForkedProcess(arguments, stdin=given.fileno(), stdout=output.fileno(), stderr=errors.fileno())
        code = process.wait()
        said: list[str] = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(["twostroke", *arguments], code, *said)
