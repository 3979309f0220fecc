"""The sampling pipeline one row, one token and one step at a time, from the documentation and not from the code.

Integers are Python's, noise is the math module's. float32 appears where the documentation says so: the logits and
everything that acts on them before the probabilities.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.sampling_params import SamplingParams

MASK = 2**64 - 1


@dataclass(frozen=True)
class NaiveRequest:
    """Everything a draw may depend on besides the logits."""

    params: SamplingParams
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    eos: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    seed: int = 0
    sample_index: int = 0


def processed(logits: np.ndarray, request: NaiveRequest) -> list[np.float32]:
    """Logits before temperature."""
    p, output = request.params, list(request.output)
    row = [np.float32(x) for x in logits]
    for token in range(len(row)):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            row[token] = np.float32(-np.inf)
        for word in request.bad_words:
            *prefix, last = word
            if last == token and len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
                row[token] = np.float32(-np.inf)
        if len(output) < p.min_tokens and token in {*request.eos, *p.stop_token_ids}:
            row[token] = np.float32(-np.inf)
        row[token] += np.float32((p.logit_bias or {}).get(token, 0.0))
        if token in {*request.prompt, *output}:
            penalty = np.float32(p.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        count = output.count(token)
        row[token] -= np.float32(p.frequency_penalty) * np.float32(count)
        row[token] -= np.float32(p.presence_penalty) * np.float32(count > 0)
    return row


def scaled(row: Sequence[np.float32], temperature: float) -> list[np.float32]:
    """Return the row divided by temperature, with the largest moved to 0."""
    largest = max(row)
    return [(x - largest) / np.float32(max(temperature, np.finfo(np.float32).tiny)) for x in row]


def kept(row: Sequence[np.float32], p: SamplingParams) -> set[int]:
    """Token ids that min_p, top_k and top_p leave of a scaled row."""
    left = [token for token, x in enumerate(row) if x > -np.inf]
    if p.min_p > 0:
        left = [token for token in left if row[token] >= np.float32(math.log(p.min_p))]
    if 0 < p.top_k < len(row):
        values = sorted((row[token] for token in left), reverse=True)
        kth = values[min(p.top_k, len(values)) - 1]
        left = [token for token in left if row[token] >= kth]
    if p.top_p < 1.0:
        left.sort(key=lambda token: (-row[token], token))
        weights = np.exp(np.array([row[token] for token in left], np.float64)).tolist()
        total = 0.0
        for weight in weights:
            total += weight
        nucleus: list[int] = []
        so_far = 0.0
        for token, weight in zip(left, weights, strict=True):
            if so_far >= p.top_p * total:
                break
            nucleus.append(token)
            so_far += weight
        left = nucleus
    return set(left)


def distribution(logits: np.ndarray, request: NaiveRequest) -> np.ndarray:
    """Probability of each token. float64 [V]."""
    row = processed(logits, request)
    probs = np.zeros(len(row))
    if request.params.is_greedy:
        probs[row.index(max(row))] = 1.0
        return probs
    row = scaled(row, request.params.temperature)
    for token in kept(row, request.params):
        probs[token] = math.exp(row[token])
    return probs / probs.sum()


def noise_bits(request: NaiveRequest, token: int) -> int:
    """SplitMix64's output number `token` (from 0) of the stream that starts at the row key."""
    position = len(request.prompt) + len(request.output)
    packed = struct.pack("<QQQ", request.seed, request.sample_index, position)
    key = int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"twostroke gumbel").digest(), "little")
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def gumbel(request: NaiveRequest, token: int) -> float:
    """Noise of one token."""
    return -math.log(-math.log(((noise_bits(request, token) >> 11) | 1) / 2**53))


def sample(logits: np.ndarray, request: NaiveRequest) -> int | None:
    """Return the sampled token; None if there is none to sample."""
    if any(math.isnan(x) or x == math.inf for x in logits):
        return None
    row = processed(logits, request)
    if max(row) == -np.inf:
        return None
    if request.params.is_greedy:
        return row.index(max(row))
    row = scaled(row, request.params.temperature)
    return max(sorted(kept(row, request.params)), key=lambda token: float(row[token]) + gumbel(request, token))
