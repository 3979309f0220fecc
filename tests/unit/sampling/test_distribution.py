"""Drawn tokens have the frequencies that the options promise: χ² over thousands of seeds, and proof that it bites."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from oracle import naive_sampling as naive
from twostroke.sampling.noise import GumbelNoise, NoiseStream
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingRules, SamplingState
from twostroke.sampling_params import SamplingParams

NUM_SEEDS = 40_000
VOCAB_SIZE = 24
LOGITS = np.random.default_rng(11).normal(0, 1.4, VOCAB_SIZE).astype(np.float32)
ALPHA = 1e-4
PROMPT, OUTPUT = (1, 2, 3, 3), (3, 5, 5, 5, 7)
EOS, BAD_WORDS = (4,), ((6,), (7, 8), (1, 9))

OPTIONS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1.5),
    "top_k": SamplingParams(top_k=6),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.15),
    "top_k top_p min_p": SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    "repetition_penalty": SamplingParams(repetition_penalty=1.6),
    "presence_penalty": SamplingParams(presence_penalty=1.1),
    "frequency_penalty": SamplingParams(frequency_penalty=-0.6),
    "logit_bias": SamplingParams(logit_bias={0: 2.0, 5: -1.5, 9: -100.0}),
    "allowed_token_ids": SamplingParams(allowed_token_ids=(0, 3, 8, 11, 20)),
    "bad_words": SamplingParams(bad_words=("the request below has their token ids",)),
    "min_tokens": SamplingParams(min_tokens=9, max_tokens=10, stop_token_ids=(0, 10)),
}


def request_of(params: SamplingParams) -> naive.NaiveRequest:
    bad_words = BAD_WORDS if params.bad_words else ()
    return naive.NaiveRequest(params, PROMPT, OUTPUT, EOS, bad_words)


def draws(
    params: SamplingParams, sampler: Sampler | None = None, sample_index: int = 0, num_more_prompt: int = 0
) -> np.ndarray:
    """Draw one token for each seed, all in rows of one batch. int64 [NUM_SEEDS]."""
    request = request_of(params)
    rules = SamplingRules.compile(params, VOCAB_SIZE, request.eos, request.bad_words)
    prompt = PROMPT + PROMPT[:1] * num_more_prompt
    states = [SamplingState(rules, NoiseStream(seed, sample_index), prompt, OUTPUT) for seed in range(NUM_SEEDS)]
    logits = torch.from_numpy(LOGITS).expand(NUM_SEEDS, -1).contiguous()
    return (sampler or Sampler(VOCAB_SIZE)).sample(logits, states).token_ids.numpy()


def p_value(tokens: np.ndarray, probs: np.ndarray) -> float:
    """χ² goodness of fit; the least likely tokens share a bin until 5 are expected there."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any(), f"tokens {np.flatnonzero((probs == 0) & (counts > 0))} were excluded"
    expected, observed = [0.0], [0]
    for token in np.argsort(probs):
        if expected[-1] >= 5:
            expected.append(0.0)
            observed.append(0)
        expected[-1] += probs[token] * len(tokens)
        observed[-1] += counts[token]
    return float(stats.chisquare(observed, expected).pvalue) if len(expected) > 1 else 1.0


@pytest.mark.parametrize("option", OPTIONS)
def test_frequencies_match_the_target(option: str) -> None:
    params = OPTIONS[option]
    target = naive.distribution(LOGITS, request_of(params))
    plain = naive.distribution(LOGITS, request_of(SamplingParams()))
    assert option == "plain" or np.abs(target - plain).max() > 0.01, "the option does nothing here"
    assert p_value(draws(params), target) > ALPHA / len(OPTIONS)


@pytest.mark.parametrize("option", ["plain", "top_k", "top_p", "frequency_penalty"])
def test_a_temperature_five_percent_off_is_noticed(option: str) -> None:
    params = OPTIONS[option]
    wrong = dataclasses.replace(params, temperature=1.05)
    assert p_value(draws(wrong), naive.distribution(LOGITS, request_of(params))) < ALPHA


class BiasedNoise(GumbelNoise):
    """Favours odd tokens a little."""

    def of_range(self, keys: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return super().of_range(keys, start, stop) + 0.08 * (torch.arange(start, stop) % 2)


class RecycledNoise(GumbelNoise):
    """Forgets everything but the seed."""

    def keys(self, streams: list[NoiseStream], positions: list[int]) -> torch.Tensor:
        return super().keys([NoiseStream(s.seed // 2) for s in streams], [0] * len(positions))


def sampler_with(noise: GumbelNoise) -> Sampler:
    sampler = Sampler(VOCAB_SIZE)
    sampler._noise = noise
    return sampler


def test_biased_noise_is_noticed() -> None:
    tokens = draws(SamplingParams(), sampler_with(BiasedNoise(VOCAB_SIZE)))
    assert p_value(tokens, naive.distribution(LOGITS, request_of(SamplingParams()))) < ALPHA


def dependence(first: np.ndarray, second: np.ndarray) -> float:
    """p-value of the joint frequencies under independence; tokens folded into 6 bins."""
    joint = np.zeros((6, 6))
    np.add.at(joint, (first % 6, second % 6), 1)
    return float(stats.chi2_contingency(joint).pvalue)


def pairs_that_should_not_know_of_each_other(sampler: Sampler) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    params = SamplingParams()
    base = draws(params, sampler)
    return {
        "consecutive positions": (base, draws(params, sampler, num_more_prompt=1)),
        "sample indexes": (base, draws(params, sampler, sample_index=1)),
        "consecutive seeds": (base[0::2], base[1::2]),
        "seed against sample index": (base[1:], draws(params, sampler, sample_index=1)[:-1]),
    }


def test_draws_are_independent() -> None:
    for name, (first, second) in pairs_that_should_not_know_of_each_other(Sampler(VOCAB_SIZE)).items():
        assert dependence(first, second) > ALPHA / 4, name


def test_dependent_draws_are_noticed() -> None:
    pairs = pairs_that_should_not_know_of_each_other(sampler_with(RecycledNoise(VOCAB_SIZE)))
    for name in ("consecutive positions", "sample indexes", "consecutive seeds"):
        assert dependence(*pairs[name]) < ALPHA, name
