"""One engine in simulated time, a step at a time: whoever has several lets each of them take its own steps.

    arrive, finish ──► decide(now) ──► a step that ends at … ──► take_in(step) ──► who is through here
                    Scheduler.schedule    seconds of the batch    Scheduler.update

Between `decide` and `take_in` the engine computes, and hears nothing: what happens meanwhile is told to it afterwards,
as the engine that serves takes its messages between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.batch import Commit, ScheduledBatch, ScheduledRequest, StepSeconds
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import PredictsSteps
from twostroke.errors import InvalidParameter
from twostroke.request import Arrival, FinishReason, Request, RequestStatus
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import ServedRequest, StepSample
from twostroke.simulation.requests import SimulatedRequest


@dataclass(slots=True, eq=False)
class Live:
    """A request that has not ended, wherever it is."""

    given: SimulatedRequest
    served: ServedRequest
    num_outputs: int = 0
    num_hashed: int = 0
    """Full blocks that the scheduler knows by name."""
    num_before: int = 0
    """Outputs with which it came here."""
    until: int = 0
    """Outputs after which it is through here, whether or not it has ended."""

    @property
    def has_ended(self) -> bool:
        """By its tokens."""
        return self.served.finish_reason is not None


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step under way."""

    batch: ScheduledBatch
    begin_s: float
    end_s: float


class SimulatedEngine:
    """A scheduler and the time that its steps take.

    Args:
        scheduler: with its KV cache's accounts; nothing has run yet.
        layers: of the model, for the work of its steps.
        step_times: how long they take.
        block_size: tokens of a KV block.
        names_blocks: whether anybody looks blocks up (the prefix cache is on).
    """

    def __init__(
        self, scheduler: Scheduler, layers: Layers, step_times: PredictsSteps, *, block_size: int, names_blocks: bool
    ) -> None:
        self.scheduler = scheduler
        self.layers = layers
        self.step_times = step_times
        self._block_size = block_size
        self._names_blocks = names_blocks
        self._live: dict[str, Live] = {}
        self.steps: list[StepSample] = []

    @property
    def has_work(self) -> bool:
        """Whether anybody is here who has not ended."""
        return self.scheduler.has_work

    @property
    def num_tokens_to_prefill(self) -> int:
        """Of everybody who is here."""
        requests = [self.scheduler.get(request_id) for request_id in self._live]
        return sum(_num_to_prefill(request) for request in requests if request is not None)

    def arrive(self, live: Live, arrival: Arrival) -> None:
        """A request enters the queue.

        Args:
            live: its account, with the tokens that it has from elsewhere.
            arrival: as the scheduler is to see it; its max_tokens are those that it may get here.

        Raises:
            InvalidParameter: it is longer than the engine takes.
        """
        most = self.scheduler.max_model_len
        if arrival.num_prompt_tokens + arrival.max_tokens > most:
            limit = f"has {arrival.num_prompt_tokens} + {arrival.max_tokens} tokens; the engine takes {most}"
            raise InvalidParameter("request", arrival.request_id, limit, "Give a larger max_model_len.")
        live.num_hashed = len(arrival.block_hashes)
        live.num_before = live.num_outputs
        live.until = live.num_outputs + arrival.max_tokens
        self._live[arrival.request_id] = live
        self.scheduler.add_request(arrival)

    def finish(self, request_id: str) -> bool:
        """Its caller has gone; False: it is not here."""
        is_here = self._live.pop(request_id, None) is not None
        self.scheduler.finish(request_id, FinishReason.ABORT)
        return is_here

    def decide(self, now_s: float) -> SimulatedStep | None:
        """The next step; None: there is nothing to compute."""
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

    def take_in(self, step: SimulatedStep) -> list[Live]:
        """The step is over: its tokens are there. Returns who is through here, ended or not."""
        through: list[Live] = []
        batch, seconds = step.batch, step.end_s - step.begin_s
        self.scheduler.update(batch.step, list(self._commits(step, through)), StepSeconds(seconds))
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

    def _commits(self, step: SimulatedStep, through: list[Live]) -> Iterator[Commit]:
        for scheduled in step.batch.requests:
            if scheduled.samples_token:
                yield self._sampled(scheduled, step.end_s, through)
            else:
                yield Commit(scheduled.request_id, 0)

    def _sampled(self, scheduled: ScheduledRequest, end_s: float, through: list[Live]) -> Commit:
        """One token. Who was given up without any in the log may get some here; it ends when its caller goes."""
        live = self._live[scheduled.request_id]
        given = live.given
        live.num_outputs += 1
        live.served.times.token_times_s.append(end_s)
        reason = None
        is_last = given.ended_after_s is None and live.num_outputs >= given.num_outputs
        if is_last or live.num_outputs >= given.arrival.max_tokens:
            reason = live.served.finish_reason = given.finish_reason
        elif live.num_outputs >= live.until:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self._live[scheduled.request_id]
            through.append(live)
        return Commit(scheduled.request_id, 1, self._new_hashes(live), reason)

    def _new_hashes(self, live: Live) -> tuple[bytes, ...]:
        num_full = (live.given.arrival.num_prompt_tokens + live.num_outputs) // self._block_size
        if not self._names_blocks or num_full <= live.num_hashed:
            return ()
        first, live.num_hashed = live.num_hashed, num_full
        return tuple(live.given.hash_of_block(index) for index in range(first, num_full))


def _num_to_prefill(request: Request) -> int:
    if request.status is RequestStatus.RUNNING:
        return max(0, request.num_prefill_tokens - request.num_computed_tokens)
    return request.num_tokens
