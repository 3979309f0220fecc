"""Fairness among tenants: who has been served least goes first.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant pays for what is
computed for it: `fair_prompt_weight` a prompt token when its request is admitted (cached ones are free), and
`fair_output_weight` an output token when it is committed. Of the tenants with somebody waiting the one that has paid
least is served next. A tenant that comes back from idling is lifted to the least of those who are active: idling earns
nothing. For two tenants that never run out of requests, what they have paid differs by at most
2 x max(prompt weight x longest prompt, output weight x tokens that run at once): the paper's bound, which
tests/property/test_fairness.py holds this one to.

That alone lets a flood fill all slots before a newcomer arrives. So, beyond the paper:

    a slot or KV    the head of the queue may displace the youngest request of the tenant that holds most, as long as
                    that tenant still holds no less than the head's afterwards. Then it cannot be displaced back: both
                    have moved towards the same share, and they do so at most once a step.
    token budget    prefills go by how many requests their tenant has running, fewest first; a head whose tenant has
                    fewer running than that of a prefill under way goes before its next chunk; of one tenant's own,
                    the earlier key goes first where there is a limit for the TTFT (policy.py)
    KV shortage     the youngest request of the tenant with most running gives way

Nobody starves: a tenant's own requests keep their order, everybody who is served before its first one pays for it, and
whoever is displaced is the youngest of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twostroke.batch import Limit
from twostroke.config.scheduler import SchedulerConfig
from twostroke.request import Request
from twostroke.scheduler.policy import DeadlineOrder, QueueOrder, RequestQueue

Rank = Callable[[str], tuple[float, ...]]
"""Of a tenant, smaller goes first. It may change with everything that happens."""


class TenantQueues:
    """A queue in the order of the tenants' ranks as they are now, and within each tenant in the order of the keys."""

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
        """Who has a request here."""
        return iter(self._queues)

    @property
    def first(self) -> Request:
        """The first of the tenant that goes first."""
        return min(self._queues.items(), key=lambda item: (self._rank(item[0]), item[1].first_key))[1].first

    @property
    def last(self) -> Request:
        """The last of the tenant that goes last."""
        return max(self._queues.items(), key=lambda item: (self._rank(item[0]), item[1].last_key))[1].last

    def num_of(self, tenant: str) -> int:
        """Requests of this tenant."""
        return len(self._queues.get(tenant, ()))

    def of(self, tenant: str) -> RequestQueue:
        """The queue of a tenant that has one."""
        return self._queues[tenant]

    def snapshot(self) -> tuple[Request, ...]:
        """The requests as they stand, to walk through while the queue changes."""
        return tuple(self)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        self._num_requests += 1
        self._queues.setdefault(request.arrival.tenant, RequestQueue()).add(request)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        tenant = request.arrival.tenant
        self._num_requests -= 1
        self._queues[tenant].remove(request)
        if not self._queues[tenant]:
            del self._queues[tenant]

    def check_invariants(self) -> None:
        """Every tenant's queue is in order, and none is empty."""
        for tenant, queue in self._queues.items():
            queue.check_invariants()
            assert queue, f"an empty queue of {tenant!r}"
            assert all(request.arrival.tenant == tenant for request in queue), f"somebody else's in {tenant!r}'s queue"
        assert len(self) == sum(map(len, self._queues.values())), "requests were counted wrong"


class FairOrder(QueueOrder):
    """Both queues by what tenants have paid; within a tenant by the keys.

    Args:
        config: the weights of tokens, and whether there is a limit for the TTFT (policy.py). Without one, prefills of
            one tenant that are under way keep their places.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__()
        self._goes_by_keys = config.ttft_slo is not None
        self._prompt_weight = config.fair_prompt_weight
        self._output_weight = config.fair_output_weight
        self._paid: dict[str, float] = {}
        self._paid_by_last = 0.0
        """What the tenant had paid that was active last."""
        self.running = self._running = TenantQueues(self._num_running)
        self.waiting = self._waiting = TenantQueues(self._service)

    def arrived(self, request: Request) -> None:
        """Lifts a tenant that comes back."""
        tenant = request.arrival.tenant
        active = {*self._waiting.tenants, *self._running.tenants}
        if tenant not in active:
            least = min((self._paid[other] for other in active), default=self._paid_by_last)
            self._paid[tenant] = max(self._paid.get(tenant, 0.0), least)

    def pay(self, request: Request, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Charges the request's tenant."""
        price = self._prompt_weight * num_prompt_tokens + self._output_weight * num_output_tokens
        self._paid[request.arrival.tenant] += price
        self._paid_by_last = self._paid[request.arrival.tenant]

    def goes_before(self, head: Request, prefill: Request) -> bool:
        """Whether the head of the queue may start before a prefill under way goes on."""
        ours, theirs = head.arrival.tenant, prefill.arrival.tenant
        if ours == theirs:
            return self._goes_by_keys and head.key < prefill.key
        return self._num_running(ours) < self._num_running(theirs)

    def displaced_by(self, head: Request, limit: Limit) -> Request | None:
        """Who has to make room for the head of the queue, which lacks a slot or KV."""
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
    """What it holds, or will once it has started."""
    return max(request.num_computed_tokens, request.num_tokens)


def make_order(config: SchedulerConfig) -> QueueOrder:
    """Return the queues that the policy asks for."""
    if config.policy == "fair":
        return FairOrder(config)
    return QueueOrder() if config.ttft_slo is None else DeadlineOrder()
