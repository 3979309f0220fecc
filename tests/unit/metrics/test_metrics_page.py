"""docs/metrics.md has every metric of every configuration, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from explain_loads import random_load
from metrics_page import check_documented, documented
from pool_log import PoolLog, died_and_resumed
from twostroke.api.observation import Observation
from twostroke.cluster.dispatcher import Dispatcher
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.server import ServerConfig
from twostroke.event_codec import pack
from twostroke.events import EngineStarted, Event


def pools() -> list[Event]:
    log = PoolLog()
    log.handed_over("a#0.0", 0.0)
    log.handed_over("b#0.0", 10.0, problem="refused: other numerics")
    log.events += _resumed()
    return log.events


def _resumed() -> list[Event]:
    log = PoolLog()
    died_and_resumed(log, "c#0.0")
    return log.events


def with_limits() -> list[Event]:
    """Return a load of an engine with limits for TTFT and ITL."""
    started, *events = random_load(3)
    assert isinstance(started, EngineStarted)
    limits = {"enable_chunked_prefill": True, "mixing": "mixed", "ttft_slo": 0.05, "itl_slo": 0.01}
    return [replace(started, scheduler=started.scheduler | limits), *events]


def half(events: list[Event]) -> list[Event]:
    """Return the first half of a load: requests still run and hold KV."""
    return events[: len(events) // 2]


LOADS = [event for seed in range(8) for event in random_load(seed)]
CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[Event]]] = {
    "one process that has done nothing": ({}, []),
    "one process": ({}, random_load(3)),
    "prompts, drafts, offloading and checks of many loads": ({}, LOADS),
    "limits of time": ({}, with_limits()),
    "pools": ({}, pools()),
    "vLLM's names": ({"metrics_compat": ("vllm",)}, LOADS),
    "SGLang's names": ({"metrics_compat": ("sglang",)}, LOADS),
    "pools under all names": ({"metrics_compat": ("vllm", "sglang")}, pools()),
    "tenants": ({"api_key": ("ann:a", "bob:b"), "admin_api_key": "c"}, half(random_load(2))),
    "the live page with texts": ({"live_text": True}, random_load(2)),
}
"""Settings of a server, and events of its engines."""


def text_of(settings: dict[str, Any], events: Iterable[Event], folder: Path) -> str:
    """Return the text of /metrics: the route returns the result of `exposition`."""
    events = list(events)
    has_pools = any(event.process.startswith("prefill") for event in events)
    config = ServerConfig(**settings, flight_recorder_dir=folder)
    observation = Observation(config, "m", 0.0, has_pools=has_pools)
    if has_pools:
        observation.gateway.follow(Dispatcher(LeastBusy()))
    for event in events:
        observation.append(pack(event))
    observation.answers.answered("/v1/completions", 200)
    observation.answers.ignored("best_off")
    return observation.exposition().decode()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("dumps")
    return {name: text_of(*given, folder) for name, given in CONFIGURATIONS.items()}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_a_configuration_exposes_is_on_the_page(texts: dict[str, str], name: str) -> None:
    assert len(check_documented(texts[name])) > 40


def test_what_is_on_the_page_is_exposed_by_some_configuration(texts: dict[str, str]) -> None:
    everywhere = [check_documented(text) for text in texts.values()]
    names = {name for found in everywhere for name in found}
    assert set(documented()) == names, f"not exposed: {sorted(set(documented()) - names)}"
    for name, labels in documented().items():
        of_samples = {label for found in everywhere for label in found.get(name, ())}
        assert labels == of_samples, f"{name}: no sample has {sorted(labels - of_samples)}"


def test_a_metric_that_the_page_lacks_is_found(texts: dict[str, str]) -> None:
    text = texts["one process"] + "# HELP twostroke:new x\n# TYPE twostroke:new gauge\ntwostroke:new 1\n"
    with pytest.raises(AssertionError, match=r"not in docs/metrics.md: \['twostroke:new'\]"):
        check_documented(text)
    text = texts["one process"] + '# TYPE twostroke:engine_steps counter\ntwostroke:engine_steps_total{user="ann"} 1\n'
    with pytest.raises(AssertionError, match=r"engine_steps_total: labels not in docs/metrics.md: \['user'\]"):
        check_documented(text)
