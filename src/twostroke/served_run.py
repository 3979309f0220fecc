"""A workload's run through an engine, as recorded by a benchmark, a reader of event logs, or a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.batch import Limit, ScheduledBatch
from twostroke.outputs import RequestTimes
from twostroke.request import FinishReason


@dataclass(frozen=True, slots=True)
class StepSample:
    """One decided step and its duration."""

    end_s: float
    """Seconds from the start of the run to its result."""
    wall_s: float
    """Seconds of the whole engine step."""
    operator_s: float
    """Seconds of the step in the model's operators."""
    num_seqs: int
    num_prefill_tokens: int
    num_decode_tokens: int
    limited_by: Limit
    num_waiting: int

    @classmethod
    def of(cls, batch: ScheduledBatch, *, end_s: float, wall_s: float, operator_s: float) -> StepSample:
        """Return the sample of a batch with these durations."""
        return cls(
            end_s=end_s,
            wall_s=wall_s,
            operator_s=operator_s,
            num_seqs=len(batch.requests),
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            limited_by=batch.limited_by,
            num_waiting=batch.num_waiting,
        )

    @property
    def own_s(self) -> float:
        """Engine time of the step: everything but the model's operators."""
        return self.wall_s - self.operator_s

    @property
    def num_tokens(self) -> int:
        """Query tokens of the pass."""
        return self.num_prefill_tokens + self.num_decode_tokens


@dataclass(slots=True)
class ServedRequest:
    """One request of a run; times count from the start of the run."""

    request_id: str
    times: RequestTimes
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A workload's run through an engine."""

    requests: tuple[ServedRequest, ...]
    steps: tuple[StepSample, ...]
    duration_s: float

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(r.times.token_times_s) for r in self.requests)

    def decode_steps(self, num_requests: int) -> list[StepSample]:
        """Return the steps in which so many requests decode and nothing is prefilled."""
        return [s for s in self.steps if s.num_decode_tokens == num_requests and not s.num_prefill_tokens]
