"""Shared by the sampling tests: from the oracle's request to the sampler's state, and a batch of every kind of row."""

from __future__ import annotations

import numpy as np
import torch

from oracle.naive_sampling import NaiveRequest
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.state import SamplingRules, SamplingState
from twostroke.sampling_params import SamplingParams


def state_of(request: NaiveRequest, vocab_size: int) -> SamplingState:
    """The sampler's view of the oracle's request."""
    rules = SamplingRules.compile(request.params, vocab_size, request.eos, request.bad_words)
    return SamplingState(rules, NoiseStream(request.seed, request.sample_index), request.prompt, request.output)


FILTERS: tuple[SamplingParams, ...] = (
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=50, top_p=0.95),
    SamplingParams(top_k=3000),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-9, temperature=3.0),
    SamplingParams(top_p=0.37, temperature=0.4),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=20, top_p=0.5, min_p=0.001, temperature=2.0),
    SamplingParams(top_k=3, top_p=0.99, temperature=1e-30),
    SamplingParams(top_k=40, top_p=0.8),
)
"""One request each, for kernels that draw from what filters leave."""

KINDS: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(top_k=3, top_p=0.5, min_p=0.05),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=0.9, frequency_penalty=-0.5),
    SamplingParams(logit_bias={1: 5.0, 3: -100.0}),
    SamplingParams(allowed_token_ids=(0, 2, 4, 6), top_p=0.8),
    SamplingParams(temperature=1e-6),
    SamplingParams(min_tokens=10, max_tokens=20, stop_token_ids=(4,), top_k=2),
    SamplingParams(temperature=0, min_tokens=10, max_tokens=20),
    SamplingParams(top_p=1e-9, temperature=3.0),
)


def mixed_batch(num_rows: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, list[NaiveRequest]]:
    """Rows of every kind with histories of their own. float32 [num_rows, vocab_size]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    logits[rng.random(logits.shape) < 0.02] = -np.inf
    logits[:, 0] = 0.5
    requests = [
        NaiveRequest(
            params=KINDS[row % len(KINDS)],
            prompt=rng.integers(0, vocab_size, rng.integers(1, 30)).tolist(),
            output=rng.integers(0, vocab_size, rng.integers(0, 30)).tolist(),
            eos=(2,),
            bad_words=((5,), (3, 1), (1, 1, 0)),
            seed=int(rng.integers(0, 2**63)),
            sample_index=row % 3,
        )
        for row in range(num_rows)
    ]
    return torch.from_numpy(logits), requests
