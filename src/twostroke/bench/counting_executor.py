"""An executor that computes nothing: for step counts, KV accounting and trace replays at full size.

Everything else of the engine is the real thing; only the numbers that a model would make are missing.
"""

from __future__ import annotations

from collections import deque

from twostroke.batch import NewRequest, RequestResult, ScheduledBatch, StepResult


class CountingExecutor:
    """Samples the same token for everyone, at once.

    Args:
        token_id: that token.
    """

    max_in_flight = 1

    def __init__(self, token_id: int = 1) -> None:
        self._token_ids = (token_id,)
        self._results: deque[StepResult] = deque()

    def add_request(self, request: NewRequest) -> None:
        """Nothing to remember."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Answers at once: one token for each request whose turn it is to sample."""
        requests = tuple(
            RequestResult(r.request_id, self._token_ids if r.samples_token else ()) for r in batch.requests
        )
        self._results.append(StepResult(batch.step, requests))

    def collect(self) -> StepResult:
        """See Executor."""
        return self._results.popleft()

    def close(self) -> None:
        """Nothing to give back."""
