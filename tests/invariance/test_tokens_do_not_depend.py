"""A request always gives the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from model_folders import SHAPES, write_random_model
from twostroke import LLM, RequestOutput, SamplingParams
from twostroke.errors import DoesNotFit
from twostroke.events import KVBlockChecked
from twostroke.kv_check import Verdict

MODELS = [*SHAPES, "embedded"]


def ngram(num_drafts: int) -> dict[str, Any]:
    """N-gram drafts after very short matches, so that many are rejected."""
    return {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 1}


def early_exit(num_drafts: int) -> dict[str, Any]:
    """Early exit of random layers, whose drafts are almost never accepted."""
    return {"method": "early_exit", "num_speculative_tokens": num_drafts, "exit_layer": 1}


KNOBS: dict[str, dict[str, Any]] = {
    "budget 7": {"max_num_batched_tokens": 7},
    "budget 64": {"max_num_batched_tokens": 64},
    "one at a time": {"max_num_seqs": 1},
    "three at a time": {"max_num_seqs": 3},
    "block size 1": {"block_size": 1},
    "block size 8": {"block_size": 8},
    "block size 128": {"block_size": 128},
    "no prefix cache": {"enable_prefix_caching": False},
    "static batching": {"batching": "static", "max_num_seqs": 5},
    "prefill first": {"mixing": "prefill_first"},
    "unchunked": {"enable_chunked_prefill": False, "max_num_batched_tokens": 32},
    "contiguous": {"kv_reservation": "contiguous", "enable_prefix_caching": False},
    "priority": {"policy": "priority"},
    "every hit is checked": {"kv_check_rate": 1.0, "max_num_seqs": 3},
    "n-gram, 1 draft": {"speculative_config": ngram(1)},
    "n-gram, 8 drafts": {"speculative_config": ngram(8)},
    "n-gram, 3 drafts, small blocks and budget": {
        "speculative_config": ngram(3),
        "block_size": 8,
        "max_num_batched_tokens": 9,
    },
    "n-gram, no prefix cache": {"speculative_config": ngram(4), "enable_prefix_caching": False, "max_num_seqs": 3},
    "early exit, 1 draft": {"speculative_config": early_exit(1)},
    "early exit, 8 drafts": {"speculative_config": early_exit(8)},
    "early exit, small blocks and budget": {
        "speculative_config": early_exit(3),
        "block_size": 8,
        "max_num_batched_tokens": 9,
    },
    "early exit, contiguous": {
        "speculative_config": early_exit(4),
        "kv_reservation": "contiguous",
        "enable_prefix_caching": False,
    },
    "n-gram, contiguous": {
        "speculative_config": ngram(4),
        "kv_reservation": "contiguous",
        "enable_prefix_caching": False,
    },
}


@cache
def requests() -> tuple[tuple[tuple[int, ...], ...], tuple[SamplingParams, ...]]:
    """Prompts of many lengths, some with a common beginning; greedy and sampled, with and without filters."""
    rng = random.Random(7)
    common = tuple(rng.randrange(256) for _ in range(70))
    prompts = [tuple(rng.randrange(256) for _ in range(n)) for n in (1, 2, 17, 33, 64, 129, 200)]
    prompts += [common + tuple(rng.randrange(256) for _ in range(n)) for n in (1, 5, 40)]
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2},
        {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2, "seed": 3},
        {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.2},
    ]
    params = [
        SamplingParams(max_tokens=12 + 5 * (i % 4), ignore_eos=True, logprobs=2, **choices[i % len(choices)])
        for i in range(len(prompts))
    ]
    return tuple(prompts), tuple(params)


def folder(model: str, random_models: dict[str, Path]) -> str:
    return str(random_models.get(model, model))


def generate(
    model: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **config: Any
) -> list[RequestOutput]:
    if "num_kv_blocks" not in config:
        config["kv_cache_memory"] = 1 << 26
    with LLM(model, **{"threads": 1, **config}) as llm:
        return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], list(params))


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Return everything that has to be equal: ids, text, log-probabilities to the last bit."""
    return [
        [
            (c.token_ids, c.text, c.finish_reason, [[(t, p.logprob) for t, p in at.items()] for at in c.logprobs or []])
            for c in output.outputs
        ]
        for output in outputs
    ]


class Expected(dict[str, list[Any]]):
    """Answers of each model, with the settings that it was made with; computed on first use."""

    def __init__(self, random_models: dict[str, Path], **settings: Any) -> None:
        super().__init__()
        self._random_models, self._settings = random_models, settings

    def __missing__(self, model: str) -> list[Any]:
        self[model] = essence(generate(folder(model, self._random_models), *requests(), **self._settings))
        return self[model]


