"""A prompt computed in one engine and continued in another: the bits of one engine, whatever the settings."""

from __future__ import annotations

import gc
import math
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from rank_threads import ranks_are_threads
from two_pools import Answer, TwoPools, alone, sequence
from twostroke.config.engine import EngineConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.event_codec import from_json, to_json
from twostroke.events import KVImportEnded, StepCommitted
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.replay import replay

KNOBS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "block size 1": {"block_size": 1, "num_kv_blocks": 3000},
    "block size 8, budget 30": {"block_size": 8, "max_num_batched_tokens": 30},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int4 KV": {"kv_cache_dtype": "int4"},
    "int8 weights": {"quantization": "int8"},
    "reference kernels": {"kernels": "reference"},
}


def requests() -> list[GenerationRequest]:
    """Greedy and seeded; a prompt with no full block, one of whole blocks, and two that begin alike."""
    dice = random.Random(5)
    begin = [dice.randrange(200) for _ in range(40)]
    prompts = [[dice.randrange(200) for _ in range(n)] for n in (3, 32, 77)]
    prompts += [begin + [7] * 9, begin + [8] * 30]
    made: list[GenerationRequest] = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=1 if i == 1 else 9,
            temperature=0.8 * (i % 2),
            logprobs=2,
            presence_penalty=0.5 * (i == 4),
            ignore_eos=True,
        )
        made.append(sequence(f"r{i}", prompt, params, seed=i, cache_salt="s" if i == 2 else None))
    return made


def same(got: dict[str, Answer], want: dict[str, Answer]) -> bool:
    return all(
        (got[name].token_ids, got[name].logprobs) == (answer.token_ids, answer.logprobs)
        for name, answer in want.items()
    )


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_two_pools_leave_no_file_open(
    random_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int]
) -> None:
    ranks_are_threads(monkeypatch)
    given: dict[str, Any] = {"model": str(random_models["qwen3"]), "num_kv_blocks": 100, "max_model_len": 256}

    def hand_over() -> int:
        others = set(threading.enumerate())
        pools = TwoPools(tmp_path, decode={"tensor_parallel_size": ranks[1]}, tensor_parallel_size=ranks[0], **given)
        pools.run(requests()[:1])
        pools.close()
        del pools
        for thread in set(threading.enumerate()) - others:  # a lender's end by themselves, soon after it was closed
            thread.join(timeout=30)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    hand_over()  # what is opened once for the whole process
    before = hand_over()
    assert hand_over() <= before


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_tokens_and_logprobs_are_those_of_one_engine(
    random_models: dict[str, Path], tmp_path: Path, family: str, knobs: str
) -> None:
    given = {"model": str(random_models[family]), "threads": 1, "num_kv_blocks": 900, "max_model_len": 256}
    given |= KNOBS[knobs]
    want = alone(EngineConfig.from_keywords(**given), requests())
    pools = TwoPools(tmp_path, **given)
    try:
        for _ in range(2):  # the second time both have cached prefixes
            assert same(pools.run(requests()), want)
        for worker in (pools.prefill, pools.decode):
            assert replay([from_json(to_json(event)) for event in worker.events]) is None
        ends = [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
        handed_over = {event.request_id for event in ends if not event.problem}
        assert {"r2", "r3", "r4"} <= handed_over, ends
    finally:
        pools.close()


OTHER_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("mistral", {}),
    "windows, budget 30": ("mistral", {"max_num_batched_tokens": 30}),
    "budget 30": ("qwen3", {"max_num_batched_tokens": 30}),
    "int8 KV": ("mistral", {"kv_cache_dtype": "int8"}),
    "int4 KV": ("qwen3", {"kv_cache_dtype": "int4"}),
    "bf16 KV": ("qwen2", {"kv_cache_dtype": "bf16"}),
    "reference kernels": ("mistral", {"kernels": "reference"}),
}


