"""Warnings of an engine at its start about limits that it cannot keep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from factories import uniform_shape
from twostroke.config.engine import EngineConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.startup.calibrated import latency_model

SHAPE = uniform_shape(
    hidden_size=4,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=10,
    windows=(None,),
    bytes_per_weight=2,
)
STEPS = StepTimeModel(layers=Curve((1, 17), (0.010, 0.030)), head=Curve((1,), (0.001,)), pair_s=0.0, seen_s=0.0)
"""A token alone: 11 ms; beside 16 tokens of a prompt: 31 ms."""


@pytest.mark.parametrize(
    ("limits", "notes"),
    [
        ({"itl_slo": "31ms", "ttft_slo": "11ms"}, []),
        (
            {"itl_slo": "20ms"},
            ["itl_slo 20 ms is kept for one request alone; .* nearest that can be kept is 31 ms"],
        ),
        ({"itl_slo": "5us"}, ["itl_slo 0.005 ms cannot be kept: .* alone takes 11 ms, beside a prompt 31 ms"]),
        ({"ttft_slo": "1ms"}, ["ttft_slo 1 ms cannot be kept: a prompt of one token alone takes 11 ms"]),
        ({"itl_slo": "1ms", "ttft_slo": "2ms"}, ["ttft_slo 2 ms cannot", "itl_slo 1 ms cannot"]),
        ({}, []),
    ],
)
def test_a_limit_that_cannot_be_kept_is_said_with_the_nearest(limits: dict[str, str], notes: list[str]) -> None:
    config = EngineConfig.from_keywords(model="embedded", **limits)
    pace = latency_model(config, Path("embedded"), SHAPE, MachineLimits(1e9, 1e9), STEPS)
    said = [line for line in pace.lines if line.startswith("note")]
    assert len(said) == len(notes)
    for line, words in zip(said, notes, strict=True):
        assert re.search(words, line), line
    assert len(pace.lines) == len(notes) + bool(limits)