@pytest.fixture(scope="module")
def expected(random_models: dict[str, Path]) -> dict[str, list[Any]]:
    return Expected(random_models)


@pytest.fixture(scope="module")
def expected_of_int8_kv(random_models: dict[str, Path]) -> dict[str, list[Any]]:
    return Expected(random_models, **DRAFT_KNOBS["int8 KV"])


@pytest.fixture(scope="module")
def expected_of_int4_kv(random_models: dict[str, Path]) -> dict[str, list[Any]]:
    return Expected(random_models, kv_cache_dtype="int4")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("knob", KNOBS)
def test_knob(knob: str, model: str, random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    prompts, params = requests()
    assert essence(generate(folder(model, random_models), prompts, params, **KNOBS[knob])) == expected[model]


DRAFT_KNOBS: dict[str, dict[str, Any]] = {
    "3 drafts": {},
    "1 draft, small blocks and budget": {"block_size": 8, "max_num_batched_tokens": 9},
    "contiguous": {"kv_reservation": "contiguous", "enable_prefix_caching": False},
    "int8 KV": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("draft", ["itself", "qwen3"])
@pytest.mark.parametrize("knob", DRAFT_KNOBS)
def test_draft_model(
    knob: str,
    draft: str,
    model: str,
    random_models: dict[str, Path],
    expected: dict[str, list[Any]],
    expected_of_int8_kv: dict[str, list[Any]],
) -> None:
    """Draft models that are mostly right or mostly wrong; with windows, one that sees less than its target."""
    if model == "embedded":
        draft = "itself"
    prompts, params = requests()
    drafter = folder(model if draft == "itself" else draft, random_models)
    speculation = {
        "method": "draft_model",
        "model": drafter,
        "num_speculative_tokens": 1 if knob.startswith("1") else 3,
    }
    outputs = generate(
        folder(model, random_models), prompts, params, speculative_config=speculation, **DRAFT_KNOBS[knob]
    )
    assert essence(outputs) == (expected_of_int8_kv if knob == "int8 KV" else expected)[model]


@pytest.mark.parametrize("method", ["medusa", "medusa tree", "eagle", "draft_model", "early_exit"])
@pytest.mark.parametrize("knob", DRAFT_KNOBS)
def test_companions_of_the_embedded_model(
    knob: str, method: str, expected: dict[str, list[Any]], expected_of_int8_kv: dict[str, list[Any]]
) -> None:
    prompts, params = requests()
    speculation = {"method": method, "num_speculative_tokens": "auto" if knob == "3 drafts" else 3}
    if method == "medusa tree":
        speculation = {"method": "medusa", "num_speculative_tokens": 12}
    outputs = generate("embedded", prompts, params, speculative_config=speculation, **DRAFT_KNOBS[knob])
    assert essence(outputs) == (expected_of_int8_kv if knob == "int8 KV" else expected)["embedded"]


@pytest.mark.parametrize("method", ["medusa", "eagle", "draft_model"])
def test_companions_with_cached_prefixes_preemptions_and_in_any_company(
    method: str, expected: dict[str, list[Any]]
) -> None:
    prompts, params = requests()
    order = random.Random(9).sample(range(len(prompts)), len(prompts))
    config: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 256, "max_num_batched_tokens": 48}
    speculation = {"method": method, "num_speculative_tokens": 4}
    with LLM("embedded", threads=1, speculative_config=speculation, **config) as llm:
        items = [{"prompt_token_ids": list(p)} for p in prompts]
        first = llm.generate(items, list(params))
        assert sum(o.metrics.num_preemptions for o in first if o.metrics) > 0, "the pool was not small enough to matter"
        shuffled = llm.generate([items[i] for i in order], [params[i] for i in order])
    assert essence(first) == expected["embedded"]
    assert essence(shuffled) == [expected["embedded"][i] for i in order]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["ngram", "early_exit", "draft_model"])
