"""From the times of tokens to figures, the same way for every engine. Pure.

    prompts handed over
    |------- every prompt is read -------|---- all of them decode ----|-- some have ended --|
    0                                  last first token        first last token            end

Decode rates count the tokens between the last request's first token and the first request's last one: while the batch
is full, whether or not an engine decodes some requests already while it reads the prompts of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.measure.peers.peer import PeerFailed


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one size, all at once."""

    num_requests: int
    prompt_length: int
    output_length: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.num_requests} x {self.prompt_length} in / {self.output_length} out"

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of what it shows (`figures_of`)."""
        if self.output_length == 1:
            return (f"prefill {self.prompt_length}",)
        batch = f"batch {self.num_requests}"
        return (f"decode, {batch}",) if self.num_requests == 1 else (f"decode, {batch}", f"end to end, {batch}")


def checked_tokens(answer: Any, work: Work) -> list[tuple[float, int]]:
    """An engine's answer as (seconds, request), in the order of time.

    Raises:
        PeerFailed: it is none, or a request has not exactly the tokens that were asked for.
    """
    try:
        tokens = sorted((float(time_s), int(index)) for time_s, index in answer)
    except (TypeError, ValueError) as error:
        raise PeerFailed(f"its tokens are no list of (seconds, request): {str(answer)[:80]}") from error
    counts = [0] * work.num_requests
    for time_s, index in tokens:
        if not (0 < time_s < float("inf") and 0 <= index < work.num_requests):
            raise PeerFailed(f"it reported a token of request {index} of {work.num_requests} after {time_s} s")
        counts[index] += 1
    if set(counts) != {work.output_length}:
        raise PeerFailed(f"it made between {min(counts)} and {max(counts)} of {work.output_length} tokens a request")
    return tokens


def figures_of(work: Work, tokens: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Tokens per second of what the work shows.

    Two requests; the second one's prompt is read in the step that brings the first one's second token:

    >>> figures_of(Work(2, 10, 3), [(1.0, 0), (2.0, 0), (2.0, 1), (3.0, 0), (3.0, 1), (3.5, 1)])
    {'decode, batch 2': 2.0, 'end to end, batch 2': 7.428571428571429}
    """
    end_s = tokens[-1][0]
    first_s = [min(t for t, i in tokens if i == index) for index in range(work.num_requests)]
    if work.output_length == 1:
        return {work.figures[0]: work.num_requests * work.prompt_length / end_s}
    last_s = [max(t for t, i in tokens if i == index) for index in range(work.num_requests)]
    begin_s, full_s = max(first_s), min(last_s)
    if full_s <= begin_s:
        raise PeerFailed(f"its requests never decode all at once ({work.name})")
    count = sum(begin_s < t <= full_s for t, _ in tokens)
    rates = [count / (full_s - begin_s), work.num_requests * (work.prompt_length + work.output_length) / end_s]
    return dict(zip(work.figures, rates, strict=False))
