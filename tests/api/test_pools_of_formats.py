"""Pools that differ in block size, KV format, element type or quantization: their reports, and their separate caches.

Workers are threads of this process, with the embedded model (bfloat16).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from factories import submitted
from twostroke.client.engine_client import PoolMember
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.routed_placer import LeastBusy, Place, ReadyWorker
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.errors import InvalidParameter
from twostroke.events import KVImportEnded
from twostroke.explain.recorder import FlightRecorder
from twostroke.explain.segments import Label
from twostroke.explain.timeline import timeline_of
from twostroke.outputs import NumericDrift, RequestOutput
from twostroke.pools.member import Role
from twostroke.sampling_params import SamplingParams

CONFIG = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=1000)
TEXT = "def f(x):\n    return x\n" * 12
NUM_TOKENS = 6


class Chosen(LeastBusy):
    """Placer that hands over, or does not, as the test says."""

    hands_over = True

    def place(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        members: Sequence[ReadyWorker],
        num_live: Callable[[str], int],
    ) -> Place | None:
        allowed = [member for member in members if self.hands_over or member.role is Role.DECODE]
        return super().place(request, token_ids, allowed, num_live)


@dataclass
class Found:
    """Results of the same request, handed over twice and then computed where it decodes."""

    answers: list[tuple[list[int], list[float]]] = field(default_factory=list[tuple[list[int], list[float]]])
    drifts: list[NumericDrift] = field(default_factory=list[NumericDrift])
    num_cached: list[int] = field(default_factory=list[int])
    members: list[PoolMember] = field(default_factory=list[PoolMember])
    recorder: FlightRecorder = field(default_factory=FlightRecorder)

    @property
    def imports(self) -> list[KVImportEnded]:
        return [event for event in self.recorder.events() if isinstance(event, KVImportEnded)]


async def answered(engine: PooledEngine, name: str) -> RequestOutput:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True)
    prompt = engine.inputs.process(TEXT, params)
    stream = engine.generate(submitted(engine, prompt, name))
    wake = asyncio.Event()
    stream.listen(wake.set)
    outputs: list[RequestOutput] = []
    while not (outputs and outputs[-1].finished):
        await wake.wait()
        wake.clear()
        outputs += stream.take()
    parts = [part for output in outputs for part in output.outputs]
    outputs[-1].outputs = [parts[-1]]
    parts[-1].logprobs = [entry for part in parts for entry in part.logprobs or []]
    parts[-1].token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
    return outputs[-1]


def run(config: EngineConfig = CONFIG, **given: Any) -> Found:
    """Return the results with one pair of pools; with decode=1 alone, of one engine."""
    found, placer = Found(), Chosen()

    async def ask_all() -> None:
        pools = PoolConfig(**{"prefill": 1, "decode": 1, "pool_workers": "thread", **given})
        engine = PooledEngine(config, pools, placer=placer, listeners=(found.recorder,))
        await engine.start()
        try:
            for number, placer.hands_over in enumerate((True, True, False)):
                output = await answered(engine, f"r{number}")
                (part,) = output.outputs
                logprobs = [entry[t].logprob for entry, t in zip(part.logprobs or [], part.token_ids, strict=True)]
                found.answers.append((list(part.token_ids), logprobs))
                found.drifts.append(output.numeric_drift)
                found.num_cached.append(output.num_cached_tokens)
            found.members = engine.members()
            await asyncio.sleep(0)  # the last events
        finally:
            await engine.close()

    asyncio.run(ask_all())
    return found


@pytest.fixture(scope="module")
def alone() -> Found:
    """Return the results of one engine with the settings that both pools share."""
    return run(prefill=0)


@pytest.mark.parametrize(
    "given",
    [{}, {"prefill_config": {"block_size": 8}}, {"decode_config": {"block_size": 64, "max_num_seqs": 4}}],
    ids=str,
)
def test_what_loses_nothing_needs_no_permission(given: dict[str, Any], alone: Found) -> None:
    """Tokens are those of one engine, with equal pools and with other block sizes, and no drift is reported."""
    found = run(**given)
    assert found.answers == alone.answers
    assert [end.problem or end.drift for end in found.imports] == ["", ""]
    assert found.drifts == [{}, {}, {}]
    assert found.num_cached[2] > 0, "what came from the other pool is found again"


DIFFERING: dict[str, tuple[dict[str, Any], NumericDrift]] = {
    "KV format": ({"prefill_config": {"kv_cache_dtype": "int8"}}, {"kv_cache_dtype": ["int8", "bf16"]}),
    "KV format and block size": (
        {"decode_config": {"kv_cache_dtype": "int8", "block_size": 32}},
        {"kv_cache_dtype": ["bf16", "int8"]},
    ),
    "element type": (
        {"prefill_config": {"dtype": "float32"}},
        {"dtype": ["float32", "bfloat16"], "kv_cache_dtype": ["f32", "bf16"]},
    ),
    "quantization": (
        {"prefill_config": {"quantization": "int8"}},
        {"quantization": ["int8", "none"], "activation_quantization": ["int8", "none"]},
    ),
    "KV of the same format": (
        {"prefill_config": {"dtype": "float32", "kv_cache_dtype": "bf16"}},
        {"dtype": ["float32", "bfloat16"]},
    ),
}


@pytest.mark.parametrize("differing", DIFFERING, ids=str)
def test_pools_that_differ_say_so_and_keep_their_kv_apart(differing: str, alone: Found) -> None:
    given, drift = DIFFERING[differing]
    found = run(**given, allow_numeric_drift=True)
    assert found.drifts == [drift, drift, {}]
    first, second = found.imports
    assert (first.problem, second.problem) == ("", "")
    assert first.num_bytes > 0
    assert all(name in first.drift for name in drift)
    handed_over = found.answers[0]
    assert handed_over[0][0] == alone.answers[0][0][0]
    assert handed_over[1] == pytest.approx(alone.answers[0][1], abs=0.5), "the KV that came is that of this prompt"
    # the third was computed where it decodes, with its own numerics and no KV from the other pool
    assert found.num_cached[2] == 0
    if "decode_config" not in given:
        assert found.answers[2] == alone.answers[0]
    by_role = {member.role: member.formats for member in found.members}
    for name, values in drift.items():
        assert [by_role[Role.PREFILL][name], by_role[Role.DECODE][name]] == values
    (lane,) = timeline_of(list(found.recorder.events()), "r0").lanes
    (transfer,) = [segment for segment in lane.segments if segment.label is Label.TRANSFER]
    assert "numerics differ: " in transfer.reason
    assert any("; numerics differ: " in note for note in lane.notes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"prefill_config": {"kv_cache_dtype": "int8"}, "decode_config": {"kv_cache_dtype": "bf16"}},
            "prefill workers have kv_cache_dtype=int8, decode workers kv_cache_dtype=bf16: .*--allow-numeric-drift",
        ),
        ({"decode_config": {"dtype": "float32"}}, "prefill workers have dtype=auto, .* decode workers dtype=float32"),
        ({"prefill_config": {"quantization": "int8"}}, "quantization=int8, decode workers quantization=None"),
        ({"prefill_config": {"kernels": "reference"}}, "kernels=reference, decode workers kernels=auto"),
        ({"prefill_config": {"device": "cuda"}}, "on cuda, decode workers on cpu; KV is handed over between CPUs"),
        ({"decode_config": {"device": "cuda"}, "allow_numeric_drift": True}, "on cpu, decode workers on cuda"),
        ({"prefill_config": {"block_size": 24}}, r"prefill_config.block_size=24: .* power of two"),
        ({"decode_config": {"kv_cache_dtype": "int9"}}, "decode_config.kv_cache_dtype='int9': must be one of"),
    ],
    ids=str,
)
def test_pools_that_cannot_be_are_refused_before_a_process_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        PooledEngine(CONFIG, PoolConfig(prefill=1, decode=1, **given))


@pytest.mark.parametrize(
    "given",
    [
        {"prefill_config": {"kv_cache_dtype": "bf16"}, "decode_config": {"kv_cache_dtype": "bfloat16"}},
        {"prefill_config": {"dtype": "float32", "kv_cache_dtype": "f32"}, "decode_config": {"dtype": "float32"}},
        {
            "prefill_config": {"quantization": "int4", "group_size": 32},
            "decode_config": {"quantization": "int4"},
        },
    ],
    ids=str,
)
def test_two_spellings_of_the_same_need_no_permission(given: dict[str, Any]) -> None:
    PooledEngine(CONFIG, PoolConfig(prefill=1, decode=1, **given))
