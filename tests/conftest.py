"""What all tests share: Hypothesis profiles, and models written once per session.

The profile `ci` is the default and repeats itself exactly. `quick`, of the first tier, tries a quarter of its examples;
`--hypothesis-profile=soak` tries 50 times as many.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

from model_folders import RandomModels
from tiers import EXAMPLES, Tier, TierList
from twostroke.errors import ModelNotFound, SetupError
from twostroke.model.fetch import fetch
from twostroke.model.named_models import NAMED_MODELS

LOOK_AFTER = 20_000
"""Objects made before garbage is looked for; a test makes thousands."""
_CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("ci", max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=_CALM)
settings.register_profile(
    "quick", max_examples=EXAMPLES // 4, deadline=None, derandomize=True, suppress_health_check=_CALM
)
settings.register_profile("soak", max_examples=50 * EXAMPLES, deadline=None, suppress_health_check=_CALM)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that CI passes, where everything is installed."""
    parser.addoption(
        "--require-all", action="store_true", help="a test that finds a program of the system missing fails"
    )
    parser.addoption(
        "--tier",
        choices=get_args(Tier),
        default="all",
        help="first: what `make test` runs; second: the rest, and property tests with all of their examples",
    )
    parser.addoption(
        "--pictures", type=Path, help="folder that tests of the page write the documentation's pictures to"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples of property tests in the first tier."""
    if config.getoption("tier") == "first" and not config.getoption("hypothesis_profile", None):
        settings.load_profile("quick")


def pytest_sessionstart() -> None:
    """Switch garbage collection off while tests are collected: it would search a million objects and find nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude what was collected from garbage collection, also at the end, since a search takes a second."""
    gc.freeze()
    gc.set_threshold(LOOK_AFTER, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the other tier (tiers.py)."""
    tier = cast(Tier, config.getoption("tier"))
    if tier == "all":
        return
    is_second = TierList.read().second(item.nodeid.removeprefix("tests/") for item in items)
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item, second in zip(items, is_second, strict=True):
        runs_in_both = tier == "second" and is_hypothesis_test(getattr(item, "obj", None))
        (chosen if second == (tier == "second") or runs_in_both else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Pass where the tier has no test of those that were asked for."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("tier") != "all":
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def find_program(pytestconfig: pytest.Config) -> Callable[[str, str], str]:
    """Find a program that pip does not install. Without it the test is skipped, or fails with --require-all."""

    def find(name: str, debian_package: str) -> str:
        found = shutil.which(name)
        if found is None:
            message = f"not installed: {name} (Debian: {debian_package})"
            (pytest.fail if pytestconfig.getoption("require_all") else pytest.skip)(message)
        return found

    return find


@pytest.fixture(scope="session")
def need_nixl(pytestconfig: pytest.Config) -> Callable[[], None]:
    """Skip the test without NIXL, an extra, or let it fail with --require-all."""

    def need() -> None:
        if importlib.util.find_spec("nixl_cu12") is None:
            message = "not installed: nixl-cu12 (pip)"
            (pytest.fail if pytestconfig.getoption("require_all") else pytest.skip)(message)

    return need


@pytest.fixture(scope="session")
def real_model(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Fetch a trained model by its short name. Without it the test is skipped, or fails with --require-all.

    Terms are accepted by the person who runs the tests (`twostroke models NAME --accept-terms`); CI has accepted them.
    """
    is_required = pytestconfig.getoption("require_all")

    def get(name: str) -> Path:
        model = NAMED_MODELS[name]
        try:
            return fetch(replace(model, terms=None) if is_required else model)
        except (ModelNotFound, SetupError) as error:
            (pytest.fail if is_required else pytest.skip)(str(error))

    return get


@pytest.fixture(params=["shm", "tcp", "inproc", "nixl"])
def transport(request: pytest.FixtureRequest, need_nixl: Callable[[], None]) -> str:
    """Each KV transport."""
    if request.param == "nixl":
        need_nixl()
    return request.param


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread: models this small gain nothing from more, and a busy machine delays parallel regions."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random float32 model of each family, written when it is asked for."""
    return RandomModels(tmp_path_factory.mktemp)
