"""One server for all tests of the API that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import ServerProcess
from twostroke import LLM


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The embedded model, priorities allowed."""
    server = ServerProcess("--policy", "priority")
    yield server
    server.wait_until_idle()
    server.stop()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """Return the same model without a server; its answers are the expected ones."""
    with LLM("embedded", threads=1, num_kv_blocks=2000) as llm:
        yield llm


@pytest.fixture(scope="session")
def reasoning_server() -> Iterator[ServerProcess]:
    """Server that reads what the model writes as reasoning, and limits answers whose requests set no limit."""
    server = ServerProcess("--reasoning-parser", "deepseek_r1", "--default-max-tokens", "12")
    yield server
    server.wait_until_idle()
    server.stop()


@pytest.fixture(scope="session")
def pictures(pytestconfig: pytest.Config) -> Path | None:
    """Folder for the documentation's pictures; None unless they are to be taken (make pictures)."""
    return pytestconfig.getoption("pictures")
