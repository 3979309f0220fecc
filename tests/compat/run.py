"""`make compat`: clients that others wrote, each in an environment of its own, against our server, unchanged.

Each one is installed from the package index into build/compat/NAME, which is kept; what it said and whether it was
content becomes benchmarks/results/compat.json. Needs the network the first time.

    python tests/compat/run.py [NAME ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.local_server import local_server
from twostroke.measure.report import BenchResult, save

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "compat"
RESULTS = ROOT / "benchmarks" / "results"
CONSTRAINTS = ROOT / "constraints.txt"
"""The same torch for all who want one: left to itself pip takes the newest, with gigabytes of CUDA."""
TOKENIZER = ROOT / "src" / "twostroke" / "embedded"
SERVER: Mapping[str, Any] = {"threads": 1, "num_kv_blocks": 2000, "tool_call_parser": "hermes"}
PATIENCE_S = 900.0
LAST_CHARACTERS = 2000


@dataclass(frozen=True)
class Client:
    """Client program of another project."""

    package: str
    """Whose version the result names."""
    requirements: tuple[str, ...]
    command: tuple[str, ...]
    """Behind the environment's bin/; {url} is the server's, {bin} that folder, {out} a folder for files."""


CLIENTS: Mapping[str, Client] = {
    "langchain": Client(
        package="langchain-openai",
        requirements=("langchain-openai",),
        command=("python", str(HERE / "langchain_client.py"), "{url}"),
    ),
    "ollama": Client(
        package="ollama",
        requirements=("ollama",),
        command=("python", str(HERE / "ollama_client.py"), "{url}"),
    ),
    "langchain-ollama": Client(
        package="langchain-ollama",
        requirements=("langchain-ollama",),
        command=("python", str(HERE / "langchain_ollama_client.py"), "{url}"),
    ),
    "lm-eval": Client(
        package="lm_eval",
        requirements=("lm-eval[api]",),
        command=("python", str(HERE / "lm_eval_client.py"), "{url}", "{out}"),
    ),
    "guidellm": Client(
        package="guidellm",
        requirements=("guidellm",),
        command=("python", str(HERE / "guidellm_client.py"), "{url}", "{out}", str(TOKENIZER)),
    ),
    "aiperf": Client(
        package="aiperf",
        requirements=("aiperf",),
        command=("python", str(HERE / "aiperf_client.py"), "{url}", "{out}", str(TOKENIZER)),
    ),
}


def main(names: Sequence[str]) -> int:
    """Run all clients in turn; return the number that failed."""
    unknown = set(names) - set(CLIENTS)
    if unknown:
        raise SystemExit(f"no client {', '.join(sorted(unknown))}; known: {', '.join(CLIENTS)}")
    found: dict[str, Any] = {}
    for name in names or CLIENTS:
        client = CLIENTS[name]
        environment = installed(name, client)
        with local_server("embedded", SERVER) as server:
            found[name] = tried(client, environment, server.url)
        print(f"{name} {found[name]['version']}: {'content' if found[name]['holds'] else 'FAILS'}")
        if not found[name]["holds"]:
            print(found[name]["said"])
    if not names:
        result = BenchResult.now(
            "compat", "make compat", config={"model": "embedded", **SERVER}, workload={}, results=found
        )
        print(f"saved {save(result, RESULTS).relative_to(ROOT)}")
    return sum(not each["holds"] for each in found.values())


def installed(name: str, client: Client) -> Path:
    """Return the folder bin/ of its environment, which is made once."""
    environment = ENVIRONMENTS / name
    is_whole = environment / ".installed"
    if not is_whole.is_file():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", CONSTRAINTS, *client.requirements], check=True)
        is_whole.touch()
    return environment / "bin"


def tried(client: Client, bin_folder: Path, url: str) -> dict[str, Any]:
    """Return the result of a client; its last printed line is JSON if it succeeded."""
    out = bin_folder.parent / "out"
    out.mkdir(exist_ok=True)
    program, *arguments = (word.format(url=url, out=out) for word in client.command)
    begin_s = time.monotonic()
    done = subprocess.run(
        [bin_folder / program, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, cwd=out, check=False
    )
    holds = done.returncode == 0
    said = json.loads(done.stdout.splitlines()[-1]) if holds else (done.stdout + done.stderr)[-LAST_CHARACTERS:]
    return {
        "version": version(bin_folder, client.package),
        "holds": holds,
        "seconds": round(time.monotonic() - begin_s, 1),
        "said": said,
    }


def version(bin_folder: Path, package: str) -> str:
    """Return the version of a package in that environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [bin_folder / "python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
