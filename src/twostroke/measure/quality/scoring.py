"""Perplexity and retrieval, measured through the engine.

*Perplexity* by teacher forcing: every token is scored by its prompt log-probability, in windows of the context
length. The first quarter of a window was scored by the window before (as in lm-eval's rolling log-likelihood).

*Retrieval at a distance*: a passage of the text, other text, then the passage again. The tokens of the second
occurrence that are the model's first choice are counted. Distance 0 measures what the model knows without an earlier
occurrence; the rest was retrieved from the KV cache at that distance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twostroke.llm import LLM
from twostroke.outputs import Logprob
from twostroke.sampling_params import SamplingParams

CUE, ANSWER = 8, 24
"""Tokens of the repeated passage that are given as a cue (CUE) and that are counted (ANSWER)."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Negative log-likelihood of a text, with its size."""

    num_tokens: int
    num_bytes: int
    nll_nats: float

    @property
    def per_token(self) -> float:
        """Perplexity per token: e to the mean negative log-likelihood."""
        return math.exp(self.nll_nats / self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte; independent of the tokenizer."""
        return self.nll_nats / math.log(2) / self.num_bytes


@dataclass(frozen=True, slots=True)
class Document:
    """Text as tokens, after the token that texts begin with."""

    token_ids: tuple[int, ...]
    """Token ids [1 + tokens]; the first is not scored."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Needle:
    """Text that ends with a passage that also occurs `distance` tokens earlier; 0: it occurs once."""

    distance: int
    token_ids: tuple[int, ...]


def windows(num_tokens: int, context: int) -> list[tuple[int, int, int]]:
    """Return (begin, first scored, end) of windows that score each of tokens 1 to num_tokens - 1 once.

    >>> windows(10, 4)
    [(0, 1, 4), (3, 4, 7), (6, 7, 10)]
    """
    found: list[tuple[int, int, int]] = []
    scored = 1
    while scored < num_tokens:
        begin = max(0, scored - max(1, context // 4)) if scored > 1 else 0
        end = min(begin + context, num_tokens)
        found.append((begin, scored, end))
        scored = end
    return found


def perplexity(llm: LLM, documents: Sequence[Document], context: int) -> Perplexity:
    """Score documents by their prompt log-probabilities.

    Args:
        llm: the model in the formats to measure.
        documents: the documents to score.
        context: tokens of a window; the engine needs room for one more.
    """
    cut = [(d.token_ids[b:e], s - b) for d in documents for b, s, e in windows(len(d.token_ids), context)]
    nats, num_tokens = 0.0, 0
    for scores in _scores(llm, cut):
        for score in scores:
            nats -= score.logprob
        num_tokens += len(scores)
    return Perplexity(num_tokens, sum(document.num_bytes for document in documents), nats)


def _scores(llm: LLM, texts: Sequence[tuple[Sequence[int], int]]) -> Iterator[list[Logprob]]:
    """Yield the log-probabilities of each text's tokens from an index on."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids, _ in texts], params)
    for (ids, first), output in zip(texts, outputs, strict=True):
        assert output.prompt_logprobs is not None, output.request_id
        told = zip(ids[first:], output.prompt_logprobs[first:], strict=True)
        scores = [of_place[token_id] for token_id, of_place in told if of_place is not None]
        assert len(scores) == len(ids) - first, output.request_id
        yield scores


def needles(documents: Sequence[Document], distances: Sequence[int], count: int, seed: int) -> list[Needle]:
    """Return `count` texts for each distance, with the same passages, so that only the distance differs."""
    rng = random.Random(seed)
    text = [token for document in documents for token in document.token_ids[1:]]
    length = CUE + ANSWER
    places = [(rng.randrange(len(text)), rng.randrange(len(text))) for _ in range(count)]
    found: list[Needle] = []
    for distance in distances:
        for at, elsewhere in places:
            passage = _run(text, at, length)
            between = _run(text, elsewhere, (distance or distances[-1]) - length)
            found.append(Needle(distance, (*(passage if distance else ()), *between, *passage)))
    return found


def _run(text: Sequence[int], begin: int, length: int) -> tuple[int, ...]:
    """Return consecutive tokens, wrapping around at the end of the text."""
    return tuple(text[(begin + i) % len(text)] for i in range(length))


def retrieval(llm: LLM, texts: Sequence[Needle]) -> dict[int, float]:
    """Return the share of counted tokens that are the model's first choice, by distance."""
    answers = _scores(llm, [(needle.token_ids, len(needle.token_ids) - ANSWER) for needle in texts])
    right: dict[int, list[bool]] = {}
    for needle, scores in zip(texts, answers, strict=True):
        right.setdefault(needle.distance, []).extend(score.rank == 1 for score in scores)
    return {distance: sum(same) / len(same) for distance, same in right.items()}