@pytest.mark.parametrize("knobs", OTHER_SIZES, ids=str)
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (4, 64), (64, 1)], ids=str)
def test_pools_of_other_block_sizes(
    random_models: dict[str, Path], tmp_path: Path, sizes: tuple[int, int], knobs: str, transport: str
) -> None:
    """Chunks end anywhere in a block; a window that has moved on before the last whole block lends nothing."""
    family, more = OTHER_SIZES[knobs]
    given = {"model": str(random_models[family]), "threads": 1, "num_kv_blocks": 3000, "max_model_len": 256, **more}
    want = alone(EngineConfig.from_keywords(**given), requests())
    pools = TwoPools(tmp_path, transport=transport, decode={"block_size": sizes[1]}, block_size=sizes[0], **given)
    try:
        for _ in range(2):  # the second time both have cached prefixes
            assert same(pools.run(requests()), want)
        for worker in (pools.prefill, pools.decode):
            assert replay([from_json(to_json(event)) for event in worker.events]) is None
        ends = [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
        came = {event.request_id for event in ends if not event.problem}
        # one whole block of each KV group in both pools
        whole = math.lcm(*(worker.built.facts.prefix_tokens for worker in (pools.prefill, pools.decode)))
        expected = {name for name, num_tokens in (("r2", 77), ("r4", 70)) if num_tokens >= whole}
        assert expected <= came or knobs == "windows, budget 30", ends
        assert expected or knobs == "bf16 KV", "only blocks of windows and full layers together are so large"
    finally:
        pools.close()


OTHER_FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "int8 to f32 in larger blocks": ("mistral", {"kv_cache_dtype": "int8"}, {"block_size": 32}),
    "f32 to int8 in smaller blocks": ("qwen3", {"block_size": 32}, {"kv_cache_dtype": "int8", "block_size": 8}),
    "bfloat16 to float32": ("qwen2", {"dtype": "bfloat16"}, {}),
    "torch's order to ours": ("qwen3", {"kernels": "reference", "kv_cache_dtype": "int4"}, {"kv_cache_dtype": "int4"}),
    "int8 weights": ("qwen2", {"quantization": "int8"}, {}),
    "f32 of one rank to int8 of two": ("qwen3", {}, {"kv_cache_dtype": "int8", "tensor_parallel_size": 2}),
    "int4 to f32, with biases of keys": ("qwen2", {"kv_cache_dtype": "int4"}, {}),
    "int8 of four ranks to f32 of one": (
        "gemma4",
        {"kv_cache_dtype": "int8", "tensor_parallel_size": 4},
        {"block_size": 4},
    ),
}
ALIKE: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "block_size": 16,
    "kv_cache_dtype": "auto",
    "dtype": "auto",
    "kernels": "auto",
    "quantization": None,
}


