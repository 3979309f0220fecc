"""Policies: the order of both queues. One key per request, fixed at arrival, orders them:

    waiting   smallest key = head, admitted next          running   largest key = preempted when blocks run out

    fcfs       key = (arrival_time_s, number)
    priority   key = (priority x ageing_s + arrival_time_s, number)
    fair       key = (arrival_time_s, number) within a tenant; between tenants see below

With a TTFT limit (ttft_slo), a prompt that takes longer than the limit by itself cannot meet it, however soon it
starts. It yields to those that still can: its key is later by DELAY_FACTOR x own prefill - limit. So only requests that
arrive within that time after it overtake it, and equal prompts stay in the order of their arrival.

A preempted request keeps its key, so it is ahead of every request that arrived after it.

No request starves under `priority`. Let a have priority p and arrive at t, and b priority q < p, d = p - q. Then b
goes before a only if  q x ageing_s + t_b < p x ageing_s + t,  that is  t_b < t + d x ageing_s.  A request that arrives
more than d x ageing_s seconds after a never overtakes it, and only finitely many arrive before that. Since all keys
would age at the same rate, they need no update by the clock.

Fairness among tenants: the tenant served least goes first.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant is charged for
its computation: `fair_prompt_weight` per prompt token when its request is admitted (cached ones are free), and
`fair_output_weight` per output token when it is committed. Of the tenants with waiting requests, the one charged least
is served next. A tenant that returns from idling is lifted to the least counter of the active ones, so idling earns
no credit. For two tenants that never run out of requests, the counters differ by at most
2 x max(prompt weight x longest prompt, output weight x tokens that run at once): the paper's bound, which
tests/property/test_fairness.py checks.

This alone would let a flood fill all slots before another tenant arrives. So, beyond the paper:

    a slot or KV    the head of the queue may displace the youngest request of the tenant that holds most, if that
                    tenant still holds no less than the head's tenant afterwards. It cannot be displaced back: both
                    have moved towards the same share, at most once a step.
    token budget    prefills are ordered by their tenant's number of running requests, fewest first; a head whose tenant
                    has fewer running than the tenant of a prefill in progress goes before its next chunk; within a
                    tenant, the earlier key goes first if there is a TTFT limit
    KV shortage     the youngest request of the tenant with most running requests is preempted

No request starves: a tenant's own requests keep their order, every tenant served before is charged for it, and a
displaced request is always the youngest of several.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Protocol

from twostroke.batch import Limit
from twostroke.config.scheduler import SchedulerConfig
from twostroke.request import Arrival, Key, Request

DELAY_FACTOR = 4.0
"""Factor on its own prefill time by which a prompt that cannot meet the limit is delayed. Its prefill completes sooner
while other requests take less than three quarters of the time."""


def make_policy(
    config: SchedulerConfig, prefill_s: Callable[[int], float] | None = None
) -> Callable[[Arrival, int], Key]:
    """Return the function that computes an arrival's key.

    Args:
        config: with or without a limit for the TTFT.
        prefill_s: function from prompt tokens to the seconds of their prefill alone; None: unknown.
    """
    ageing_s = config.ageing_s if config.policy == "priority" else 0.0
    limit_s = config.ttft_slo_s

    def key(arrival: Arrival, number: int) -> Key:
        later_s = 0.0
        if (
            limit_s is not None and prefill_s is not None and arrival.import_id is None
        ):  # an imported request has no prefill here
            own_s = prefill_s(arrival.num_prompt_tokens)
            later_s = DELAY_FACTOR * own_s - limit_s if own_s > limit_s else 0.0
        return arrival.priority * ageing_s + arrival.arrival_time_s + later_s, number

    return key


class RequestQueue:
    """Requests in the order of their keys. Reading an end is O(1); add and remove are a binary search and a shift
    of pointers, a few microseconds with a hundred thousand requests waiting."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first_key(self) -> Key:
        """Key of the most urgent request."""
        return self._keys[0]

    @property
    def last_key(self) -> Key:
        """Key of the least urgent request."""
        return self._keys[-1]

    @property
    def first(self) -> Request:
        """The most urgent request."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """The least urgent request."""
        return self._requests[-1]

    def snapshot(self) -> tuple[Request, ...]:
        """Return a copy of the queue, to iterate over while the queue changes."""
        return tuple(self._requests)

    def add(self, request: Request) -> None:
        """Insert a request by its key."""
        at = bisect.bisect_left(self._keys, request.key)
        self._keys.insert(at, request.key)
        self._requests.insert(at, request)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        at = bisect.bisect_left(self._keys, request.key)
        assert self._keys[at : at + 1] == [request.key], f"no request with key {request.key}"
        del self._keys[at]
        del self._requests[at]

    def check_invariants(self) -> None:
        """Check that keys strictly increase."""
        assert all(a < b for a, b in zip(self._keys, self._keys[1:], strict=False)), "the queue is out of order"
        assert len(self._keys) == len(self._requests), f"{len(self._keys)} keys, {len(self._requests)} requests"


class Queue(Protocol):
    """Requests in an order, as in RequestQueue."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def first(self) -> Request:
        """The most urgent request."""
        ...

    @property
    def last(self) -> Request:
        """The least urgent request."""
        ...

    def snapshot(self) -> tuple[Request, ...]:
        """Return a copy of the queue, to iterate over while the queue changes."""
        ...

    def add(self, request: Request) -> None:
        """Insert a request in its place."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a request."""
        ...

    def check_invariants(self) -> None:
        """Check the order."""
        ...


