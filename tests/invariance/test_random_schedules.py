"""A fuzzer of schedules: whatever the engine is told to do with a request, it gives the bits of the request run alone.

`make soak` runs 1,000 schedules for each format of weights and KV, `make test` the first 12 of them.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from twostroke import LLM, RequestOutput, SamplingParams
from twostroke.engine.output_processor import OutputKind

WEIGHT_FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4 of 64": {"quantization": "int4", "group_size": 64},
}
KV_FORMATS: dict[str, dict[str, Any]] = {name: {"kv_cache_dtype": name} for name in ("f32", "int8", "int4")}
"""Of a bfloat16 model."""
FORMATS = {**WEIGHT_FORMATS, **{f"kv {name}": {"dtype": "bfloat16", **kv} for name, kv in KV_FORMATS.items()}}

CI_EXAMPLES = settings.get_profile("ci").max_examples
LONGEST_PROMPT, MOST_TOKENS = 72, 32
MAX_MODEL_LEN = LONGEST_PROMPT + MOST_TOKENS


@dataclass(frozen=True)
class FuzzRequest:
    prompt: tuple[int, ...]
    params: SamplingParams


def requests() -> list[FuzzRequest]:
    """Some begin alike, so that the prefix cache finds something; greedy and sampled, some with prompt scores."""
    rng = random.Random(11)
    stems = [tuple(rng.randrange(256) for _ in range(n)) for n in (0, 0, 20, 48)]
    made: list[FuzzRequest] = []
    for i in range(24):
        stem = stems[i % 4]
        own = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 24)))
        params = SamplingParams(
            max_tokens=rng.randrange(1, MOST_TOKENS),
            temperature=rng.choice((0.0, 0.8, 1.2)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.1)),
            seed=i,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=0 if i % 5 == 4 else None,
        )
        made.append(FuzzRequest(stem + own, params))
    return made


def digest(output: RequestOutput) -> str:
    """Of every token and every bit of the log-probabilities."""
    completion = output.outputs[0]
    content = hashlib.sha256(struct.pack(f"<{len(completion.token_ids)}q", *completion.token_ids))
    for scores in (completion.logprobs or [], output.prompt_logprobs or []):
        for at in scores:
            for token, found in (at or {}).items():
                content.update(struct.pack("<qd", token, found.logprob))
    return content.hexdigest()


def engine_settings(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice((1, 2, 4, 8, 16, 32, 64, 128))
    blocks_of_longest = -(-MAX_MODEL_LEN // block_size)
    chosen = {
        "max_num_seqs": rng.randrange(1, 11),
        "max_num_batched_tokens": rng.choice((1, 2, 5, 16, 17, 48, 64, 200)),
        "block_size": block_size,
        "num_kv_blocks": rng.choice(
            (blocks_of_longest, blocks_of_longest, blocks_of_longest * 3 // 2, 12 * blocks_of_longest)
        ),
        "enable_prefix_caching": rng.random() < 0.6,
        "policy": rng.choice(("fcfs", "priority")),
        "mixing": rng.choice(("mixed", "prefill_first")),
        "threads": rng.choice((1, 1, 1, 2)),
    }
    return {**chosen, "max_model_len": MAX_MODEL_LEN}


def run_schedule(
    model: str, seed: int, given: list[FuzzRequest], expected: list[str], format_settings: Mapping[str, Any]
) -> tuple[int, int]:
    """Runs one; returns how many preemptions and cached tokens it had."""
    rng = random.Random(seed)
    config = {**engine_settings(rng), **format_settings}
    arrivals = rng.sample(range(len(given)), rng.randrange(1, 11))
    pause = rng.choice((0.0, 0.5, 0.9))
    outputs: dict[int, RequestOutput] = {}
    with LLM(model, **config) as llm:
        engine, index_of = llm.engine, dict[str, int]()
        while arrivals or engine.has_work:
            while arrivals and (not engine.has_work or rng.random() >= pause):
                index = arrivals.pop()
                rank = rng.randrange(-2, 3) if config["policy"] == "priority" else 0
                request, prompt = given[index], {"prompt_token_ids": list(given[index].prompt)}
                index_of[engine.submit(prompt, request.params, priority=rank, kind=OutputKind.FINAL)] = index
            for output in engine.step():
                if output.finished:
                    outputs[index_of[output.request_id]] = output
    assert len(outputs) == len(index_of)
    for index, output in outputs.items():
        assert digest(output) == expected[index], f"schedule {seed}, request {index}: {config}"
    preemptions = sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics)
    return preemptions, sum(output.num_cached_tokens for output in outputs.values())


@pytest.mark.parametrize("name", FORMATS)
def test_every_schedule_gives_the_bits_of_each_request_alone(name: str, random_models: dict[str, Path]) -> None:
    model, given = str(random_models["qwen3"]), requests()
    alone = {"enable_prefix_caching": False, "threads": 1, "max_model_len": MAX_MODEL_LEN, "num_kv_blocks": 7}
    with LLM(model, **alone, **FORMATS[name]) as llm:
        expected = [digest(llm.generate([{"prompt_token_ids": list(one.prompt)}], one.params)[0]) for one in given]
    assert len(set(expected)) == len(given)
    num_schedules = 1000 if settings().max_examples > CI_EXAMPLES else 12
    preemptions = cached = 0
    for seed in range(num_schedules):
        more = run_schedule(model, seed, given, expected, FORMATS[name])
        preemptions, cached = preemptions + more[0], cached + more[1]
    assert preemptions > num_schedules // 10, "the schedules were too easy: hardly anybody was preempted"
    assert cached > num_schedules, "the schedules were too easy: hardly anything was found in the prefix cache"
