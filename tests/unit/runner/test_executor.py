"""The in-process executor: a result for every batch, whatever happens inside."""

from __future__ import annotations

from typing import Any

from twostroke.batch import Limit, ScheduledBatch, ScheduledRequest, Stroke
from twostroke.runner.launched_step import LaunchedStep
from twostroke.runner.model_runner import InProcessExecutor


class BrokenRunner:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        raise self.error


def batch() -> ScheduledBatch:
    scheduled = (ScheduledRequest(name, Stroke.PREFILL, 0, 3, 0, True, ()) for name in "ab")
    return ScheduledBatch(7, tuple(scheduled), Limit.NONE)


def test_an_error_is_an_answer_to_each_request() -> None:
    runner: Any = BrokenRunner(RuntimeError("out of luck"))
    executor = InProcessExecutor(runner)
    executor.submit(batch())
    result = executor.collect()
    assert [r.request_id for r in result.requests] == ["a", "b"]
    assert all("out of luck" in (r.error or "") for r in result.requests)
