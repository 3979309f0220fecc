"""KV lender of a simulated process: production leases, with a simulated link instead of sending threads.

Each part of a lease is ready when the step that fills it has computed it; the layers of a step take equal shares of
its time. Messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.leases import Lease, LeaseBook, LeasePart, LenderSide
from twostroke.kv_transfer.transport import Fetched
from twostroke.simulation.link import Link, Transfer


@dataclass(slots=True, eq=False)
class _Read:
    """Prefix that another process fetches."""

    transfer: Transfer
    into: KVImport
    """Blocks to fill, in units of pages."""
    is_done: Callable[[Fetched], object]
    lease: Lease | None = None
    """Lease of the prefix; None until the lender knows it."""
    num_parts: int = 0
    """Parts of the lease that were added to the transfer."""


class SimulatedLender(LenderSide):
    """`LenderSide` in simulated time.

    Args:
        process: its name.
        layout: layout of its KV.
        num_layers: layers of the model.
        link: carries the fetched KV.
        clock: returns the simulated time.
    """

    def __init__(self, process: str, layout: KVLayout, num_layers: int, link: Link, clock: Callable[[], float]) -> None:
        super().__init__(LeaseBook(num_layers), clock, nullcontext())
        self._process = process
        self._layout = layout
        self._num_layers = num_layers
        self._link = link
        self._times: dict[int, list[tuple[float, float]]] = {}
        """Begin and end of the computation of each part, by lease."""
        self._complete: dict[int, Lease] = {}
        self._reads: dict[int, _Read] = {}
        self._may_have_ended = False
        """Set when a lease was killed or a reader left since the last `reap`."""
        self.step_s = (0.0, 0.0)
        """Begin and end of the last decided step."""

    @property
    def next_s(self) -> float | None:
        """Expiry time of the first lease without a reader; None if there is none."""
        unread = (lease.expires_s for lease in self._complete.values() if not lease.num_readers)
        return min(unread, default=None)

    def fetch(
        self, lease_id: int, receiver: str, into: KVImport, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        """Start sending a prefix; return a function that cancels it, as in `BorrowerSide`.

        Args:
            lease_id: the lease under which it is lent, or will be.
            receiver: name of the process that fetches.
            into: the pages to fill.
            is_done: called once, when the transfer has ended.
        """
        transfer = Transfer(self._process, receiver, on_done=partial(self._arrived, lease_id))
        self._reads[lease_id] = _Read(transfer, into, is_done)
        self._link.begin(transfer, self._clock())
        self._notify_readers(lease_id)
        return partial(self._end, lease_id, "it was given up")

    def reap(self) -> list[int]:
        """Return the leases that have ended; their blocks no longer need to be held."""
        next_s, now_s = self.next_s, self._clock()
        if not self._may_have_ended and (next_s is None or now_s < next_s):
            return []
        self._may_have_ended = False
        for lease in self._complete.values():
            if lease.num_readers:
                self._book.renew(lease, now_s)
        over = self._book.reap(now_s)
        for lease_id in over:
            self._times.pop(lease_id, None)
            self._complete.pop(lease_id, None)
        return over

    def _notify_readers(self, lease_id: int) -> None:
        lease, read = self._book.get(lease_id), self._reads.get(lease_id)
        if lease is not None:
            times = self._times.setdefault(lease_id, [])
            if len(lease.parts) > len(times):
                begin_s, end_s = self.step_s
                times.append((begin_s, begin_s if lease.num_layers_ready == self._num_layers else end_s))
            if lease.is_complete:
                self._complete[lease_id] = lease
            self._may_have_ended |= bool(lease.failure)
        if read is None:
            return
        lease = read.lease = read.lease or self._book.open(lease_id)
        if lease is None:
            if self._book.is_over(lease_id):
                self._end(lease_id, "the lease is over")
        elif lease.failure:
            self._end(lease_id, lease.failure)
        else:
            first, read.num_parts = read.num_parts, len(lease.parts)
            for part, part_s in zip(lease.parts[first:], self._times[lease_id][first:], strict=True):
                read.transfer.add(self._pieces(part, *part_s, read.into))
            read.transfer.has_all_pieces = lease.is_complete

    def _pieces(self, part: LeasePart, begin_s: float, end_s: float, into: KVImport) -> Iterator[tuple[float, int]]:
        """Yield (ready time, bytes) for each layer of a part, counting only blocks that the receiver lacks."""
        of_layers = {
            layer_id: (max(part.first, missing), self._layout.bytes_per_layer(group))
            for group, missing in zip(self._layout.groups, into.first_missing, strict=True)
            for layer_id in group.layer_ids
        }
        for layer_id, (first, layer_bytes) in sorted(of_layers.items()):
            ready_s = begin_s + (layer_id + 1) / self._num_layers * (end_s - begin_s)
            yield ready_s, max(0, part.end - first) * layer_bytes

    def _arrived(self, lease_id: int) -> None:
        lease = self._reads[lease_id].lease
        assert lease is not None, f"lease {lease_id} was fetched before it was granted"
        self._end(lease_id, self._book.settle(lease))

    def _end(self, lease_id: int, problem: str) -> None:
        """End a transfer, successful or not."""
        read = self._reads.pop(lease_id, None)
        if read is None:
            return
        self._link.drop(read.transfer)
        if read.lease is not None:
            self._book.close(read.lease)
        self._may_have_ended = True
        read.is_done(Fetched(problem, read.transfer.num_bytes, busy_s=read.transfer.busy_s))
