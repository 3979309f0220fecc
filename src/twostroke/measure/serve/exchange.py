"""One request as its sender saw it: when it was due, when each of its tokens came, and how it ended.

       scheduled  sent      chunk of 1   chunk of 2       end
           |--------|-----------|------------|-------------|
           lateness                    gap = 2 ITL samples of gap / 2
           |------ ttft --------|
           |---------------------- e2e --------------------|

Latencies count from when the request was due, not from when the sender got round to it: a sender that is held up by the
server it measures would otherwise leave out the very requests that wait (coordinated omission). Chunks that came in one
read of the socket have one time and count as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Exchange:
    """Times are in seconds after the start of the run."""

    scheduled_s: float
    sent_s: float = 0.0
    status: int | None = None
    """Of HTTP; None when there was no answer."""
    chunk_times_s: list[float] = field(default_factory=list[float])
    """When tokens came."""
    chunk_tokens: list[int] = field(default_factory=list[int])
    """How many came then, as far as the server says."""
    end_s: float = 0.0
    failure: str | None = None
    """A kind of failure, such as "429", "timeout" or "truncated"; None when it ended well."""
    message: str = ""
    """What the server or the socket said about the failure."""
    retry_after_s: float | None = None
    prompt_tokens: int | None = None
    """This and the next two as the server counts them; None when it does not say."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """As billed, or else as counted."""
        return sum(self.chunk_tokens) if self.completion_tokens is None else self.completion_tokens

    @property
    def lateness_s(self) -> float:
        """How long the sender kept it waiting."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Due until the first token came; None without one."""
        return self.chunk_times_s[0] - self.scheduled_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float:
        """Due until the answer was whole, or the failure known."""
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk's first; None for a single token."""
        num_gaps = self.num_output_tokens - 1
        return (
            (self.chunk_times_s[-1] - self.chunk_times_s[0]) / num_gaps if self.chunk_times_s and num_gaps > 0 else None
        )

    @property
    def gaps_s(self) -> list[float]:
        """Between reads that brought tokens."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]

    @property
    def itl_s(self) -> list[float]:
        """A sample for each token after the first chunk: a chunk of m tokens gives m of gap / m."""
        return [gap / m for gap, m in zip(self.gaps_s, self.chunk_tokens[1:], strict=True) for _ in range(m)]

    def take_tokens(self, count: int, time_s: float) -> None:
        """Tokens that came; those of one moment are one chunk."""
        if count <= 0:
            return
        if self.chunk_times_s and self.chunk_times_s[-1] == time_s:
            self.chunk_tokens[-1] += count
        else:
            self.chunk_times_s.append(time_s)
            self.chunk_tokens.append(count)
