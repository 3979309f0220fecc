"""An engine sized by measuring its largest steps, on a card of so many bytes whose tensors are counted."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rank_threads import ranks_are_threads
from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.errors import DoesNotFit, InvalidParameter
from twostroke.kv_cache import device_memory
from twostroke.kv_cache.device_memory import MIN_RESERVE_BYTES, DeviceMemory
from twostroke.runner.largest_steps import StepLimits, largest_steps
from twostroke.runner.live_bytes import LiveBytes
from twostroke.runner.memory_probe import MemoryReading
from twostroke.startup import assembly
from twostroke.startup.assembly import build_engine
from twostroke.startup.measured_memory import settings_that_fit
from twostroke.startup.preparation import prepare

MIB = 1 << 20
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kernels": "reference",
    "max_num_batched_tokens": 64,  # each of which takes 15 ms with the reference's kernels
}
MANY_SEQS: dict[str, Any] = {**SETTINGS, "max_num_seqs": 32}
"""Contexts of so many weigh more in a step than its tokens: fewer tokens, fewer or shorter requests are each a way."""
Card = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingProbe:
    """Counts the tensors of the work against a card that is not there: the same numbers each time."""

    total_bytes: int
    held_bytes: int
    others_bytes: int = 0

    def measure(self, work: Callable[[], object]) -> MemoryReading:
        with LiveBytes() as counted:
            work()
        if self.others_bytes + self.held_bytes + counted.peak > self.total_bytes:
            raise torch.OutOfMemoryError(f"{counted.peak:,} bytes beyond what is held")
        return MemoryReading(
            total_bytes=self.total_bytes,
            others_bytes=self.others_bytes,
            held_bytes=self.held_bytes,
            peak_bytes=counted.peak,
        )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Make the device a card with so many bytes."""

    def of(total_bytes: int) -> None:
        probe = CountingProbe(total_bytes=total_bytes, held_bytes=2 * MIB, others_bytes=3 * MIB)
        monkeypatch.setattr(assembly, "memory_probe_for", lambda device: probe)  # pyright: ignore

    return of


