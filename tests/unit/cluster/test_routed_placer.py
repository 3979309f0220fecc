"""The gateway's questions to the router about a request, and the reason that timelines show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from factories import make_facts
from twostroke.batch import NewRequest
from twostroke.client.load import EngineLoad
from twostroke.cluster.routed_placer import Place, ReadyWorker, RoutedPlacer
from twostroke.config.pools import RoutingConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.events import RequestRouted
from twostroke.explain.names import GATEWAY
from twostroke.pools.member import Role
from twostroke.sampling_params import SamplingParams

DECODE_LOAD = EngineLoad(64, num_running=60, step_s=0.02)
"""EngineLoad with many streams, which a prefill beside them would make late."""


def place(num_tokens: int, decode_load: EngineLoad = DECODE_LOAD, *, params: dict[str, Any] | None = None) -> Place:
    placer = RoutedPlacer(RoutingConfig())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        placer.joined(ReadyWorker(name, role, None, 16), make_facts(num_blocks=10_000), "shm")
    placer.reported("d0", lambda: decode_load, now_s=1.0)
    new = NewRequest("r", tuple(range(num_tokens)), SamplingParams(max_tokens=8, **(params or {})), 0)
    found = placer.place(GenerationRequest(new, 0.0, 8), new.prompt_token_ids, [], lambda worker_id: 0)
    assert found is not None
    return found


def test_a_prompt_of_a_block_and_more_is_handed_over() -> None:
    assert place(512) == Place("d0", "p0", place(512).reason)
    assert "p0 computes the prompt for d0: the hand-over is predicted to pay" in place(512).reason


@pytest.mark.parametrize(
    ("num_tokens", "params", "reason"),
    [
        (15, {}, "the prompt is shorter than one KV block, and only whole blocks are handed over"),
        (1, {}, "the prompt is shorter than one KV block, and only whole blocks are handed over"),
        (512, {"prompt_logprobs": 1}, "the request asks for results that cannot be handed over with its KV"),
        (15, {"prompt_logprobs": 1}, "the request asks for results that cannot be handed over with its KV"),
    ],
)
def test_a_prompt_that_cannot_be_handed_over_says_why(num_tokens: int, params: dict[str, Any], reason: str) -> None:
    assert place(num_tokens, params=params) == Place("d0", None, f"d0 computes the prompt itself: {reason}")


def test_an_idle_decode_worker_has_time() -> None:
    reason = place(512, EngineLoad(64, step_s=0.02)).reason
    assert reason.startswith("d0 computes the prompt itself: the decode member has time for the prompt (predicted cost")


def test_the_speed_of_a_hand_over_is_not_awaited_for_ever() -> None:
    """A worker that left reports no end of its hand-overs; remembering them would leak memory with every death."""
    placer = RoutedPlacer(RoutingConfig())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        placer.joined(ReadyWorker(name, role, None, 16), make_facts(), "shm")
    for number, decode in enumerate(("d0", "d1", "d1")):
        placer.routed(RequestRouted(0.0, GATEWAY, f"r{number}", decode, "p0", ""))
    placer.left("d1")
    assert placer.num_handovers == 1
    placer.left("p0")
    assert placer.num_handovers == 0


@pytest.mark.parametrize(("threads", "assumed"), [(1, 4000), (2, 1000)])
def test_a_worker_that_nobody_measured_is_assumed_as_fast_as_its_like(threads: int, assumed: int) -> None:
    placer = RoutedPlacer(RoutingConfig())
    for name, role, num_threads in (("p0", Role.PREFILL, threads), ("d0", Role.DECODE, 1)):
        facts = replace(make_facts(num_blocks=10_000), num_threads=num_threads)
        placer.joined(ReadyWorker(name, role, None, 16), facts, "shm")
    load = EngineLoad(64, num_running=60, step_s=0.02, prefill_s_per_token=1 / 4000)
    placer.reported("d0", lambda: load, now_s=1.0)
    new = NewRequest("r", tuple(range(512)), SamplingParams(max_tokens=8), 0)
    found = placer.place(GenerationRequest(new, 0.0, 8), new.prompt_token_ids, [], lambda worker_id: 0)
    assert found is not None
    assert f"assumed, as not measured yet: {assumed:,} prompt tokens/s of p0" in found.reason
