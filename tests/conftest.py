"""What all tests share: Hypothesis profiles, and models written once per session.

The profile `ci` is the default and repeats itself exactly; `--hypothesis-profile=soak` runs 50 times as many examples.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from model_folders import SHAPES, write_random_model

_CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_EXAMPLES = 60

settings.register_profile("ci", max_examples=_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=_CALM)
settings.register_profile("soak", max_examples=50 * _EXAMPLES, deadline=None, suppress_health_check=_CALM)
settings.load_profile("ci")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Models this small gain nothing from threads, and on a busy machine a parallel region waits for the slowest."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random float32 model of each family."""
    return {family: write_random_model(tmp_path_factory.mktemp(family), family) for family in SHAPES}
