"""The book of leases, under random calls with a clock that only the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twostroke.kv_transfer.leases import Lease, LeaseBook

NUM_LAYERS = 3
LEASE_S = 10.0


@dataclass
class Naive:
    """Expected state of one lease, from the order of its events."""

    num_blocks: int
    num_begun: int = 0
    is_complete: bool = False
    was_killed: bool = False
    is_returned: bool = False
    is_reaped: bool = False
    expires_s: float = 0.0
    readers: list[Lease] = field(default_factory=list[Lease])


class LeaseMachine(RuleBasedStateMachine):
    """Requests lend, readers come and go, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook(NUM_LAYERS, LEASE_S)
        self.now_s = 0.0
        self.naive: dict[int, Naive] = {}

    def draw(self, data: st.DataObject, *, where: list[int]) -> tuple[int, Naive]:
        lease_id = data.draw(st.sampled_from(where))
        return lease_id, self.naive[lease_id]

    @property
    def computing(self) -> list[int]:
        """Leases for which the engine may call methods other than `invalidate`."""
        found = self.naive.items()
        return [i for i, lease in found if not (lease.is_complete or lease.was_killed or lease.is_reaped)]

    @property
    def read(self) -> list[int]:
        return [i for i, lease in self.naive.items() if lease.readers]

    @rule(num_blocks=st.integers(1, 5))
    def grant(self, num_blocks: int) -> None:
        """Grant a lease; numbers are never reused."""
        lease_id = len(self.naive)
        self.book.grant(lease_id, num_blocks, self.now_s)
        self.naive[lease_id] = Naive(num_blocks)

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), is_computed=st.booleans())
    def begin_part(self, data: st.DataObject, is_computed: bool) -> None:
        """Begin a part after the end of the last one, within the lent blocks."""
        lease_id, naive = self.draw(data, where=self.computing)
        end = data.draw(st.integers(0, naive.num_blocks + 2))
        self.book.begin_part(lease_id, [range(100, 110), range(200, 210)], end, is_computed=is_computed)
        lease = self.book.get(lease_id)
        assert lease is not None
        if min(end, naive.num_blocks) > naive.num_begun:
            part = lease.parts[-1]
            assert part.first == naive.num_begun
            assert part.rows == tuple(tuple(range(row + part.first, row + part.end)) for row in (100, 200))
            assert lease.num_layers_ready == (NUM_LAYERS if is_computed else 0)
        naive.num_begun = max(naive.num_begun, min(end, naive.num_blocks))
        assert lease.num_entries_begun == naive.num_begun

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), num_layers=st.integers(0, NUM_LAYERS))
    def layer_ready(self, data: st.DataObject, num_layers: int) -> None:
        """Mark a layer as ready; it stays ready."""
        lease_id, _ = self.draw(data, where=self.computing)
        lease = self.book.get(lease_id)
        assert lease is not None
        before = lease.num_layers_ready
        self.book.layer_ready(lease_id, num_layers)
        assert lease.num_layers_ready == max(before, num_layers)

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Complete a lease, which starts its timeout."""
        lease_id, naive = self.draw(data, where=self.computing)
        self.book.begin_part(lease_id, [range(100, 110), range(200, 210)], naive.num_blocks, is_computed=True)
        self.book.complete(lease_id, b"name", self.now_s)
        naive.num_begun, naive.is_complete = naive.num_blocks, True
        naive.expires_s = self.now_s + LEASE_S

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """Kill a lease at any time, even one that has ended."""
        lease_id, naive = self.draw(data, where=list(self.naive))
        self.book.invalidate(lease_id, "killed")
        naive.was_killed = naive.was_killed or not naive.is_reaped

    @rule()
    def invalidate_incomplete(self) -> None:
        """Simulate the end of the process's computing."""
        self.book.invalidate_incomplete("killed")
        for naive in self.naive.values():
            naive.was_killed |= not (naive.is_complete or naive.is_reaped)

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Open a lease for a reader; None if it has ended or was returned."""
        lease_id, naive = self.draw(data, where=list(self.naive))
        lease = self.book.open(lease_id)
        assert (lease is None) == (naive.is_reaped or naive.is_returned)
        if lease is not None:
            naive.readers.append(lease)

    @rule()
    def open_unknown(self) -> None:
        """Open a lease that was never granted: None."""
        assert self.book.open(len(self.naive)) is None
        assert not self.book.is_over(len(self.naive))

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        """Report progress, which restarts the timeout, except of dead leases."""
        _, naive = self.draw(data, where=self.read)
        lease = naive.readers[0]
        failure, expires_s = lease.failure, lease.expires_s
        self.book.renew(lease, self.now_s)
        assert lease.failure == failure
        if failure:
            assert lease.expires_s == expires_s
        else:
            naive.expires_s = self.now_s + LEASE_S

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Settle a read: its bytes count only if the lease was valid all the time."""
        _, naive = self.draw(data, where=self.read)
        failure = self.book.settle(naive.readers[0])
        if naive.was_killed:
            assert failure
        if not failure:
            naive.is_returned = True

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Remove a reader."""
        _, naive = self.draw(data, where=self.read)
        self.book.close(naive.readers.pop())

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    @rule()
    def reap(self) -> None:
        """Reap exactly the leases that have ended and have no reader, each once."""
        expected: list[int] = []
        for lease_id, naive in self.naive.items():
            if naive.is_reaped:
                continue
            if naive.is_complete and self.now_s >= naive.expires_s:
                naive.was_killed = True  # it has expired: a reader drops what it reads
            if (naive.is_returned or naive.was_killed) and not naive.readers:
                expected.append(lease_id)
        over = self.book.reap(self.now_s)
        assert sorted(over) == expected
        for lease_id in over:
            self.naive[lease_id].is_reaped = True

    @invariant()
    def dead_is_dead(self) -> None:
        """Check that dead leases stay dead, and that none is lost."""
        assert len(self.book) == sum(not naive.is_reaped for naive in self.naive.values())
        for lease_id, naive in self.naive.items():
            lease = self.book.get(lease_id)
            assert (lease is None) == naive.is_reaped
            assert self.book.is_over(lease_id) == (naive.is_reaped or naive.is_returned)
            for reader in naive.readers:
                assert reader is lease
            if lease is not None:
                assert bool(lease.failure) == naive.was_killed
                assert lease.num_readers == len(naive.readers)


TestLeases = LeaseMachine.TestCase
