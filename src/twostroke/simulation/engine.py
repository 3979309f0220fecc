"""One engine in simulated time, advanced step by step; with several engines, each advances on its own.

    arrive, finish ──► decide(now) ──► a step that ends at … ──► commit(step) ──► requests that leave this engine
                    Scheduler.schedule    seconds of the batch    Scheduler.update

Between `decide` and `commit` the engine computes and receives no messages. Later messages are delivered after the
step, as the real engine handles its messages between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.batch import Commit, ScheduledBatch, ScheduledRequest, StepDurations
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import PredictsSteps
from twostroke.errors import InvalidParameter
from twostroke.request import Arrival, FinishReason, Request, RequestStatus
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import ServedRequest, StepSample
from twostroke.simulation.requests import SimulatedRequest


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Request that has not ended, in whichever process it is."""

    outcome: SimulatedRequest
    served: ServedRequest
    num_outputs: int = 0
    num_hashed: int = 0
    """Full blocks whose hashes the scheduler knows."""
    num_outputs_on_arrival: int = 0
    """Output tokens that it had when it arrived at this engine."""
    max_outputs_here: int = 0
    """Output tokens after which it leaves this engine, whether or not it has ended."""

    @property
    def has_ended(self) -> bool:
        """Whether its tokens have ended it."""
        return self.served.finish_reason is not None


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Step in flight."""

    batch: ScheduledBatch
    begin_s: float
    end_s: float


class SimulatedEngine:
    """Scheduler with predicted step times.

    Args:
        scheduler: a scheduler with its KV cache accounting; nothing has run yet.
        layers: the model's layers, from which the work of a step is computed.
        step_times: predicts how long a step takes.
        block_size: tokens of a KV block.
        hashes_blocks: whether blocks get hashes, because the prefix cache is on.
    """

    def __init__(
        self, scheduler: Scheduler, layers: Layers, step_times: PredictsSteps, *, block_size: int, hashes_blocks: bool
    ) -> None:
        self.scheduler = scheduler
        self.layers = layers
        self.step_times = step_times
        self._block_size = block_size
        self._hashes_blocks = hashes_blocks
        self._live: dict[str, LiveRequest] = {}
        self.steps: list[StepSample] = []

    @property
    def has_work(self) -> bool:
        """Whether any request here has not ended."""
        return self.scheduler.has_work

    @property
    def num_tokens_to_prefill(self) -> int:
        """Prompt tokens still to be computed for all requests in this engine."""
        requests = [self.scheduler.get(request_id) for request_id in self._live]
        return sum(_num_to_prefill(request) for request in requests if request is not None)

    def arrive(self, live: LiveRequest, arrival: Arrival) -> None:
        """Add a request to the queue.

        Args:
            live: its state, with the tokens that it already has from another process.
            arrival: its arrival as the scheduler sees it; `max_tokens` is what it may generate here.

        Raises:
            InvalidParameter: the request is longer than the engine accepts.
        """
        most = self.scheduler.max_model_len
        if arrival.num_prompt_tokens + arrival.max_tokens > most:
            limit = f"has {arrival.num_prompt_tokens} + {arrival.max_tokens} tokens; the engine accepts {most}"
            raise InvalidParameter("request", arrival.request_id, limit, "Give a larger max_model_len.")
        live.num_hashed = len(arrival.block_hashes)
        live.num_outputs_on_arrival = live.num_outputs
        live.max_outputs_here = live.num_outputs + arrival.max_tokens
        self._live[arrival.request_id] = live
        self.scheduler.add_request(arrival)

    def finish(self, request_id: str) -> bool:
        """Abort a request because its caller is gone; return False if it is not here."""
        is_here = self._live.pop(request_id, None) is not None
        self.scheduler.finish(request_id, FinishReason.ABORT)
        return is_here

    def decide(self, now_s: float) -> SimulatedStep | None:
        """Return the next step, or None if there is nothing to compute."""
        batch = self.scheduler.schedule(now_s)
        if batch.is_empty:
            return None
        for admitted in batch.admitted:
            served = self._live[admitted.request_id].served
            if served.times.scheduled_s is None:
                served.times.scheduled_s = now_s
                served.num_cached_tokens = admitted.num_cached_tokens
        for request_id in batch.preempted_request_ids:
            self._live[request_id].served.times.num_preemptions += 1
        return SimulatedStep(batch, now_s, now_s + self.step_times.seconds(self.layers.work_of(batch)))

    def commit(self, step: SimulatedStep) -> list[LiveRequest]:
        """Commit the tokens of a step that is over; return the requests that leave this engine, ended or not."""
        through: list[LiveRequest] = []
        batch, seconds = step.batch, step.end_s - step.begin_s
        self.scheduler.update(batch.step, list(self._commits(step, through)), StepDurations(seconds))
        self.steps.append(
            StepSample(
                end_s=step.end_s,
                wall_s=seconds,
                operator_s=seconds,
                num_seqs=len(batch.requests),
                num_prefill_tokens=batch.num_prefill_tokens,
                num_decode_tokens=batch.num_decode_tokens,
                limited_by=batch.limited_by,
                num_waiting=batch.num_waiting,
            )
        )
        return through

    def _commits(self, step: SimulatedStep, through: list[LiveRequest]) -> Iterator[Commit]:
        for scheduled in step.batch.requests:
            if scheduled.samples_token:
                yield self._sampled(scheduled, step.end_s, through)
            else:
                yield Commit(scheduled.request_id, 0)

    def _sampled(self, scheduled: ScheduledRequest, end_s: float, through: list[LiveRequest]) -> Commit:
        """Return the commit of one token.

        A request that was aborted before its first token in the log may get tokens here; it ends when its caller
        aborts it.
        """
        live = self._live[scheduled.request_id]
        given = live.outcome
        live.num_outputs += 1
        live.served.times.token_times_s.append(end_s)
        reason = None
        is_last = given.ended_after_s is None and live.num_outputs >= given.num_outputs
        if is_last or live.num_outputs >= given.arrival.max_tokens:
            reason = live.served.finish_reason = given.finish_reason
        elif live.num_outputs >= live.max_outputs_here:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self._live[scheduled.request_id]
            through.append(live)
        return Commit(scheduled.request_id, 1, self._new_hashes(live), reason)

    def _new_hashes(self, live: LiveRequest) -> tuple[bytes, ...]:
        num_full = (live.outcome.arrival.num_prompt_tokens + live.num_outputs) // self._block_size
        if not self._hashes_blocks or num_full <= live.num_hashed:
            return ()
        first, live.num_hashed = live.num_hashed, num_full
        return tuple(live.outcome.block_hash(index) for index in range(first, num_full))


def _num_to_prefill(request: Request) -> int:
    if request.status is RequestStatus.RUNNING:
        return max(0, request.num_prefill_tokens - request.num_computed_tokens)
    return request.num_tokens
