"""What all tests share: how hard Hypothesis tries, and models written once per session."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from model_folders import SHAPES, write_random_model

hypothesis.settings.register_profile("ci", deadline=None, print_blob=True)
hypothesis.settings.register_profile("soak", deadline=None, print_blob=True, max_examples=3000, stateful_step_count=150)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))  # noqa: TID251


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random float32 model of each family."""
    return {family: write_random_model(tmp_path_factory.mktemp(family), family) for family in SHAPES}
