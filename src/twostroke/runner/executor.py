"""Executor: runs decided batches, in order, and hands the results back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from twostroke.batch import NewRequest, RequestResult, ScheduledBatch, StepResult
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.runner.launched_step import LaunchedStep
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
    """Runs the model in the caller's thread.

    Args:
        runner: of the model.
        max_in_flight: see Executor; more than 1 for a runner that runs ahead.
    """

    def __init__(self, runner: ModelRunner, max_in_flight: int = 1) -> None:
        self._runner = runner
        self._max_in_flight = max_in_flight
        self._steps: deque[LaunchedStep | StepResult] = deque()

    @property
    def max_in_flight(self) -> int:
        """See Executor."""
        return self._max_in_flight

    def add_request(self, request: NewRequest) -> None:
        """See Executor."""
        self._runner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        """Computes, or has the device do so. A step that raises ends its requests with an error; the engine goes on."""
        try:
            self._steps.append(self._runner.launch(batch))
        except Exception as error:
            # whatever an operator raises must not take down the requests that were not in this step
            self._steps.append(_failed(batch, error))
            return
        if self._max_in_flight == 1:  # whoever interrupts the caller finds steps that are over, or not begun
            self._steps.append(self._finished(self._steps.pop()))

    def collect(self) -> StepResult:
        """See Executor."""
        return self._finished(self._steps.popleft())

    def _finished(self, step: LaunchedStep | StepResult) -> StepResult:
        if isinstance(step, StepResult):
            return step
        try:
            return self._runner.finish(step)
        except Exception as error:
            return _failed(step.batch, error)

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
    """An error for each request of a step; the log has where it comes from."""
    log.error("step %d failed", batch.step, exc_info=error)
    reason = f"step {batch.step} failed: {reason_of(error)}"
    return StepResult(batch.step, tuple(RequestResult(r.request_id, (), error=reason) for r in batch.requests))
