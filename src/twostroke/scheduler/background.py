"""Background work: requests that use what foreground requests leave of a step, and are preempted for them.

    running     | foreground, by the policy            | background, by the policy |     preempted from this end
    a step      | decodes, prompts, admissions         | the same, in the remaining budget
                                                         ▲ no longer than `slowdown` of the step without it

Background work could delay a foreground request in two ways. It could delay its tokens: so it may lengthen a step by at
most the share `slowdown`, by the model of step times (cost/step_model.py). It could delay its first token, if the
request arrives during a step: so a step of background work alone takes at most that share of the time of a typical
recent prompt. Work that neither rule admits waits. It waits indefinitely while foreground requests fill every step.

Slots and KV that background work holds do not limit the foreground: background work is preempted, youngest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Protocol

from twostroke.batch import Limit, ScheduledRequest
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import NO_WORK, Layers, StepWork
from twostroke.cost.step_model import PredictsSteps
from twostroke.request import Request
from twostroke.scheduler.policy import Queue, QueueOrder, make_order
from twostroke.scheduler.step_budget import MIN_CHUNK, largest


class TieredQueue:
    """Two queues; every request of the first comes before every request of the second."""

    def __init__(self, foreground: Queue, background: Queue) -> None:
        self._foreground = foreground
        self._background = background

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._foreground, self._background)

    @property
    def first(self) -> Request:
        return (self._foreground if len(self._foreground) else self._background).first

    @property
    def last(self) -> Request:
        return (self._background if len(self._background) else self._foreground).last

    def snapshot(self) -> tuple[Request, ...]:
        return tuple(self)

    def add(self, request: Request) -> None:
        (self._background if request.arrival.background else self._foreground).add(request)

    def remove(self, request: Request) -> None:
        (self._background if request.arrival.background else self._foreground).remove(request)

    def check_invariants(self) -> None:
        self._foreground.check_invariants()
        self._background.check_invariants()
        assert not any(request.arrival.background for request in self._foreground), "background in the foreground"
        assert all(request.arrival.background for request in self._background), "foreground in the background"


class TieredOrder(QueueOrder):
    """Two orders; requests of the second make room for those of the first.

    Args:
        foreground: order that may have requests already.
        background: order of background requests.
        room: rule for the number of background tokens in a step.
    """

    def __init__(self, foreground: QueueOrder, background: QueueOrder, room: BackgroundBudget) -> None:
        super().__init__()
        self.foreground = foreground
        self.background = background
        self.room = room
        self.waiting = TieredQueue(foreground.waiting, background.waiting)
        self.running = TieredQueue(foreground.running, background.running)

    @property
    def has_background(self) -> bool:
        """Whether the background tier has requests."""
        return len(self.background.waiting) + len(self.background.running) > 0

    def on_arrival(self, request: Request) -> None:
        self._of(request).on_arrival(request)

    def charge(self, request: Request, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        self._of(request).charge(request, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)

    def may_overtake(self, head: Request, prefill: Request) -> bool:
        """Return whether the head of a queue may start before a prefill of the same tier continues."""
        return self._of(head).may_overtake(head, prefill)

    def find_displaced(self, head: Request, limit: Limit) -> Request | None:
        """Return background work to preempt, or else what the tier's order returns."""
        running = self.background.running
        if not head.arrival.background and limit in (Limit.SEQS, Limit.KV) and len(running):
            return running.last
        return self._of(head).find_displaced(head, limit)

    def _of(self, request: Request) -> QueueOrder:
        return self.background if request.arrival.background else self.foreground


class BackgroundBudget(Protocol):
    """Rule for the number of background tokens in a step."""

    def tokens(self, foreground: Iterable[ScheduledRequest], order: QueueOrder, typical_prompt: float) -> int:
        """Return how many background tokens the step may take.

        Args:
            foreground: shares already in the step.
            order: of the background.
            typical_prompt: tokens that a foreground request has to compute when it is admitted.
        """
        ...


class RemainingBudget:
    """Rule that grants the rest of the step's budget, for an engine without step times."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._most = max_num_batched_tokens

    def tokens(self, foreground: Iterable[ScheduledRequest], order: QueueOrder, typical_prompt: float) -> int:
        del foreground, order, typical_prompt
        return self._most


class TimedBackgroundBudget:
    """Rule that lengthens no step, and no wait for a first token, by more than a given share.

    Args:
        slowdown: that share.
        max_num_batched_tokens: of any step.
        step_times: of the model, on this machine. Only ratios of its predictions count.
        layers: of the model.
    """

    def __init__(self, slowdown: float, max_num_batched_tokens: int, step_times: PredictsSteps, layers: Layers) -> None:
        self._slowdown = slowdown
        self._most = max_num_batched_tokens
        self._step_times = step_times
        self._layers = layers

    def tokens(self, foreground: Iterable[ScheduledRequest], order: QueueOrder, typical_prompt: float) -> int:
        beside = self._layers.work_of_shares(foreground)
        is_alone = not beside.num_tokens
        limit_s = (
            self._prompt_s(typical_prompt) * self._slowdown
            if is_alone
            else self._seconds(beside) * (1 + self._slowdown)
        )
        running = list(order.running)
        decodes = [r.num_computed_tokens for r in running if r.num_computed_tokens >= r.num_prefill_tokens]

        def work(num_decodes: int) -> StepWork:
            """Return the work of a step with the most urgent decodes."""
            return beside + self._layers.work((start, 1, 1) for start in islice(decodes, num_decodes))

        num_decodes = largest(lambda n: self._seconds(work(n)) <= limit_s, min(len(decodes), self._most))
        if num_decodes < len(decodes):
            return num_decodes or int(is_alone)  # at least one request has to progress
        prompt = _next_prompt(running, order.waiting)
        if prompt is None:
            return num_decodes
        start, num_left = prompt
        with_decodes = work(num_decodes)
        chunk = largest(
            lambda n: self._seconds(with_decodes + self._layers.work([(start, n, 1)])) <= limit_s,
            min(num_left, self._most),
        )
        return num_decodes + (max(chunk, MIN_CHUNK) if is_alone and not decodes else chunk)

    def _prompt_s(self, num_tokens: float) -> float:
        """Return the seconds of a typical prompt, computed in steps of the budget."""
        left, start, seconds = max(1, round(num_tokens)), 0, 0.0
        while left > 0:
            chunk = min(left, self._most)
            seconds += self._seconds(self._layers.work([(start, chunk, int(chunk == left))]))
            start, left = start + chunk, left - chunk
        return seconds

    def _seconds(self, work: StepWork) -> float:
        return self._step_times.seconds(work) if work != NO_WORK else 0.0


def _next_prompt(running: Iterable[Request], waiting: Queue) -> tuple[int, int] | None:
    """Return the computed and the remaining tokens of the first prompt that could continue or begin."""
    for request in running:
        if request.num_computed_tokens < request.num_prefill_tokens:
            return request.num_computed_tokens, request.num_prefill_tokens - request.num_computed_tokens
    if len(waiting):
        head = waiting.first
        return 0, head.num_tokens + head.num_pending_tokens
    return None


def add_background_tier(
    foreground: QueueOrder, config: SchedulerConfig, step_times: PredictsSteps | None, layers: Layers | None
) -> TieredOrder:
    """Add a background tier after the foreground. Its budget depends on step times if they are known."""
    most = config.max_num_batched_tokens
    if step_times is None or layers is None:
        return TieredOrder(foreground, make_order(config), RemainingBudget(most))
    return TieredOrder(
        foreground, make_order(config), TimedBackgroundBudget(config.flex_slowdown, most, step_times, layers)
    )