@pytest.mark.parametrize("knobs", OTHER_FORMATS, ids=str)
def test_pools_of_other_formats(
    random_models: dict[str, Path], tmp_path: Path, knobs: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every transport converts KV to the same bits. The KV is that of the prompt, so answers stay near."""
    ranks_are_threads(monkeypatch)
    family, prefill, decode = OTHER_FORMATS[knobs]
    given = {"model": str(random_models[family]), "threads": 1, "num_kv_blocks": 3000, "max_model_len": 256}
    asked = requests()[:4]  # the last one begins like another, and may or may not find its KV in the cache
    near = alone(EngineConfig.from_keywords(**given, **decode), asked)

    def handed_over(way: str) -> tuple[dict[str, Answer], list[KVImportEnded]]:
        sides = {**given, **ALIKE, **prefill}
        pools = TwoPools(tmp_path, transport=way, allows_drift=True, decode={**ALIKE, **decode}, **sides)
        try:
            answers = pools.run(asked)
            for worker in (pools.prefill, pools.decode):
                assert replay([from_json(to_json(event)) for event in worker.events]) is None
            return answers, [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
        finally:
            pools.close()

    answers, ends = handed_over(transport)
    if transport != "inproc":
        assert same(answers, handed_over("inproc")[0])
    assert {"r2", "r3"} <= {event.request_id for event in ends if not event.problem}, ends
    assert all(event.drift for event in ends if not event.problem)
    for name in ("r2", "r3"):
        got, want = answers[name], near[name]
        num_same = next((i for i in range(9) if got.token_ids[i] != want.token_ids[i]), 9)
        assert num_same >= 1, "the first token is the prefill worker's"
        # the second token reads converted KV: of two equally likely tokens the other may be chosen
        compared = slice(num_same + 1)
        for of_got, of_want in zip(got.logprobs[compared], want.logprobs[compared], strict=True):
            assert of_got.logprobs[0] == pytest.approx(of_want.logprobs[0], abs=0.5 if "int4" in knobs else 0.25)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2), (2, 4)], ids=str)
def test_engines_of_several_ranks(
    random_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[int, int],
    family: str,
    transport: str,
) -> None:
    """Each with its heads, and blocks of two sizes on top; a chunk at a time, layer by layer. Mistral has one KV
    head, so that two ranks have the same."""
    ranks_are_threads(monkeypatch)
    given = {"model": str(random_models[family]), "threads": 1, "num_kv_blocks": 900, "max_model_len": 256}
    given |= {"max_num_batched_tokens": 30, "kv_cache_dtype": "int8" if family == "qwen2" else "auto"}
    want = alone(EngineConfig.from_keywords(**given), requests())
    for block_size in (16, 32):
        decode = {"tensor_parallel_size": ranks[1], "block_size": block_size}
        pools = TwoPools(tmp_path, transport=transport, decode=decode, tensor_parallel_size=ranks[0], **given)
        try:
            for _ in range(2):
                assert same(pools.run(requests()), want)
            ends = [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
            # blocks of both kinds end at 64 there, where the window of r2's last chunk has moved on
            moved_on = {"r2"} if (family, block_size) == ("qwen2", 32) else set[str]()
            assert {"r2", "r4"} - moved_on <= {event.request_id for event in ends if not event.problem}, ends
        finally:
            pools.close()


def test_of_other_blocks_only_what_is_missing_is_read(random_models: dict[str, Path], tmp_path: Path) -> None:
    """Read from shared memory: K and V of every token in full blocks of both sides, by the formula."""
    given = {"model": str(random_models["qwen3"]), "max_model_len": 256}
    pools = TwoPools(tmp_path, decode={"block_size": 32}, block_size=8, **given)
    try:
        pools.run([sequence("r", list(range(100)), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))])
        (end,) = [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
        assert end.num_bytes == 96 * pools.decode.built.facts.kv_bytes_per_token
    finally:
        pools.close()


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "medusa", "early_exit"])
def test_drafts_behind_a_handed_over_prompt(tmp_path: Path, method: str) -> None:
    """The decode worker drafts, and its drafter has not read the prompt that was handed over."""
    given = {"model": "embedded", "threads": 1, "num_kv_blocks": 900, "max_model_len": 256}
    asked = [
        sequence(f"{text}{i}", [ord(c) % 200 for c in text * 12], params, seed=i)
        for text in ("return x", "a, b = ")
        for i, params in enumerate(
            SamplingParams(max_tokens=24, temperature=t, logprobs=2, ignore_eos=True) for t in (0.0, 0.8)
        )
    ]
    want = alone(EngineConfig.from_keywords(**given), asked)
    speculation = {"method": method, "num_speculative_tokens": 3}
    pools = TwoPools(tmp_path, decode={"speculative_config": speculation}, **given)
    try:
        assert same(pools.run(asked), want)
        assert any(isinstance(event, KVImportEnded) and not event.problem for event in pools.decode.events)
        accepted = [
            commit.num_tokens - 1
            for event in pools.decode.events
            if isinstance(event, StepCommitted)
            for commit in event.commits
        ]
        assert sum(accepted) > 0, "no draft stood"
    finally:
        pools.close()


def test_the_bytes_that_travel_are_those_of_the_formula(random_models: dict[str, Path], tmp_path: Path) -> None:
    """K and V of every full block, in every layer; of those with a window what the next token sees."""
    given = {"model": str(random_models["mistral"]), "num_kv_blocks": 400, "max_model_len": 256}
    pools = TwoPools(tmp_path, **given)
    try:
        pools.run([sequence("r", list(range(100)), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))])
        (end,) = [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
        head_dim, num_layers, num_kv_heads = 16, 3, 1
        blocks_seen = 6 - (6 * 16 - 24 + 1) // 16  # of 6 full blocks, those that a window of 24 tokens touches
        assert end.num_bytes == blocks_seen * 16 * num_layers * 2 * num_kv_heads * head_dim * 4
    finally:
        pools.close()


@pytest.mark.parametrize(
    ("there", "what"),
    [
        ({"kv_cache_dtype": "int8"}, "numerics differ: kv_cache_dtype is f32 here and int8 there"),
        ({"kernels": "reference"}, "differ"),
        (
            {"quantization": "int8"},
            "numerics differ: activation_quantization is none here and int8 there, quantization",
        ),
        ({"model": "other"}, "models differ"),
    ],
)
def test_pools_that_do_not_agree_hand_nothing_over_and_answer_all_the_same(
    random_models: dict[str, Path], tmp_path: Path, there: dict[str, Any], what: str
) -> None:
    if "model" in there:
        there = {"model": str(random_models["llama"])}
    given = {"model": str(random_models["qwen3"]), "num_kv_blocks": 400, "max_model_len": 256}
    asked = requests()[2:3]
    pools = TwoPools(tmp_path, decode=there, **given)
    try:
        answers = pools.run(asked)
        assert len(answers["r2"].token_ids) == 9
        (end,) = [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
        assert what in end.problem
        assert " here and " in end.problem, "both sides are named"
        assert end.num_bytes == 0
    finally:
        pools.close()
