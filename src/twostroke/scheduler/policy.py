"""Who goes first. One key per request, fixed at arrival, orders both queues:

    waiting   smallest key = head, admitted next          running   largest key = gives way when blocks run out

    fcfs       key = (arrival_time_s, number)
    priority   key = (priority x ageing_s + arrival_time_s, number)

A preempted request keeps its key, hence stands before everyone who came after it.

Why nobody starves under `priority`: let a have priority p and arrive at t, and b priority q < p, d = p - q. Then b
goes before a only if  q x ageing_s + t_b < p x ageing_s + t,  that is  t_b < t + d x ageing_s.  Whoever arrives more
than d x ageing_s seconds after a never overtakes it, and only finitely many arrive before that. Since the key does
not move with the clock, waiting is "ageing" without any work per step: all keys would age at the same rate.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from twostroke.config.scheduler import SchedulerConfig
from twostroke.request import Arrival, Request

Key = tuple[float, int]
"""Urgency in seconds, smaller is more urgent; then the number of the arrival, so that keys are unique."""


def make_policy(config: SchedulerConfig) -> Callable[[Arrival, int], Key]:
    """The function that gives an arrival its key."""
    ageing_s = {"fcfs": 0.0, "priority": config.ageing_s}[config.policy]

    def key(arrival: Arrival, number: int) -> Key:
        return arrival.priority * ageing_s + arrival.arrival_time_s, number

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

    def add(self, key: Key, request: Request) -> None:
        """Puts a request in its place."""
        at = bisect.bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, request)

    def remove(self, key: Key) -> None:
        """Takes the request with this key out."""
        at = bisect.bisect_left(self._keys, key)
        assert self._keys[at : at + 1] == [key], f"no request with key {key}"
        del self._keys[at]
        del self._requests[at]

    def check_invariants(self) -> None:
        """Keys rise strictly."""
        assert all(a < b for a, b in zip(self._keys, self._keys[1:], strict=False)), "the queue is out of order"
        assert len(self._keys) == len(self._requests), f"{len(self._keys)} keys, {len(self._requests)} requests"
