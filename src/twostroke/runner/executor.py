"""Executor: runs decided batches, in order, and hands the results back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from twostroke.batch import NewRequest, RequestResult, ScheduledBatch, StepResult
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.log import get_logger
from twostroke.runner.model_runner import ModelRunner

log = get_logger(__name__)


class Executor(Protocol):
    """One or more workers behind one door.

    Batches are executed in the order of `submit`; `collect` returns their results in the same order.
    """

    @property
    def max_in_flight(self) -> int:
        """Batches that may be submitted before the first result is collected; 1 decides and computes in turn."""
        ...

    def add_request(self, request: NewRequest) -> None:
        """Announces a request before it is first scheduled."""
        ...

    def submit(self, batch: ScheduledBatch) -> None:
        """Starts a batch."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest submitted batch."""
        ...

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """Computes a cached block again, behind all batches submitted so far and in none of them.

        Args:
            check: which block.
            token_ids: the block's.

        Returns:
            Where the stored block differs, empty when it does nowhere; None when it could not be computed.
        """
        ...

    def close(self) -> None:
        """Gives back memory and workers; nothing may be called afterwards."""
        ...


class InProcessExecutor:
    """Runs the model in the caller's thread."""

    max_in_flight = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._results: deque[StepResult] = deque()

    def add_request(self, request: NewRequest) -> None:
        """See Executor."""
        self._runner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        """Computes at once. A step that raises ends its requests with an error; the engine goes on."""
        try:
            self._results.append(self._runner.execute(batch))
        except Exception as error:
            # whatever an operator raises must not take down the requests that were not in this step
            log.exception("step %d failed", batch.step)
            self._results.append(_failed(batch, error))

    def collect(self) -> StepResult:
        """See Executor."""
        return self._results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """See Executor. A check is nobody's request, so one that fails is a line in the log."""
        try:
            return self._runner.check_kv(check, token_ids)
        except Exception:
            log.exception("block %d of the prefix of %s could not be checked", check.entry, check.request_id)
            return None

    def close(self) -> None:
        """See Executor."""
        self._runner.close()


def _failed(batch: ScheduledBatch, error: Exception) -> StepResult:
    """An error for each request of a step."""
    reason = f"step {batch.step} failed: {type(error).__name__}: {error}"
    return StepResult(batch.step, tuple(RequestResult(r.request_id, (), error=reason) for r in batch.requests))
