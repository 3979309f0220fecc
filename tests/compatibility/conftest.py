"""Models, and reference answers, that all pairs of a process share."""

from __future__ import annotations

import pytest

from compatibility.engines import Engines
from compatibility.models import Models
from rank_threads import ranks_are_threads
from twostroke.cost.step_cost import MachineLimits
from twostroke.startup import assembly


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background work takes what predicted step times leave, so what gives way must not depend on this machine."""
    monkeypatch.setattr(assembly, "measure_machine_limits", lambda *_, **__: MachineLimits(2e11, 4e10))
