"""EngineState: one place of a run, as its events tell it; run_state.py follows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from twostroke.batch import ScheduledRequest
from twostroke.events import EngineStarted, RequestFinishedByCaller, StepCommitted
from twostroke.explain.step import DecidedStep
from twostroke.outputs import RequestTimes
from twostroke.request import Arrival, FinishReason, RequestStatus


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence whose arrival is known."""

    sequence_id: str
    siblings: list[SequenceState]
    """All sequences of its request."""
    num_prompt_tokens: int
    max_tokens: int
    times: RequestTimes
    engine: EngineState
    """Where it is, or was last."""
    local: LocalRequest | None = None
    """What it is there; None between two processes, and when it has ended."""
    num_cached_tokens: int = 0
    """Of its prompt, when it first ran."""
    told: RequestFinishedByCaller | None = None
    """It was ended from outside, and the process that runs it has not said so yet."""
    finish_reason: FinishReason | None = None
    is_last: bool = False
    """It has ended as the last one of its request."""


@dataclass(slots=True, eq=False)
class LocalRequest:
    """A sequence as one process has it, by its name there; it may go on elsewhere before this process ends it."""

    request_id: str
    arrival: Arrival | None
    """None of one that came before the history begins."""
    sequence: SequenceState | None = None
    """None likewise, and of one that had ended when it came here."""
    status: RequestStatus = RequestStatus.WAITING
    share: ScheduledRequest | None = None
    """Its part in the last step decided for it."""
    stroke: str = ""
    """Of the last step that computed anything of it."""
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_computed_tokens: int = 0
    """By the results so far."""
    num_cached_tokens: int = 0
    """When it was admitted, the time after a preemption aside."""
    num_preemptions: int = 0
    runs_since: float = inf
    """Step that gave it its blocks. Results of earlier steps are of blocks that it has no more."""

    @property
    def is_running(self) -> bool:
        """Whether it holds blocks."""
        return self.status is RequestStatus.RUNNING

    @property
    def is_here(self) -> bool:
        """Whether its arrival is known, and no other process goes on with its sequence."""
        return self.sequence is not None and self.sequence.local is self


class EngineState:
    """A place of which one process after the other runs sequences."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.started: EngineStarted | None = None
        """How its process began; None before it has said so."""
        self.is_whole = False
        """The history knows it from its start on."""
        self.requests: dict[str, LocalRequest] = {}
        """Those that have not ended here, by their names here."""
        self.num_here = 0
        """Of these, those that are here and nowhere else."""
        self.num_running = 0
        """Of num_here, those that run."""
        self.in_flight: deque[DecidedStep] = deque()
        """Decided, results to come; the first is running."""
        self.last_step: DecidedStep | None = None
        """The last one that gave its result."""
        self.last_result_s = -inf

    @property
    def page_size(self) -> int:
        """Return the tokens of a page; 1 where they are not known."""
        return 1 if self.started is None else self.started.layout.get("block_size", 1)

    def arrival_of(self, request_id: str) -> Arrival | None:
        """Return how a request arrived that has not ended; None where that is not known."""
        request = self.requests.get(request_id)
        return None if request is None else request.arrival

    @property
    def num_tokens_held(self) -> dict[str, int]:
        """Return the running requests, with their tokens that have a place in KV memory."""
        shares = {name: request.share for name, request in self.requests.items() if request.is_running}
        return {name: 0 if share is None else share.token_range.stop for name, share in shares.items()}

    def step_running_at(self, time_s: float) -> DecidedStep | None:
        """Return the step that was running at a moment that is not long ago."""
        if self.in_flight:
            return self.in_flight[0]
        return self.last_step if self.last_result_s > time_s else None

    def move_to(self, request: LocalRequest, status: RequestStatus) -> None:
        """Give a request another status."""
        if request.is_here:
            self.num_running += (status is RequestStatus.RUNNING) - request.is_running
        request.status = status

    def requeue(self, request_id: str, status: RequestStatus) -> LocalRequest | None:
        """Take a request's blocks away; return it, if it is known."""
        request = self.requests.get(request_id)
        if request is not None:
            self.move_to(request, status)
            request.num_computed_tokens, request.runs_since = 0, inf
            request.num_preemptions += status is RequestStatus.PREEMPTED
        return request

    def let_go(self, request: LocalRequest) -> SequenceState | None:
        """Another process, or nobody, goes on with a request; return its sequence, if that was here."""
        sequence = request.sequence
        if sequence is None or sequence.local is not request:
            return None
        self.num_here -= 1
        self.num_running -= request.is_running
        sequence.local = None
        return sequence

    def done(self, event: StepCommitted) -> DecidedStep | None:
        """Return the step of a result, which is in flight no more; None of one that the history does not know."""
        step = None
        while self.in_flight and self.in_flight[0].batch.step <= event.step:
            step = self.last_step = self.in_flight.popleft()
            self.last_result_s = event.time_s
        if step is None or step.batch.step != event.step:
            return None
        step.done_s = event.time_s
        step.num_generated = sum([commit.num_tokens for commit in event.commits])
        return step
