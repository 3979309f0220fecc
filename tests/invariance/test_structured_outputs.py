"""A form changes nothing about invariance: alone, in a crowd, in chunks, preempted, decided ahead, same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twostroke import LLM, RequestOutput, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMS: tuple[Any, ...] = (
    {"json": SCHEMA},
    {"regex": "[a-f]{30,50}[0-9]+x"},
    None,
    {"choice": ["left and on", "right and on", "straight on"]},
    {"grammar": 'start: ("(" /[a-z]{1,5}/ ")"){8,16}'},
)
MODELS = ["llama", "mistral", "embedded"]
KNOBS: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 7},
    {"max_num_seqs": 1},
    {"max_num_seqs": 3, "block_size": 8},
    {"enable_prefix_caching": False},
    {"batching": "static", "max_num_seqs": 5},
)
PROMPTS = [tuple(range(i, i + 9 + i)) for i in range(12)]


def params() -> list[SamplingParams]:
    """Return every format, greedy and sampled, with other rules."""
    choices: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0, "logprobs": 1},
        {"top_p": 0.9, "ignore_eos": True},
        {"repetition_penalty": 1.3, "min_tokens": 4},
    ]
    return [
        SamplingParams(max_tokens=60, seed=i, structured_outputs=FORMS[i % len(FORMS)], **choices[i % len(choices)])
        for i in range(len(PROMPTS))
    ]


def generate(model: str, prompts: Sequence[tuple[int, ...]], given: list[SamplingParams], **config: Any) -> list[Any]:
    config = {"threads": 1, "max_model_len": 90} | config
    if "num_kv_blocks" not in config:
        config["kv_cache_memory"] = 1 << 26
    with LLM(model, **config) as llm:
        return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], given)


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in output.outputs] for output in outputs]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_of_what_must_not_matter_does(model: str, random_models: dict[str, Path]) -> None:
    name = str(random_models.get(model, model))
    expected = essence(generate(name, PROMPTS, params()))
    assert {"stop", "length"} >= {sequence[2] for output in expected for sequence in output}
    for knob in KNOBS:
        assert essence(generate(name, PROMPTS, params(), **knob)) == expected, knob
    order = random.Random(1).sample(range(len(PROMPTS)), len(PROMPTS))
    shuffled = generate(name, [PROMPTS[i] for i in order], [params()[i] for i in order])
    assert essence(shuffled) == [expected[i] for i in order]
    for i in (0, 1, 4, 6, 7):
        assert essence(generate(name, [PROMPTS[i]], [params()[i]])) == [expected[i]]


@pytest.mark.parametrize(("model", "num_blocks"), [("llama", 9), ("mistral", 6), ("embedded", 9)])
def test_a_preempted_form_goes_on(model: str, num_blocks: int, random_models: dict[str, Path]) -> None:
    name = str(random_models.get(model, model))
    settings = {"max_num_batched_tokens": 48}
    tight = generate(name, PROMPTS, params(), num_kv_blocks=num_blocks, **settings)
    of_forms = [o for o, p in zip(tight, params(), strict=True) if p.structured_outputs is not None]
    assert sum(o.metrics.num_preemptions for o in of_forms if o.metrics) > 0, "the pool was not small enough to matter"
    assert essence(tight) == essence(generate(name, PROMPTS, params(), **settings))


def test_a_form_and_its_neighbours_mind_their_own_business(random_models: dict[str, Path]) -> None:
    """Requests without a format give the same answers as without formatted requests beside them."""
    name = str(random_models["llama"])
    plain = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True, logprobs=1) for i in range(12)]
    mixed = [p if i % 2 else q for i, (p, q) in enumerate(zip(plain, params(), strict=True))]
    assert essence(generate(name, PROMPTS, mixed))[1::2] == essence(generate(name, PROMPTS, plain))[1::2]
