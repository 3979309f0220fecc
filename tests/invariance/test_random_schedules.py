"""A fuzzer of schedules: whatever the engine is told to do with a request, it gives the bits of the request run alone.

`make soak` runs 1,000 schedules for each format of weights and KV, for each type of a GGUF file's blocks, and for each
kind of router, with drafts and branches of them. The second tier runs the first 12 of a format or a router, and 4 of a
type.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from gguf_files import of_type
from knowing_drafter import KNOWING, count_branches, knowing_drafts
from model_folders import write_random_model
from tiers import EXAMPLES, examples
from twostroke import LLM, RequestOutput, SamplingParams
from twostroke.client.output_processor import OutputKind
from twostroke.model.gguf.blocks import REPACKED

SLOW_TO_START = "int8 on torch's operators"
"""torch's operators prove themselves at every start, so only the long and the large schedules are theirs."""
WEIGHT_FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4 beside float32": {"quantization": "int4"},
    "int4, activations as they are": {"dtype": "bfloat16", "quantization": "int4", "activation_quantization": "none"},
    SLOW_TO_START: {"dtype": "bfloat16", "quantization": "int8", "kernels": "reference"},
}
KV_FORMATS: dict[str, dict[str, Any]] = {name: {"kv_cache_dtype": name} for name in ("f32", "int8", "int4")}
"""Of a bfloat16 model."""
BOTH = {"int4, kv int8": {**WEIGHT_FORMATS["int4"], **KV_FORMATS["int8"]}}
FORMATS = {**WEIGHT_FORMATS, **{f"kv {name}": {"dtype": "bfloat16", **kv} for name, kv in KV_FORMATS.items()}, **BOTH}
BLOCK_TYPES = [name for name, layout in REPACKED.items() if layout.is_exact]
"""Types of GGUF blocks that the kernels multiply in the file's own bits."""
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {},  # a softmax, renormalized
    "qwen2_moe": {"norm_topk_prob": False},  # a softmax as it is, and a shared expert with a gate
    "glm4_moe": {},  # a sigmoid, with a correction and groups
}
"""A family for each kind of router, and what its config says beside the usual."""
DRAFTS: list[dict[str, Any]] = [
    {},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}},
    {"speculative_config": KNOWING},
    {"speculative_config": {"method": "early_exit", "num_speculative_tokens": 3, "exit_layer": 1}},
    {"speculative_config": KNOWING},
]
"""No drafts, chains that mostly fall, and branches. Five take turns with the twelve kinds of schedules."""

LONGEST_PROMPT, MOST_TOKENS = 72, 32
MAX_MODEL_LEN = LONGEST_PROMPT + MOST_TOKENS
LONG_PROMPTS, LONG_MODEL_LEN = (520, 600), 640
"""More than a partition of attention's keys (512), so that threads may share one request."""
NUM_SHORT, MOST_AT_ONCE = 64, 64


@dataclass(frozen=True)
class FuzzRequest:
    prompt: tuple[int, ...]
    params: SamplingParams


def requests() -> list[FuzzRequest]:
    """Some begin alike, so that the prefix cache finds something; greedy and sampled, some with prompt scores."""
    rng = random.Random(11)
    stems = [tuple(rng.randrange(256) for _ in range(n)) for n in (0, 0, 20, 48)]
    made: list[FuzzRequest] = []
    for i in range(NUM_SHORT + len(LONG_PROMPTS)):
        stem = stems[i % 4]
        num_own = rng.randrange(1, 24) if i < NUM_SHORT else LONG_PROMPTS[i - NUM_SHORT] - len(stem)
        own = tuple(rng.randrange(256) for _ in range(num_own))
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