@pytest.fixture
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep less memory free, so that small cards and steps, which are fast, show the same as large ones."""
    monkeypatch.setattr(device_memory, "MIN_RESERVE_BYTES", MIB)


def account_of(startup_lines: tuple[str, ...]) -> dict[str, int]:
    """Return the numbers of the line about memory, by their words."""
    (line,) = [line for line in startup_lines if line.startswith("memory")]
    found = {words: int(number.replace(",", "")) for number, words in re.findall(r"([\d,]+) ([a-zKV ]+)", line)}
    return {words.strip(): number for words, number in found.items()}


def test_kv_has_what_is_left_to_the_byte(card: Card) -> None:
    card(152 * MIB)
    built = build_engine(EngineConfig.from_keywords(**{**SETTINGS, "max_model_len": 1024}))
    try:
        account = account_of(built.facts.startup_lines)
        parts = sum(
            account[words]
            for words in ("that others hold", "of weights", "for the largest step", "kept in reserve", "for KV")
        )
        assert parts == int(0.9 * 152 * MIB)
        assert account["for the largest step"] > 0
        assert account["kept in reserve"] >= MIN_RESERVE_BYTES
        runner: Any = built.engine._executor._runner  # pyright: ignore
        assert account["for KV"] - runner.kv.layout.bytes_per_block < runner.kv.nbytes <= account["for KV"]
    finally:
        built.engine.close()


def test_kv_has_no_more_than_twice_what_requests_use_and_says_so(card: Card) -> None:
    card(256 * MIB)
    built = build_engine(EngineConfig.from_keywords(**SETTINGS))
    built.engine.close()
    facts = built.facts
    assert facts.num_blocks == 2 * 8 * 256 // facts.block_size
    (line,) = [line for line in facts.startup_lines if line.startswith("kv cache")]
    assert line.endswith("(twice what 8 requests of 256 tokens can use; the second half holds cached prefixes)")


def test_measuring_twice_gives_the_same_and_tokens_do_not_change(card: Card) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=2)
    with LLM(**SETTINGS, num_kv_blocks=64) as llm:
        expected = llm.generate("The weather today", params)[0].outputs[0].token_ids
    card(256 * MIB)
    lines: list[str] = []
    for _ in range(2):
        config = EngineConfig.from_keywords(**SETTINGS)
        built = build_engine(config)
        lines += [line for line in built.facts.startup_lines if line.startswith("memory")]
        built.engine.close()
    assert lines[0] == lines[1]
    with LLM(**SETTINGS) as llm:
        assert llm.generate("The weather today", params)[0].outputs[0].token_ids == expected


def test_larger_steps_leave_less_for_kv(card: Card) -> None:
    card(512 * MIB)
    found: list[int] = []
    for tokens in (16, 64, 256):  # the last are more than the longest request has
        config = EngineConfig.from_keywords(**{**SETTINGS, "max_model_len": 64, "max_num_batched_tokens": tokens})
        built = build_engine(config)
        found.append(account_of(built.facts.startup_lines)["for KV"])
        built.engine.close()
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_no_step_of_a_real_load_takes_more_than_was_measured(card: Card) -> None:
    """Prompts and decodes of every size, penalties, filters and log-probabilities, all slots taken."""
    card(256 * MIB)
    settings = {**SETTINGS, "max_num_batched_tokens": 128}
    config = EngineConfig.from_keywords(**settings)
    built = build_engine(config)
    account = account_of(built.facts.startup_lines)
    built.engine.close()
    params = SamplingParams(
        max_tokens=8, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20, prompt_logprobs=20, seed=1
    )
    with LLM(**settings) as llm, LiveBytes() as counted:
        llm.generate([{"prompt_token_ids": [5, i] * (3 + 14 * i)} for i in range(8)], params)
    measured = account["for the largest step"]
    # torch cuts other numbers of rows into other pieces, some of them larger: that is what the reserve's share is for
    assert 0 < counted.peak <= measured + account["kept in reserve"] - MIN_RESERVE_BYTES
    assert counted.peak <= 1.05 * measured


@pytest.mark.usefixtures("small_reserve")
def test_a_card_too_small_names_settings_that_do_fit(card: Card) -> None:
    """Each of them is tried."""
    total = 13 * MIB
    card(total)
    with pytest.raises(DoesNotFit, match=f"0.9 x {total:,} bytes - 3,145,728 that others hold") as refused:
        build_engine(EngineConfig.from_keywords(**MANY_SEQS))
    flags = re.findall(r"--([a-z-]+) (\d+)\b", str(refused.value).partition("What would fit")[2])
    assert {"max-num-batched-tokens", "max-num-seqs", "max-model-len"} <= {flag for flag, _ in flags}, refused.value
    for flag, value in flags:
        if flag == "gpu-memory-utilization":
            continue  # of a GPU alone; tests/unit/kv_cache/test_device_memory.py tries it
        changed = {**MANY_SEQS, flag.replace("-", "_"): int(value)}
        build_engine(EngineConfig.from_keywords(**changed)).engine.close()


@pytest.mark.usefixtures("small_reserve")
def test_a_step_that_a_card_does_not_hold_is_refused_by_its_size(card: Card) -> None:
    card(11 * MIB + MIB // 4)
    with pytest.raises(
        DoesNotFit, match=r"a step of 64 tokens, of which 32 sample, does not fit.*--max-num-batched-tokens \d+"
    ):
        build_engine(EngineConfig.from_keywords(**MANY_SEQS))


def test_smaller_steps_are_measured_without_what_the_failed_one_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive_at_next: list[bool] = []

    class Full:
        """Has room for nothing; says whether the tensors of the first try are still there at the second."""

        def measure(self, work: Callable[[], object]) -> MemoryReading:
            alive_at_next.extend(ref() is not None for ref in held)
            activations = torch.zeros(8)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(assembly, "memory_probe_for", lambda device: Full())  # pyright: ignore
    with pytest.raises(DoesNotFit):
        build_engine(EngineConfig.from_keywords(**SETTINGS))
    assert len(held) > 1
    assert not any(alive_at_next)


def account_for(**parts: int) -> DeviceMemory:
    numbers = {"total_bytes": 100 * MIB, "others_bytes": 0, "step_bytes": 0, "reserve_bytes": MIB} | parts
    return DeviceMemory(**{"utilization": 0.9, "weight_bytes": 0, **numbers})


def test_what_no_setting_mends_is_not_promised() -> None:
    config = EngineConfig.from_keywords(**SETTINGS)
    prepared = prepare(config)
    nothing = account_for(weight_bytes=1000 * MIB)
    assert settings_that_fit(prepared, nothing, lambda _: nothing) == []
    only_the_share = account_for(weight_bytes=90 * MIB)
    found = settings_that_fit(prepared, only_the_share, lambda _: only_the_share)
    assert found == ["--gpu-memory-utilization 0.93"]


def test_quantized_weights_are_offered_where_they_are_enough() -> None:
    config = EngineConfig.from_keywords(threads=1, max_model_len=64, dtype="float32")
    prepared = prepare(config)
    if not prepared.operators.keeps_quantized:
        pytest.skip("the native kernels were not built")
    num_bytes = prepared.weight_bytes()
    full = account_for(total_bytes=num_bytes * 10 // 9, weight_bytes=num_bytes, reserve_bytes=0)
    assert settings_that_fit(prepared, full, lambda _: full)[-1] == "--quantization int8"


def test_ranks_take_as_many_blocks_as_the_poorest_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter((300, 256))
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(  # the first to ask, of both, has the larger card
        assembly,
        "memory_probe_for",
        lambda device: CountingProbe(total_bytes=next(sizes) * MIB, held_bytes=12 * MIB),  # pyright: ignore
    )
    native = {name: value for name, value in SETTINGS.items() if name != "kernels"}
    built = build_engine(EngineConfig.from_keywords(**native, tensor_parallel_size=2))
    try:
        (line,) = [line for line in built.facts.startup_lines if line.startswith("memory")]
        assert f"0.9 x {256 * MIB:,} bytes" in line
    finally:
        built.engine.close()


def test_largest_steps_have_every_token_and_every_row(random_models: dict[str, Path]) -> None:
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1, max_num_batched_tokens=100)
    prepared = prepare(config)
    longest = prepared.longest_request
    size = StepLimits(max_tokens=prepared.step_tokens, max_rows=7, longest=longest, max_logprobs=5)
    steps = list(largest_steps(size, prepared.layout))
    assert [batch.num_tokens for _, batch in steps] == [100, 100, 100]
    assert [len(requests) for requests, _ in steps] == [7, 7, 1]
    assert [scheduled.num_scheduled_tokens for scheduled in steps[1][1].requests] == [94, 1, 1, 1, 1, 1, 1]
    beyond = StepLimits(max_tokens=3 * longest - 1, max_rows=7, longest=longest, max_logprobs=5)
    assert [len(requests) for requests, _ in largest_steps(beyond, prepared.layout)] == [7, 7, 3]
    for requests, batch in steps:
        for request, scheduled in zip(requests, batch.requests, strict=True):
            assert scheduled.token_range.stop == longest
            assert len(request.prompt_token_ids) + len(request.output_token_ids) == longest
            assert request.params.logprobs == 5
    assert steps[1][1].finished_request_ids == tuple(r.request_id for r in steps[0][0])


@pytest.mark.parametrize("value", [0, 1.01, -1, "much", float("nan")])
def test_a_share_is_above_0_and_at_most_1(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="more than 0 and at most 1"):
        EngineConfig.from_keywords(device="cuda", gpu_memory_utilization=value)


def test_a_share_is_of_a_gpu_and_not_beside_a_size() -> None:
    assert EngineConfig.from_keywords(device="cuda", gpu_memory_utilization=0.5).cache.utilization == 0.5
    assert EngineConfig.from_keywords(device="cuda").cache.utilization == 0.9
    with pytest.raises(InvalidParameter, match=r"applies to GPUs.*Use --kv-cache-memory, or --device cuda"):
        EngineConfig.from_keywords(gpu_memory_utilization=0.5)
    with pytest.raises(InvalidParameter, match="changes nothing beside num_kv_blocks"):
        EngineConfig.from_keywords(device="cuda", gpu_memory_utilization=0.5, num_kv_blocks=4)


def test_live_bytes_counts_storages_once() -> None:
    before = torch.zeros(100, dtype=torch.uint8)
    with LiveBytes() as counted, torch.inference_mode():
        before += 1
        view = before[:50]
        assert counted.live == 0
        whole = torch.ones(256, dtype=torch.float32)
        parts = whole.split(64)
        del whole
        assert counted.live == 1024
        del parts
        assert (counted.live, counted.peak) == (0, 1024)
        (before.float() @ before.float()).item()
        assert counted.live == 0
        assert counted.peak == 1024
    assert view is not None
