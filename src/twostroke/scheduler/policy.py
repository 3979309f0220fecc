"""Who goes first. One key per request, fixed at arrival, orders both queues:

    waiting   smallest key = head, admitted next          running   largest key = gives way when blocks run out

    fcfs       key = (arrival_time_s, number)
    priority   key = (priority x ageing_s + arrival_time_s, number)
    fair       key = (arrival_time_s, number) among a tenant's own; among tenants see fair.py

With a limit for the TTFT (ttft_slo) a prompt that takes longer than that by itself cannot keep it, however soon it
starts. It gives way to those that still can: its key is later by GIVES_WAY x own prefill - limit. So it is overtaken
only by requests that arrive less than that after it, and equal prompts stay in the order of their arrival.

A preempted request keeps its key, hence stands before everyone who came after it.

Why nobody starves under `priority`: let a have priority p and arrive at t, and b priority q < p, d = p - q. Then b
goes before a only if  q x ageing_s + t_b < p x ageing_s + t,  that is  t_b < t + d x ageing_s.  Whoever arrives more
than d x ageing_s seconds after a never overtakes it, and only finitely many arrive before that. Since the key does
not move with the clock, waiting is "ageing" without any work per step: all keys would age at the same rate.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Protocol

from twostroke.batch import Limit
from twostroke.config.scheduler import SchedulerConfig
from twostroke.request import Arrival, Key, Request

GIVES_WAY = 4.0
"""Factor on its own prefill time by which a prompt gives way when it cannot keep the limit. It is done sooner while
other requests take less than three quarters of the time."""


def make_policy(
    config: SchedulerConfig, prefill_s: Callable[[int], float] | None = None
) -> Callable[[Arrival, int], Key]:
    """Return the function that gives an arrival its key.

    Args:
        config: with or without a limit for the TTFT.
        prefill_s: function from prompt tokens to the seconds of their prefill alone; None: unknown.
    """
    ageing_s = config.ageing_s if config.policy == "priority" else 0.0
    limit_s = config.ttft_slo_s

    def key(arrival: Arrival, number: int) -> Key:
        later_s = 0.0
        if limit_s is not None and prefill_s is not None and arrival.import_id is None:  # else it has no prefill here
            own_s = prefill_s(arrival.num_prompt_tokens)
            later_s = GIVES_WAY * own_s - limit_s if own_s > limit_s else 0.0
        return arrival.priority * ageing_s + arrival.arrival_time_s + later_s, number

    return key


class RequestQueue:
    """Requests in the order of their keys. Looking at an end is O(1); add and remove are a binary search and a shift
    of pointers, a few microseconds with a hundred thousand waiting."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first_key(self) -> Key:
        """Of the most urgent."""
        return self._keys[0]

    @property
    def last_key(self) -> Key:
        """Of the least urgent."""
        return self._keys[-1]

    @property
    def first(self) -> Request:
        """The most urgent."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """The least urgent."""
        return self._requests[-1]

    def snapshot(self) -> tuple[Request, ...]:
        """The requests as they stand, to walk through while the queue changes."""
        return tuple(self._requests)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        at = bisect.bisect_left(self._keys, request.key)
        self._keys.insert(at, request.key)
        self._requests.insert(at, request)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        at = bisect.bisect_left(self._keys, request.key)
        assert self._keys[at : at + 1] == [request.key], f"no request with key {request.key}"
        del self._keys[at]
        del self._requests[at]

    def check_invariants(self) -> None:
        """Keys rise strictly."""
        assert all(a < b for a, b in zip(self._keys, self._keys[1:], strict=False)), "the queue is out of order"
        assert len(self._keys) == len(self._requests), f"{len(self._keys)} keys, {len(self._requests)} requests"


class Queue(Protocol):
    """Requests in an order; see RequestQueue."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def first(self) -> Request:
        """The most urgent."""
        ...

    @property
    def last(self) -> Request:
        """The least urgent."""
        ...

    def snapshot(self) -> tuple[Request, ...]:
        """The requests as they stand."""
        ...

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out."""
        ...

    def check_invariants(self) -> None:
        """The order is what it should be."""
        ...


class QueueOrder:
    """Both queues, and what a policy makes of who was served.

    Here the keys say it all: what was served changes nothing, and nobody who runs makes room for somebody who waits.
    """

    def __init__(self) -> None:
        self.waiting: Queue = RequestQueue()
        """Its first is admitted next."""
        self.running: Queue = RequestQueue()
        """Its last gives way when blocks run out."""

    def arrived(self, request: Request) -> None:
        """A request is about to join the queue."""

    def pay(self, request: Request, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Work was done for a request."""

    def goes_before(self, head: Request, prefill: Request) -> bool:
        """Return whether the head of the queue may start before a prefill under way goes on."""
        del head, prefill
        return False

    def displaced_by(self, head: Request, limit: Limit) -> Request | None:
        """Return who has to make room for the head of the queue, which this limit keeps out; None: it waits."""
        del head, limit
        return None


class DeadlineOrder(QueueOrder):
    """Order by the keys, also for prefills in progress.

    A chunk goes first to the head of the queue if its key is earlier. The module says what makes a key earlier.
    """

    def goes_before(self, head: Request, prefill: Request) -> bool:
        """Compare the keys."""
        return head.key < prefill.key
