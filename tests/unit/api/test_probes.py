"""Probes of the deployment files ask paths that the server has, and each path means what its probe is for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI

from twostroke.api.gate import OPEN_PATHS
from twostroke.api.routes.operations import operations_router
from twostroke.cli.main import app as commands
from twostroke.client.engine_client import EngineHealth, EngineState

REPOSITORY = Path(__file__).parents[3]
MANIFESTS = sorted((REPOSITORY / "deploy").glob("*.y*ml"))
READY = {EngineState.RUNNING}
"""States in which requests are taken."""
ALIVE = {EngineState.STARTING, EngineState.RUNNING, EngineState.DRAINING}
"""States in which a restart would not help."""
WANTED = {"readinessProbe": READY, "startupProbe": READY, "livenessProbe": ALIVE, "HEALTHCHECK": ALIVE}


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Return every container anywhere in a manifest."""
    if isinstance(node, dict):
        yield from node.get("containers", [])
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from containers(child)


def gateways() -> list[dict[str, Any]]:
    """Return the containers that run our server."""
    documents = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return [c for document in documents for c in containers(document) if c.get("command", [""])[0] == "twostroke"]


def probes() -> list[tuple[str, str]]:
    """Return kind and path of every probe."""
    found = [
        (kind, probe["httpGet"]["path"]) for c in gateways() for kind, probe in c.items() if kind.endswith("Probe")
    ]
    check = re.search(r"^HEALTHCHECK .*?\n(?:\s+.*\n)+", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert check is not None, "the Dockerfile has no HEALTHCHECK"
    return [*found, *(("HEALTHCHECK", path) for path in re.findall(r"http://127\.0\.0\.1:8000(/\w*)", check[0]))]


async def states_with_200(path: str) -> set[EngineState]:
    """Return the engine states in which the server's own route answers 200."""
    engine, app = SimpleNamespace(), FastAPI()
    context: Any = SimpleNamespace(engine=engine)
    app.include_router(operations_router(context))
    found: set[EngineState] = set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        for state in EngineState:
            engine.health = lambda state=state: EngineHealth(state, "")
            status = (await client.get(path)).status_code
            assert status in (200, 503), f"{path} answers {status}"
            found |= {state} if status == 200 else set()
    return found


def test_every_kind_of_probe_is_there() -> None:
    assert {kind for kind, _ in probes()} == set(WANTED)


@pytest.mark.parametrize(("kind", "path"), probes())
def test_a_probe_asks_what_it_is_for(kind: str, path: str) -> None:
    assert asyncio.run(states_with_200(path)) == WANTED[kind]
    assert path in OPEN_PATHS, f"{path} wants a key where keys are set, and a probe has none"


def test_probes_ask_the_port_that_the_server_listens_at() -> None:
    for container in gateways():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        listens_at = int(container["command"][container["command"].index("--port") + 1])
        for kind, probe in container.items():
            if kind.endswith("Probe"):
                assert ports[probe["httpGet"]["port"]] == listens_at, kind


def test_commands_of_the_manifests_are_commands_of_ours() -> None:
    assert gateways()
    for container in gateways():
        commands.parse_args(container["command"][1:], print_error=False, exit_on_error=False)
