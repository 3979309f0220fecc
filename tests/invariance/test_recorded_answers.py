"""Tokens, log-probabilities and timelines are those of the commit that recorded them (recorded_answers)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from model_folders import SHAPES
from recorded_answers import (
    FORMATS,
    KV_FORMATS,
    LOGS,
    ON_TORCH,
    RECORDING,
    RUNS,
    TIMELINES,
    digests,
    instruction_set,
    timelines,
    write_model,
)
from twostroke.engine.event_sinks import read_events
from twostroke.scheduler.replay import replay

RECORDED: Mapping[str, Any] = json.loads(RECORDING.read_text(encoding="utf-8"))


OLD_FAMILIES = [family for family in SHAPES if f"{family}, float32" in RECORDED["tokens"]]
"""Those that there were when answers were recorded."""


def check(model: str, name: str, formats: Mapping[str, Mapping[str, Any]]) -> None:
    numbers: Mapping[str, str] | None = RECORDED["numbers"].get(instruction_set())
    for kind, config in formats.items():
        key = f"{name}, {kind}"
        found = digests(model, config)
        if numbers is not None:
            assert found == (RECORDED["tokens"][key], numbers[key]), key
        elif kind not in ON_TORCH:
            assert found[0] == RECORDED["tokens"][key], key


def test_the_embedded_model() -> None:
    check("embedded", "embedded", FORMATS)


def test_every_recorded_family_is_asked_again() -> None:
    known = {name.rpartition(",")[0] for name in RECORDED["tokens"]}
    assert known - {"embedded", "smollm2"} == set(OLD_FAMILIES)


@pytest.mark.parametrize("family", OLD_FAMILIES)
def test_a_random_model_of_each_family(family: str, tmp_path: Path) -> None:
    check(str(write_model(tmp_path, family)), family, FORMATS)


def test_a_model_that_others_trained(real_model: Callable[[str], Path]) -> None:
    check(str(real_model("smollm2")), "smollm2", KV_FORMATS)


@pytest.mark.parametrize("run", RUNS)
def test_an_event_log_is_explained_as_it_was(run: str) -> None:
    recorded = json.loads(TIMELINES.read_text(encoding="utf-8"))[run]
    assert json.loads(json.dumps(timelines(run))) == recorded
    assert recorded


@pytest.mark.parametrize("file", ["engine.jsonl", "pools.prefill-0.1.jsonl", "pools.decode-0.1.jsonl"])
def test_an_event_log_decides_the_same_again(file: str) -> None:
    assert replay(read_events(LOGS / file)) is None