class QueueOrder:
    """Both queues, and a policy's reaction to completed work.

    Here only the keys matter: completed work changes nothing, and no running request makes room for a waiting one.
    """

    def __init__(self) -> None:
        self.waiting: Queue = RequestQueue()
        """Queue whose first request is admitted next."""
        self.running: Queue = RequestQueue()
        """Queue whose last request is preempted when blocks run out."""

    def on_arrival(self, request: Request) -> None:
        """Note that a request is about to join the queue."""

    def charge(self, request: Request, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Charge for work that was done for a request."""

    def may_overtake(self, head: Request, prefill: Request) -> bool:
        """Return whether the head of the queue may start before a prefill in progress continues."""
        del head, prefill
        return False

    def find_displaced(self, head: Request, limit: Limit) -> Request | None:
        """Return the request to displace for the head of the queue, which this limit keeps out; None: the head
        waits."""
        del head, limit
        return None


class DeadlineOrder(QueueOrder):
    """Order by the keys, also for prefills in progress.

    The head of the queue starts before a running prefill continues if its key is earlier. The module's text explains
    the keys.
    """

    def may_overtake(self, head: Request, prefill: Request) -> bool:
        return head.key < prefill.key


# ------------------------------------------------------------------ fairness among tenants


Rank = Callable[[str], tuple[float, ...]]
"""Rank of a tenant; smaller goes first. Any event may change it."""


class TenantQueues:
    """A queue ordered by the tenants' current ranks, and within each tenant by the keys."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._queues: dict[str, RequestQueue] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._queues, key=lambda tenant: (self._rank(tenant), self._queues[tenant].first_key)):
            yield from self._queues[tenant]

    @property
    def tenants(self) -> Iterator[str]:
        """Tenants with a request in the queue."""
        return iter(self._queues)

    @property
    def first(self) -> Request:
        """The first request of the first tenant."""
        return min(self._queues.items(), key=lambda item: (self._rank(item[0]), item[1].first_key))[1].first

    @property
    def last(self) -> Request:
        """The last request of the last tenant."""
        return max(self._queues.items(), key=lambda item: (self._rank(item[0]), item[1].last_key))[1].last

    def num_of(self, tenant: str) -> int:
        """Return the number of requests of a tenant."""
        return len(self._queues.get(tenant, ()))

    def of(self, tenant: str) -> RequestQueue:
        """Return the queue of a tenant. KeyError: no request of the tenant is in it."""
        return self._queues[tenant]

    def snapshot(self) -> tuple[Request, ...]:
        return tuple(self)

    def add(self, request: Request) -> None:
        self._num_requests += 1
        self._queues.setdefault(request.arrival.tenant, RequestQueue()).add(request)

    def remove(self, request: Request) -> None:
        tenant = request.arrival.tenant
        self._num_requests -= 1
        self._queues[tenant].remove(request)
        if not self._queues[tenant]:
            del self._queues[tenant]

    def check_invariants(self) -> None:
        """Check that every tenant's queue is in order, and none is empty."""
        for tenant, queue in self._queues.items():
            queue.check_invariants()
            assert queue, f"an empty queue of {tenant!r}"
            assert all(request.arrival.tenant == tenant for request in queue), f"somebody else's in {tenant!r}'s queue"
        assert len(self) == sum(map(len, self._queues.values())), "requests were counted wrong"


class FairOrder(QueueOrder):
    """Both queues ordered by the tenants' charges, and within a tenant by the keys.

    Args:
        config: the weights of tokens, and the TTFT limit, if any. Without one, prefills of one tenant that are in
            progress keep their places.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__()
        self._goes_by_keys = config.ttft_slo is not None
        self._prompt_weight = config.fair_prompt_weight
        self._output_weight = config.fair_output_weight
        self._paid: dict[str, float] = {}
        self._paid_by_last = 0.0
        """Charge of the tenant that was active last."""
        self.running = self._running = TenantQueues(self._num_running)
        self.waiting = self._waiting = TenantQueues(self._service)

    def on_arrival(self, request: Request) -> None:
        """Lift the counter of a tenant that returns from idling."""
        tenant = request.arrival.tenant
        active = {*self._waiting.tenants, *self._running.tenants}
        if tenant not in active:
            least = min((self._paid[other] for other in active), default=self._paid_by_last)
            self._paid[tenant] = max(self._paid.get(tenant, 0.0), least)

    def charge(self, request: Request, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Charge the request's tenant."""
        price = self._prompt_weight * num_prompt_tokens + self._output_weight * num_output_tokens
        self._paid[request.arrival.tenant] += price
        self._paid_by_last = self._paid[request.arrival.tenant]

    def may_overtake(self, head: Request, prefill: Request) -> bool:
        ours, theirs = head.arrival.tenant, prefill.arrival.tenant
        if ours == theirs:
            return self._goes_by_keys and head.key < prefill.key
        return self._num_running(ours) < self._num_running(theirs)

    def find_displaced(self, head: Request, limit: Limit) -> Request | None:
        """Return the request to displace for the head of the queue, which lacks a slot or KV."""
        if limit not in (Limit.SEQS, Limit.KV):
            return None
        weight = _one if limit is Limit.SEQS else _kv_tokens
        held = {tenant: sum(map(weight, self._running.of(tenant))) for tenant in self._running.tenants}
        tenant = max(held, key=lambda tenant: (held[tenant], self._running.of(tenant).last_key), default=None)
        if tenant is None or tenant == head.arrival.tenant:
            return None
        victim = self._running.of(tenant).last
        left = held[tenant] - weight(victim)
        return victim if left > 0 and left >= held.get(head.arrival.tenant, 0) + weight(head) else None

    def _num_running(self, tenant: str) -> tuple[float, ...]:
        return (self._running.num_of(tenant),)

    def _service(self, tenant: str) -> tuple[float, ...]:
        return self._paid[tenant], self._running.num_of(tenant)


def _one(request: Request) -> int:
    del request
    return 1


def _kv_tokens(request: Request) -> int:
    """Return the tokens whose KV a request holds, or will hold once it has started."""
    return max(request.num_computed_tokens, request.num_tokens)


def make_order(config: SchedulerConfig) -> QueueOrder:
    """Return the queues for the policy in the settings."""
    if config.policy == "fair":
        return FairOrder(config)
    return QueueOrder() if config.ttft_slo is None else DeadlineOrder()
