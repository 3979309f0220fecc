"""Steps that take the most memory, made to be measured.

They have all tokens that a step may have and all rows that may sample, at the end of the longest contexts, and request
every option. They need one KV block, which every entry of every block table names. The results mean nothing, but the
memory they take is the same, since no operator's memory depends on which block it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.batch import BlockTableUpdate, Limit, NewRequest, ScheduledBatch, ScheduledRequest, Stroke
from twostroke.kv_cache.layout import KVLayout
from twostroke.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step."""

    max_tokens: int
    max_rows: int
    """Rows that sample: one for a request, and one for each draft after it."""
    longest: int
    """Tokens of the longest request."""
    max_logprobs: int
    """Most log-probabilities that a request may ask for."""


def largest_steps(size: StepLimits, layout: KVLayout) -> Iterator[tuple[tuple[NewRequest, ...], ScheduledBatch]]:
    """Yield three batches: most requests with equal shares of the tokens; most with one large share; fewest with all
    tokens.

    Each batch ends the requests of the one before. The first needs most memory in a pass, which reads the most
    contexts. The others need most while prompt tokens are scored, a request at a time, beside the drawn tokens.

    Args:
        size: limits of a step.
        layout: layout of the KV memory.

    Yields:
        The requests of a batch, to be announced first, and the batch.
    """
    ended: tuple[str, ...] = ()
    context, asks = tuple(i % 2 for i in range(size.longest)), _all_options(size.max_logprobs)
    fewest = -(-size.max_tokens // size.longest)
    most = max(fewest, min(size.max_rows, size.max_tokens))
    for step, lengths in enumerate(
        (
            _even_lengths(size.max_tokens, most),
            _front_loaded_lengths(size.max_tokens, most, size.longest),
            _even_lengths(size.max_tokens, fewest),
        )
    ):
        requests = tuple(
            # with an output token, because penalties count these
            NewRequest(f"largest-{step}-{i}", context[:-1], asks, seed=i, output_token_ids=context[-1:])
            for i in range(len(lengths))
        )
        scheduled = tuple(
            _last_tokens(request.request_id, size.longest, length, layout)
            for request, length in zip(requests, lengths, strict=True)
        )
        yield requests, ScheduledBatch(step, scheduled, Limit.TOKENS, finished_request_ids=ended)
        ended = tuple(request.request_id for request in requests)


def _all_options(max_logprobs: int) -> SamplingParams:
    """Return settings with penalties, which copy the logits, with filters, and with log-probabilities of both kinds."""
    return SamplingParams(
        max_tokens=1,
        temperature=1.0,
        top_p=0.9,
        top_k=1 << 20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logprobs=max_logprobs,
        prompt_logprobs=max_logprobs,
    )


def _even_lengths(num_tokens: int, num_requests: int) -> list[int]:
    """Distribute tokens evenly over requests.

    >>> _even_lengths(11, 4)
    [3, 3, 3, 2]
    """
    each, more = divmod(num_tokens, num_requests)
    return [each + (i < more) for i in range(num_requests)]


def _front_loaded_lengths(num_tokens: int, num_requests: int, longest: int) -> list[int]:
    """Give the first requests as many tokens as possible, and the rest one each.

    >>> _front_loaded_lengths(11, 4, 100), _front_loaded_lengths(11, 4, 6)
    ([8, 1, 1, 1], [6, 3, 1, 1])
    """
    lengths = [1] * num_requests
    for i in range(num_requests):
        lengths[i] = min(longest, 1 + num_tokens - sum(lengths))
    return lengths


def _last_tokens(request_id: str, longest: int, num_tokens: int, layout: KVLayout) -> ScheduledRequest:
    """Schedule the last tokens of a context."""
    tables = tuple(BlockTableUpdate(0, (0,) * layout.num_blocks_of_prefix(group, longest)) for group in layout.groups)
    return ScheduledRequest(request_id, Stroke.PREFILL, longest - num_tokens, num_tokens, 0, True, tables)
