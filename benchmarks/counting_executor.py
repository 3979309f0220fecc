"""An executor that computes nothing: for step counts, KV accounting and trace replays at full size.

Everything else of the engine is the real thing; only the numbers that a model would make are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from twostroke.batch import NewRequest, RequestResult, ScheduledBatch, StepResult
from twostroke.kv_check import KVCheck, KVDifference


class SimulatedClock:
    """Seconds that pass only when somebody lets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        assert seconds >= 0, f"time cannot go back by {-seconds} s"
        self.now_s += seconds


class CountingExecutor:
    """Samples the same token for everyone, at once.

    Args:
        token_id: that token.
        clock: moved on by `step_time_s` when a step's result is collected; None leaves time alone.
        step_time_s: how long a step takes in simulated time.
    """

    max_in_flight = 1

    def __init__(self, token_id: int = 1, *, clock: SimulatedClock | None = None, step_time_s: float = 1.0) -> None:
        self._token_ids = (token_id,)
        self._clock = clock
        self._step_time_s = step_time_s
        self._results: deque[StepResult] = deque()

    def add_request(self, request: NewRequest) -> None:
        """Nothing to remember."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Answers at once: one token for each request whose turn it is to sample."""
        made = (RequestResult(r.request_id, self._token_ids if r.samples_token else ()) for r in batch.requests)
        self._results.append(StepResult(batch.step, tuple(made)))

    def collect(self) -> StepResult:
        """See Executor."""
        if self._clock is not None:
            self._clock.advance(self._step_time_s)
        return self._results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """Nothing is stored, so nothing differs."""
        del check, token_ids
        return ()

    def close(self) -> None:
        """Nothing to give back."""
