"""Models, and reference answers, that all pairs of a process share."""

from __future__ import annotations

import pytest

from compatibility.engines import Engines
from compatibility.models import Models
from rank_threads import ranks_are_threads


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
