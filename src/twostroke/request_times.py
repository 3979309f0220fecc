"""When things happened to one sequence, and every duration that follows from it: the one definition of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTimes:
    """Points in time on one clock, in seconds; collected by whoever reads an engine's updates or its event log.

        arrival   scheduled   token 1   token 2, 3    token 4 = end
           |----------|----------|----------|-------------|
            queue_time             itl[0]      itl[2]              itl[1] = 0: tokens 2 and 3 left one step together
           |------- ttft --------|
           |------------------------ e2e -----------------|        tpot = (e2e - ttft) / 3

    A token's time is when the step that made it gave its result to the engine, before the text is made and sent.
    Durations need a token: a request that never got one has none.
    """

    arrival_s: float
    scheduled_s: float | None = None
    """When it ran for the first time."""
    token_times_s: list[float] = field(default_factory=list[float])
    finish_s: float | None = None
    """When it ended, if that was not with its last token (abort)."""
    num_preemptions: int = 0

    @property
    def queue_time_s(self) -> float:
        """Arrival until first scheduled."""
        assert self.scheduled_s is not None, f"never ran: {self}"
        return self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Arrival until the first token was there."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Arrival until the end."""
        return (self.token_times_s[-1] if self.finish_s is None else self.finish_s) - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (tokens - 1); None for a single token."""
        num_gaps = len(self.token_times_s) - 1
        return (self.e2e_s - self.ttft_s) / num_gaps if num_gaps else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between consecutive tokens."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.token_times_s))