def engine_settings(rng: random.Random, max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    block_size = rng.choice((1, 2, 4, 8, 16, 32, 64, 128))
    blocks_of_longest = -(-max_model_len // block_size)
    chosen = {
        "max_num_seqs": max_num_seqs,
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
    if chosen["enable_prefix_caching"] and rng.random() < 0.5:
        chosen["kv_offloading_size"] = rng.choice((1 << 19, 1 << 23))
    return {**chosen, "max_model_len": max_model_len}


def run_schedule(
    model: str, seed: int, given: list[FuzzRequest], expected: list[str], format_settings: Mapping[str, Any]
) -> tuple[int, int]:
    """Runs one; returns how many preemptions and cached tokens it had.

    Most are small and short of memory; every twelfth has many requests at once, every twelfth long ones among others.
    """
    rng = random.Random(seed)
    is_long, is_large = seed % 12 == 5, seed % 12 == 11
    num_requests, max_num_seqs = (rng.randrange(1, 11) for _ in range(2))
    if is_large:
        num_requests = max_num_seqs = MOST_AT_ONCE
    max_model_len = LONG_MODEL_LEN if is_long else MAX_MODEL_LEN
    config = {**engine_settings(rng, max_num_seqs, max_model_len), **format_settings}
    arrivals = rng.sample(range(NUM_SHORT), num_requests) + list(range(NUM_SHORT, len(given))) * is_long
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


def outputs_alone(model: str, given: list[FuzzRequest], format_settings: Mapping[str, Any]) -> list[RequestOutput]:
    """Runs one request after the other."""
    alone = {"enable_prefix_caching": False, "threads": 1, "max_model_len": LONG_MODEL_LEN, "num_kv_blocks": 40}
    with LLM(model, **alone, **format_settings) as llm:
        return [llm.generate([{"prompt_token_ids": list(one.prompt)}], one.params)[0] for one in given]


def run_schedules(
    model: str, seeds: range, format_settings: Mapping[str, Any], drafts: Sequence[Mapping[str, Any]] = ({},)
) -> None:
    """Runs a schedule for each seed, and holds each request against what it gave alone.

    Args:
        model: a folder or a file.
        seeds: of the schedules.
        format_settings: of all of them.
        drafts: settings that take turns.
    """
    given = requests()
    expected = [digest(output) for output in outputs_alone(model, given, format_settings)]
    assert len(set(expected)) == len(given)
    preemptions = cached = 0
    for seed in seeds:
        more = run_schedule(model, seed, given, expected, {**format_settings, **drafts[seed % len(drafts)]})
        preemptions, cached = preemptions + more[0], cached + more[1]
    if seeds.step > 1 or len(seeds) < 4:
        return  # few schedules, and perhaps not those that are short of memory
    assert preemptions > len(seeds) // 10, "the schedules were too easy: hardly anybody was preempted"
    assert cached > len(seeds), "the schedules were too easy: hardly anything was found in the prefix cache"


def num_schedules(usual: int) -> int:
    return 1000 if settings().max_examples > EXAMPLES else examples(usual)


@pytest.mark.parametrize("name", FORMATS)
def test_every_schedule_gives_the_bits_of_each_request_alone(name: str, random_models: dict[str, Path]) -> None:
    seeds = range(5, num_schedules(12), 6) if name == SLOW_TO_START else range(num_schedules(12))
    run_schedules(str(random_models["qwen3"]), seeds, FORMATS[name])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_schedules_of_a_file_of_blocks(name: str, tmp_path: Path) -> None:
    path = of_type(name, tmp_path / "x.gguf", {"llama.context_length": LONG_MODEL_LEN})
    run_schedules(str(path), range(num_schedules(4)), {})


@pytest.mark.parametrize("family", ROUTERS)
def test_schedules_with_experts_and_drafts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, usual = str(write_random_model(tmp_path, family, **ROUTERS[family])), {"dtype": "bfloat16"}
    given = requests()
    alone = [output.outputs[0].token_ids for output in outputs_alone(model, given, usual)]
    knowing_drafts(monkeypatch, [(*one.prompt, *tokens) for one, tokens in zip(given, alone, strict=True)])
    kept, num = count_branches(monkeypatch), num_schedules(12)
    run_schedules(model, range(num), usual, DRAFTS)
    assert len(kept) > num or num < len(DRAFTS), "hardly anybody went along a branch"
