"""Floors by hand-derived numbers; predictions beside them; the frontier's shape."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twostroke.cost.price import cost_per_million_tokens
from twostroke.cost.step_cost import MachineLimits, ModelShape
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.planner.devices import find_device
from twostroke.planner.floors import Predictor, chunks_of

LLAMA_3_8B = ModelShape(
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    layer_windows=(None,) * 32,
    bytes_per_weight=2,
    bytes_per_kv_element=2,
)
H100 = find_device("H100-SXM")[1].limits("H100-SXM", "bfloat16")
ON_H100 = Predictor(LLAMA_3_8B, H100)


def test_a_token_alone_waits_for_the_weights_and_its_context() -> None:
    point = ON_H100.tpot(1, 1000)
    streamed = 2 * (32 * LLAMA_3_8B.num_layer_parameters + LLAMA_3_8B.num_head_parameters)
    assert point.tpot_floor_s == pytest.approx((streamed + 131_072 * 1002) / 3.35e12)
    assert point.bound == "memory"
    assert point.tpot_predicted_s is None
    assert point.tokens_per_s_predicted is None
    assert point.tokens_per_s_ceiling == pytest.approx(1 / point.tpot_floor_s)


def test_a_prompt_is_the_sum_of_its_chunks() -> None:
    whole = ON_H100.ttft(4096, 4096)
    operations = 2 * 32 * LLAMA_3_8B.num_layer_parameters * 4096 + 4 * 32 * 32 * 128 * 4096 * 4097 // 2
    assert whole.floor_s == pytest.approx((operations + 2 * 4096 * 128256) / 989.4e12)
    assert whole.bound == "compute"
    small = ON_H100.ttft(4096, 64)
    assert small.bound == "memory"
    assert small.floor_s > 64 * 2 * 32 * LLAMA_3_8B.num_layer_parameters / 3.35e12 > whole.floor_s
    assert sum(share.num_scheduled_tokens for share in chunks_of(4097, 64)) == 4097


def test_measured_steps_predict_beside_the_floor() -> None:
    steps = StepTimeModel(layers=Curve((1, 512), (0.1, 1.123)), head=Curve((1,), (0.01,)), pair_s=0.0, seen_s=1e-6)
    predictor = Predictor(LLAMA_3_8B, H100, steps)
    point = predictor.tpot(3, 99, price_per_hour=3.6)
    assert point.tpot_predicted_s == pytest.approx(0.1 + 2 * (1.023 / 511) + 0.01 + 3 * 32 * 100 * 1e-6)
    assert point.tokens_per_s_predicted == pytest.approx(3 / point.tpot_predicted_s)
    assert point.cost_per_million_tokens == pytest.approx(1000 * point.tpot_predicted_s / 3)
    prompt = predictor.ttft(1024, 512)
    assert prompt.predicted_s == pytest.approx(2 * 1.123 + 0.01)
    assert prompt.tokens_per_s == pytest.approx(1024 / prompt.predicted_s)


def test_money() -> None:
    assert cost_per_million_tokens(2.0, 1000.0) == pytest.approx(2 / 3.6)
    assert [point.cost_per_million_tokens for point in ON_H100.frontier(2, 10)] == [None, None]


@given(st.integers(1, 300), st.integers(1, 20_000), st.floats(1e9, 1e16), st.floats(1e9, 1e14))
def test_the_frontier_trades_time_for_rate(most: int, context: int, flops: float, rate: float) -> None:
    points = Predictor(LLAMA_3_8B, MachineLimits(flops, rate)).frontier(most, context)
    assert points[0].batch == 1
    assert points[-1].batch == most
    for before, after in pairwise(points):
        assert after.tpot_floor_s >= before.tpot_floor_s
        assert after.tokens_per_s_ceiling >= before.tokens_per_s_ceiling * (1 - 1e-9)
