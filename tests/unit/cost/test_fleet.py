from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twostroke.cost.fleet import FleetLimits, GatewayPrices, WorkerSpeed, fleet_limits
from twostroke.errors import InvalidParameter

COSTS = GatewayPrices(
    token_us=25.0,
    request_us=500.0,
    route_us=250.0,
    report_us=50.0,
    heartbeat_us=5.0,
    reports_per_s=1.0,
    heartbeats_per_s=10.0,
    journal_prompt_token_bytes=4.0,
)
WORKER = WorkerSpeed(
    decode_tokens_per_s=400.0,
    prefill_tokens_per_s=1000.0,
    num_streams=32,
    kv_bytes_per_token=100_000,
    num_hashes=256,
)


def limits(num_prefill: int, num_decode: int, costs: GatewayPrices = COSTS) -> FleetLimits:
    return fleet_limits(num_prefill, num_decode, WORKER, costs, num_prompt_tokens=500, num_output_tokens=200)


@given(num_prefill=st.integers(1, 3000), num_decode=st.integers(1, 3000))
def test_gateways_have_room_for_what_they_are_given_and_no_fewer_would(num_prefill: int, num_decode: int) -> None:
    found = limits(num_prefill, num_decode)
    assert found.num_gateways is not None  # 7,000 workers would take the whole budget
    work, left = found.text_cores + found.routing_cores, COSTS.budget - found.membership_share
    assert work <= found.num_gateways * left * (1 + 1e-9)
    assert found.num_gateways == 1 or work > (found.num_gateways - 1) * left * (1 - 1e-9)


def test_no_number_of_gateways_is_enough_when_each_only_listens() -> None:
    assert limits(3500, 3500).num_gateways is None
    rarer = replace(COSTS, heartbeats_per_s=0.0)  # the report is a sign of life
    assert limits(3500, 3500, rarer).num_gateways is not None


def test_the_link_of_a_decode_worker_carries_what_all_prefill_workers_send() -> None:
    found = limits(30, 10)
    assert found.prefill_link_bytes_per_s == 1e8
    assert found.decode_link_bytes_per_s == 3e8


def test_a_cost_below_nothing_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"token_us=-1\.0"):
        replace(COSTS, token_us=-1.0)
