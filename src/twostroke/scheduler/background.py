"""Background work: it fills what the others leave, and gives way to them.

    running     | foreground, by the policy            | background, by the policy |     gives way from this end
    a step      | decodes, prompts, admissions         | the same, in what room is left
                                                         ▲
                                                         no longer than `slowdown` of the step without it

Two things of a foreground request could suffer. The time between its tokens: so background work may make a step longer
by the share `slowdown` and no more, by the model of step times (cost/step_model.py). The time to its first token, as it
may come in the middle of a step: so a step of background work alone takes at most that share of the time that a prompt
like the latest ones takes. What neither rule lets in waits; while the foreground fills every step, for ever.

Slots and KV are no limit to the foreground while background work holds them: it is preempted, youngest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Protocol

from twostroke.batch import Limit, ScheduledRequest
from twostroke.cost.step_model import PredictsSteps
from twostroke.cost.step_work import NO_WORK, Layers, StepWork
from twostroke.request import Request
from twostroke.scheduler.bisection import largest
from twostroke.scheduler.policy import Key, Order, Queue
from twostroke.scheduler.step_budget import LEAST_CHUNK

FIRST_GUESS = 512
"""Tokens of a prompt, before any has come."""
_LEARNED = 0.1
"""Weight of the latest prompt in the typical one."""


class TieredQueue:
    """Two queues, all of one before all of the other."""

    def __init__(self, foreground: Queue, background: Queue) -> None:
        self._foreground = foreground
        self._background = background
        self._keys: set[Key] = set()
        """Of the background."""

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._foreground, self._background)

    @property
    def first(self) -> Request:
        """The most urgent."""
        return (self._foreground if len(self._foreground) else self._background).first

    @property
    def last(self) -> Request:
        """The least urgent."""
        return (self._background if len(self._background) else self._foreground).last

    def snapshot(self) -> tuple[Request, ...]:
        """The requests as they stand."""
        return tuple(self)

    def add(self, key: Key, request: Request) -> None:
        """Puts a request in its place."""
        if request.arrival.background:
            self._keys.add(key)
            self._background.add(key, request)
        else:
            self._foreground.add(key, request)

    def remove(self, key: Key) -> None:
        """Takes the request with this key out."""
        if key in self._keys:
            self._keys.remove(key)
            self._background.remove(key)
        else:
            self._foreground.remove(key)

    def check_invariants(self) -> None:
        """Everybody is where they belong."""
        self._foreground.check_invariants()
        self._background.check_invariants()
        assert len(self._keys) == len(self._background), f"{len(self._keys)} keys, {len(self._background)} requests"
        assert not any(request.arrival.background for request in self._foreground), "background in the foreground"
        assert all(request.arrival.background for request in self._background), "foreground in the background"


class Tiers:
    """See Order: two of them, of which the second makes room for the first."""

    def __init__(self, foreground: Order, background: Order) -> None:
        self.foreground = foreground
        self.background = background
        self.waiting = TieredQueue(foreground.waiting, background.waiting)
        self.running = TieredQueue(foreground.running, background.running)

    @property
    def has_background(self) -> bool:
        """Whether there is any such work."""
        return len(self.background.waiting) + len(self.background.running) > 0

    def arrived(self, request: Request) -> None:
        """A request is about to join the queue."""
        self._of(request).arrived(request)

    def pay(self, request: Request, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Work was done for it."""
        self._of(request).pay(request, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)

    def goes_before(self, head: Request, prefill: Request) -> bool:
        """Whether the head of a queue may start before a prefill of the same tier goes on."""
        return self._of(head).goes_before(head, prefill)

    def displaced_by(self, head: Request, limit: Limit) -> Request | None:
        """Background work before anybody else."""
        running = self.background.running
        if not head.arrival.background and limit in (Limit.SEQS, Limit.KV) and len(running):
            return running.last
        return self._of(head).displaced_by(head, limit)

    def _of(self, request: Request) -> Order:
        return self.background if request.arrival.background else self.foreground


class BackgroundRoom(Protocol):
    """Says how many tokens of background work go into a step."""

    def tokens(self, foreground: Iterable[ScheduledRequest], order: Order) -> int:
        """Beside what the step has already.

        Args:
            foreground: shares that are taken.
            order: of the background.
        """
        ...

    def begun(self, num_tokens: int) -> None:
        """A foreground request was admitted, with so many tokens to compute."""
        ...


class AllRoom:
    """As many as the step's budget has left: nobody knows how long that takes."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._most = max_num_batched_tokens

    def tokens(self, foreground: Iterable[ScheduledRequest], order: Order) -> int:
        """See BackgroundRoom."""
        del foreground, order
        return self._most

    def begun(self, num_tokens: int) -> None:
        """Nothing to learn."""


class TimedRoom:
    """As many as make no step, and no wait for the first one, longer than by a share of itself.

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
        self._typical = float(FIRST_GUESS)

    def tokens(self, foreground: Iterable[ScheduledRequest], order: Order) -> int:
        """See BackgroundRoom."""
        beside = self._layers.work_of_shares(foreground)
        is_alone = not beside.num_tokens
        limit_s = self._prompt_s() * self._slowdown if is_alone else self._seconds(beside) * (1 + self._slowdown)
        running = list(order.running)
        decodes = [r.num_computed_tokens for r in running if r.num_computed_tokens >= r.num_prefill_tokens]

        def work(num_decodes: int) -> StepWork:
            """Of a step with the most urgent decodes."""
            return beside + self._layers.work((start, 1, 1) for start in islice(decodes, num_decodes))

        num_decodes = largest(lambda n: self._seconds(work(n)) <= limit_s, min(len(decodes), self._most))
        if num_decodes < len(decodes):
            return num_decodes or int(is_alone)  # somebody has to get through
        prompt = _next_prompt(running, order.waiting)
        if prompt is None:
            return num_decodes
        start, num_left = prompt
        with_decodes = work(num_decodes)
        chunk = largest(
            lambda n: self._seconds(with_decodes + self._layers.work([(start, n, 1)])) <= limit_s,
            min(num_left, self._most),
        )
        return num_decodes + (max(chunk, LEAST_CHUNK) if is_alone and not decodes else chunk)

    def begun(self, num_tokens: int) -> None:
        """See BackgroundRoom."""
        self._typical += _LEARNED * (num_tokens - self._typical)

    def _prompt_s(self) -> float:
        """A typical prompt's, in steps of the budget."""
        left, start, seconds = max(1, round(self._typical)), 0, 0.0
        while left > 0:
            chunk = min(left, self._most)
            seconds += self._seconds(self._layers.work([(start, chunk, int(chunk == left))]))
            start, left = start + chunk, left - chunk
        return seconds

    def _seconds(self, work: StepWork) -> float:
        return self._step_times.seconds(work) if work != NO_WORK else 0.0


def _next_prompt(running: Iterable[Request], waiting: Queue) -> tuple[int, int] | None:
    """Tokens that are there, and tokens that are left, of the first prompt that could go on or begin."""
    for request in running:
        if request.num_computed_tokens < request.num_prefill_tokens:
            return request.num_computed_tokens, request.num_prefill_tokens - request.num_computed_tokens
    if len(waiting):
        head = waiting.first
        return 0, head.num_tokens + head.num_pending_tokens
    return None
