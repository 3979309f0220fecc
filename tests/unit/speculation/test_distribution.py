"""What comes out behind drafts has the target's own distribution: χ² over thousands of seeds, two tokens jointly.

The output is bit for bit that without drafts (tests/invariance), which alone would do; this asks the end of the pipe,
and knows nothing of how drafts are verified.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from scipy import stats

from oracle import naive_sampling as naive
from twostroke import LLM, SamplingParams

NUM_SEEDS = 20_000 if settings.default is not None and settings.default.max_examples > 1000 else 2_000
"""All in `make soak`, a tenth otherwise."""
ALPHA = 1e-4
PROMPT = tuple(range(40, 57))
"""A block and a token: all but that token is found in the prefix cache."""
NUM_TOKENS = 5
"""Few enough that every pair is seen often."""
OPTIONS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.6},
    "filters": {"temperature": 1.3, "top_k": 4, "top_p": 0.95},
    "penalties": {"temperature": 1.2, "presence_penalty": 0.8, "frequency_penalty": -0.5},
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1},
    "early_exit": {},
    "draft_model": {},
    "medusa": {},
    "eagle": {},
}


@cache
def likely_tokens() -> tuple[int, ...]:
    """Return the tokens that the model finds most likely after the prompt; others would hardly ever be drawn."""
    with engine() as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=NUM_TOKENS)
        entry = llm.generate([{"prompt_token_ids": list(PROMPT)}], params)[0].outputs[0].logprobs
    assert entry is not None
    return tuple(sorted(sorted(entry[0], key=lambda token: -entry[0][token].logprob)[:NUM_TOKENS]))


def engine(**config: Any) -> LLM:
    return LLM("embedded", threads=1, kv_cache_memory=1 << 26, max_model_len=64, max_num_seqs=128, **config)


@cache
def scores() -> dict[tuple[int, ...], np.ndarray]:
    """Log-probabilities of the likely tokens behind the prompt and up to two of them, as the model has them."""
    tokens = likely_tokens()
    texts = [tail for length in (1, 2, 3) for tail in itertools.product(tokens, repeat=length)]
    with engine() as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": [*PROMPT, *tail]} for tail in texts], params)
    found: dict[tuple[int, ...], np.ndarray] = {}
    for tail, output in zip(texts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        last = output.prompt_logprobs[-1]
        assert last is not None
        row = found.setdefault(tail[:-1], np.full(max(tokens) + 1, -1e9, np.float32))
        row[tail[-1]] = last[tail[-1]].logprob
    return found


@cache
def joint(option: str) -> np.ndarray:
    """Probability of each pair of second and third token."""
    params, tokens = params_of(option), likely_tokens()
    place = {token: i for i, token in enumerate(tokens)}

    def behind(output: tuple[int, ...]) -> np.ndarray:
        return naive.distribution(scores()[output], naive.NaiveRequest(params, PROMPT, output))

    found = np.zeros((NUM_TOKENS, NUM_TOKENS))
    for first, second, third in itertools.product(tokens, repeat=3):
        p = behind(())[first] * behind((first,))[second] * behind((first, second))[third]
        found[place[second], place[third]] += p
    return found


@cache
def drawn(method: str, option: str) -> np.ndarray:
    """Return how often each pair occurred, over all seeds."""
    tokens = likely_tokens()
    place = {token: i for i, token in enumerate(tokens)}
    speculation = {"method": method, "num_speculative_tokens": 2, **METHODS[method]}
    counts = np.zeros((NUM_TOKENS, NUM_TOKENS), np.int64)
    with engine(speculative_config=speculation) as llm:
        params = [params_of(option, seed) for seed in range(NUM_SEEDS)]
        for output in llm.generate([{"prompt_token_ids": list(PROMPT)}] * NUM_SEEDS, params):
            _, second, third = output.outputs[0].token_ids
            counts[place[second], place[third]] += 1
    return counts


def params_of(option: str, seed: int | None = None) -> SamplingParams:
    allowed = likely_tokens()
    return SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=allowed, seed=seed, **OPTIONS[option])


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """χ² goodness of fit; the least likely pairs share a bin until 5 are expected there."""
    assert not counts[probs == 0].any(), "pairs that cannot come have come"
    expected, observed = [0.0], [0]
    for cell in np.argsort(probs, axis=None):
        if expected[-1] >= 5:
            expected.append(0.0)
            observed.append(0)
        expected[-1] += probs.flat[cell] * counts.sum()
        observed[-1] += counts.flat[cell]
    assert len(expected) > 4, "too few pairs to compare"
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_pairs_of_tokens_have_the_targets_distribution(method: str, option: str) -> None:
    probs = joint(option)
    counts = drawn(method, option)
    assert p_value(counts, probs) > ALPHA / (len(OPTIONS) * len(METHODS))


def test_a_planted_bias_is_found() -> None:
    """One pair in seventy (of 20,000) is replaced: a slightly wrong acceptance rule would show as well."""
    probs = joint("hot")
    counts = drawn("draft_model", "hot").copy()
    moved = int(2 * NUM_SEEDS**0.5)
    counts.flat[counts.argmax()] -= moved
    counts.flat[counts.argmin()] += moved
    assert p_value(counts, probs) < ALPHA / (len(OPTIONS) * len(METHODS))