def test_drafts_with_cached_prefixes_and_in_any_company(
    method: str, model: str, random_models: dict[str, Path], expected: dict[str, list[Any]]
) -> None:
    """Three times the same requests to one engine: computed, found in the cache, and in another order."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        speculation["model"] = folder(model, random_models)
    elif method == "early_exit":
        speculation["exit_layer"] = 1
    prompts, params = requests()
    order = random.Random(8).sample(range(len(prompts)), len(prompts))
    config: dict[str, Any] = {"kv_cache_memory": 1 << 26, "threads": 1, "speculative_config": speculation}
    with LLM(folder(model, random_models), **config) as llm:
        items = [{"prompt_token_ids": list(p)} for p in prompts]
        for _ in range(2):
            assert essence(llm.generate(items, list(params))) == expected[model]
        shuffled = llm.generate([items[i] for i in order], [params[i] for i in order])
    assert essence(shuffled) == [expected[model][i] for i in order]


@pytest.mark.parametrize("model", MODELS)
def test_one_token_at_a_time(model: str, random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    prompts, params = requests()
    outputs = generate(folder(model, random_models), prompts[:5], params[:5], max_num_batched_tokens=1)
    assert essence(outputs) == expected[model][:5]


SMALL_POOL = {
    "mistral": 6,
    "ministral": 20,
    "qwen2": 20,
    "olmo3": 24,
    "exaone4": 24,
    "gemma2": 20,
    "gemma3": 24,
    "cohere2": 24,
    "gpt_oss": 14,
}
"""Blocks for one longest request and little more: windows give blocks back, and each group of layers has a table."""


@pytest.mark.parametrize("model", MODELS)
def test_small_pool_preempts(model: str, random_models: dict[str, Path]) -> None:
    """Short prompts that grow: all are admitted, not all can stay."""
    prompts = [tuple(range(i, i + 9 + i)) for i in range(8)]
    params = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True, logprobs=1) for i in range(8)]
    sizes = {"max_model_len": 80, "max_num_batched_tokens": 48}
    roomy = generate(folder(model, random_models), prompts, params, **sizes)
    assert sum(o.metrics.num_preemptions for o in roomy if o.metrics) == 0
    itself = {"method": "draft_model", "model": folder(model, random_models), "num_speculative_tokens": 4}
    for speculation in (None, ngram(4), early_exit(4), itself):
        small = {"num_kv_blocks": SMALL_POOL.get(model, 9), "speculative_config": speculation}
        tight = generate(folder(model, random_models), prompts, params, **small, **sizes)
        assert sum(o.metrics.num_preemptions for o in tight if o.metrics) > 0, "the pool was not small enough to matter"
        assert essence(tight) == essence(roomy)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("changed", [1, 40, 89])
def test_a_changed_token_changes_no_logit_before_it(changed: int, model: str, random_models: dict[str, Path]) -> None:
    """Log-probabilities of the prompt to the bit: those before the token, and those that it is chosen from."""
    prompt = [(7 * i) % 200 + 20 for i in range(90)]
    other = [*prompt[:changed], prompt[changed] + 1, *prompt[changed + 1 :]]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
    config = {"kv_cache_memory": 1 << 26, "threads": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 64}
    with LLM(folder(model, random_models), **config) as llm:
        one, two = (llm.generate([{"prompt_token_ids": ids}], params)[0].prompt_logprobs for ids in (prompt, other))
    assert one is not None
    assert two is not None
    assert one[:changed] == two[:changed]

    def best(entry: Any) -> list[tuple[int, float]]:
        return sorted((token, found.logprob) for token, found in entry.items() if found.rank <= 5)

    assert best(one[changed]) == best(two[changed])
    assert changed == 89 or one[changed + 1 :] != two[changed + 1 :]


@pytest.mark.parametrize("model", MODELS)
def test_arrival_order(model: str, random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    prompts, params = requests()
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    shuffled = generate(folder(model, random_models), [prompts[i] for i in order], [params[i] for i in order])
    assert essence(shuffled) == [expected[model][i] for i in order]


@pytest.mark.parametrize("model", MODELS)
def test_alone_and_in_a_crowd_of_64(model: str, random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    prompts, params = requests()
    rng = random.Random(2)
    crowd = [tuple(rng.randrange(256) for _ in range(rng.randrange(1, 90))) for _ in range(64 - len(prompts))]
    crowd_params = [SamplingParams(max_tokens=rng.randrange(1, 40), seed=i, ignore_eos=True) for i in range(len(crowd))]
    together = generate(folder(model, random_models), [*prompts, *crowd], [*params, *crowd_params])
    assert essence(together[: len(prompts)]) == expected[model]
    for i in (0, 3, 6, 9):
        assert essence(generate(folder(model, random_models), [prompts[i]], [params[i]])) == [expected[model][i]]


@pytest.mark.parametrize("model", MODELS)
def test_two_threads(model: str, random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    prompts, params = (of_requests[3:8] for of_requests in requests())
    params = [dataclasses.replace(p, max_tokens=5) for p in params]
    one, two = (generate(folder(model, random_models), prompts, params, threads=threads) for threads in (1, 2))
    assert essence(one) == essence(two)


@pytest.mark.parametrize("model", MODELS)
def test_prefix_cache_hit(model: str, random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    prompts, params = requests()
    with LLM(folder(model, random_models), kv_cache_memory=1 << 26, threads=1) as llm:
        items = [{"prompt_token_ids": list(p)} for p in prompts]
        first, second = llm.generate(items, list(params)), llm.generate(items, list(params))
    assert sum(o.num_cached_tokens for o in second) > sum(o.num_cached_tokens for o in first)
    assert essence(first) == essence(second) == expected[model]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("model", MODELS)
def test_checks_of_cached_blocks_change_nothing_and_find_nothing(
    model: str,
    kv_cache_dtype: str,
    random_models: dict[str, Path],
    expected: dict[str, list[Any]],
    expected_of_int8_kv: dict[str, list[Any]],
    expected_of_int4_kv: dict[str, list[Any]],
) -> None:
    """In chunks, in any batch, after preemptions: a block is what its tokens give by themselves, to the last bit."""
    prompts, params = requests()
    # of three or four KV groups a prefix needs more blocks
    num_blocks = 240 if model in ("olmo3", "exaone4", "gemma2", "gemma3", "cohere2") else 120
    settings = {
        "kv_cache_dtype": kv_cache_dtype,
        "threads": 1,
        "max_num_batched_tokens": 48,
        "num_kv_blocks": num_blocks,
    }
    items = [{"prompt_token_ids": list(p)} for p in prompts]
    with LLM(folder(model, random_models), max_model_len=256, kv_check_rate=1.0, **settings) as llm:
        found = [essence(llm.generate(items, list(params))) for _ in range(3)]
        events = llm.engine.engine.recent_events
        verdicts = [event.verdict for event in events if isinstance(event, KVBlockChecked)]
    unchecked = {"auto": expected, "int8": expected_of_int8_kv, "int4": expected_of_int4_kv}[kv_cache_dtype]
    assert found == [unchecked[model]] * 3
    assert set(verdicts) == {Verdict.EXACT}
    assert len(verdicts) >= len(prompts)


def some_of(kernels: str) -> slice:
    """Requests that are run again and again: torch's operators, which are slow, get every second one, long ones and
    short ones, two of which begin alike; all were in the batch that these are compared with."""
    return slice(1, None, 2) if kernels == "reference" else slice(None)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("model", ["qwen3", "embedded"])
def test_quantized_weights(model: str, quantization: str, kernels: str, random_models: dict[str, Path]) -> None:
    prompts, params = requests()
    settings = {"quantization": quantization, "kernels": kernels}
    whole = essence(generate(folder(model, random_models), prompts, params, **settings))
    some = some_of(kernels)
    for changed in ({"max_num_batched_tokens": 7}, {"block_size": 8, "max_num_seqs": 3}, {"threads": 2}):
        if kernels == "reference" and "threads" in changed:
            continue  # torch on two threads waits for a busy machine; test_two_threads covers it
        found = generate(folder(model, random_models), prompts[some], params[some], **settings, **changed)
        assert essence(found) == whole[some]
    order = random.Random(4).sample(range(len(prompts)), len(prompts))
    shuffled = generate(
        folder(model, random_models), [prompts[i] for i in order], [params[i] for i in order], **settings
    )
    assert essence(shuffled) == [whole[i] for i in order]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "f32", "int8", "int4"])
@pytest.mark.parametrize("model", ["mistral", "qwen3", "embedded"])
def test_kv_formats(model: str, kv_cache_dtype: str, kernels: str, random_models: dict[str, Path]) -> None:
    """Alone and together, in chunks of any size, found in the prefix cache, after a preemption, on two threads."""
    prompts, params = requests()
    params = [dataclasses.replace(p, max_tokens=8) for p in params]
    name, settings = folder(model, random_models), {"kv_cache_dtype": kv_cache_dtype, "kernels": kernels}
    whole = essence(generate(name, prompts, params, **settings))
    changes: list[dict[str, Any]] = [{"max_num_batched_tokens": 7}, {"block_size": 1, "max_num_seqs": 3}]
    changes += [{"block_size": 32, "enable_prefix_caching": False, "max_num_batched_tokens": 48}]
    if kernels == "auto":  # torch on two threads waits for a busy machine; test_two_threads covers it
        changes += [{"threads": 2}]
    some = some_of(kernels)
    for changed in changes:
        assert essence(generate(name, prompts[some], params[some], **settings, **changed)) == whole[some]
    for i in (1, 6):
        assert essence(generate(name, [prompts[i]], [params[i]], **settings)) == [whole[i]]
    with LLM(name, kv_cache_memory=1 << 26, threads=1, **settings) as llm:
        items = [{"prompt_token_ids": list(p)} for p in prompts[some]]
        first, second = llm.generate(items, params[some]), llm.generate(items, params[some])
    assert sum(o.num_cached_tokens for o in second) > sum(o.num_cached_tokens for o in first)
    assert essence(first) == essence(second) == whole[some]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8", "int4"])
def test_kv_formats_after_preemption(kv_cache_dtype: str, kernels: str, random_models: dict[str, Path]) -> None:
    prompts = [tuple(range(i, i + 9 + i)) for i in range(8)]
    params = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True, logprobs=1) for i in range(8)]
    settings = {"kv_cache_dtype": kv_cache_dtype, "kernels": kernels, "max_model_len": 80}
    name = folder("llama", random_models)
    roomy, tight = (generate(name, prompts, params, num_kv_blocks=n, **settings) for n in (64, 7))
    assert sum(o.metrics.num_preemptions for o in tight if o.metrics) > 0
    assert essence(tight) == essence(roomy)


def test_kv_formats_are_different_formats(random_models: dict[str, Path]) -> None:
    """Otherwise the tests above would compare one format with itself."""
    prompts, params = requests()
    name = folder("qwen3", random_models)
    found = [
        str(essence(generate(name, prompts[:4], params[:4], kv_cache_dtype=kind)))
        for kind in ("f32", "bf16", "int8", "int4")
    ]
    assert len(set(found)) == 4
    assert str(essence(generate(name, prompts[:4], params[:4], kv_cache_dtype="auto"))) == found[0]


def test_without_kv_cache(random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    prompts, params = requests()
    outputs = generate(
        folder("llama", random_models),
        prompts,
        params,
        enable_kv_cache=False,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    assert essence(outputs) == expected["llama"]


def test_resumed_request_goes_on_exactly(random_models: dict[str, Path], expected: dict[str, list[Any]]) -> None:
    """Generated tokens stay output tokens: penalties, min_tokens and the noise's positions count them."""
    from twostroke.batch import NewRequest
    from twostroke.engine.generation import GenerationRequest

    prompts, params = requests()
    with LLM(folder("llama", random_models), kv_cache_memory=1 << 26, threads=1) as llm:
        engine = llm.engine.engine
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            whole = expected["llama"][i][0][0]
            half = len(whole) // 2
            rest = dataclasses.replace(one, logprobs=None)
            new = NewRequest("resumed", prompt, rest, seed=one.seed or 0, output_token_ids=whole[:half])
            engine.add_request(GenerationRequest(new, 0.0, one.max_tokens or 0))
            tokens: list[int] = []
            while engine.has_work:
                for update in engine.step():
                    tokens += update.token_ids
            assert (*whole[:half], *tokens) == whole


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_a_stretched_context_beyond_the_original_one(rope_type: str, tmp_path: Path) -> None:
    """Four times 64 positions: the frequencies are those of the longest request, whatever is computed at once."""
    model = str(write_random_model(tmp_path, "llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    rope: dict[str, Any] = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}
    if rope_type == "yarn":
        rope["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "rope_parameters": rope}))
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (200, 90, 30)]
    params = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True, logprobs=1) for i in range(len(prompts))]
    first, *others = [essence(generate(model, prompts, params, max_num_batched_tokens=n)) for n in (7, 64, 512)]
    assert all(other == first for other in others)
    assert [len(output[0][0]) for output in first] == [40, 40, 40]
    with LLM(model, threads=1, max_model_len=256, num_kv_blocks=32) as llm:
        assert essence(llm.generate([{"prompt_token_ids": p} for p in prompts], params)) == first
    # a pool so small that the context is shortened to fit: less memory, not other tokens
    small = essence(generate(model, prompts[2:], params[2:], num_kv_blocks=6))
    assert small == first[2:]
    with pytest.raises(DoesNotFit, match="context of 256 tokens"):
        LLM(model, threads=1, max_model_len=257, num_kv_blocks=32)
