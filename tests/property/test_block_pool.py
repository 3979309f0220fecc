"""The block pool against slow lists, under random calls."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oracle.naive_blocks import NaiveBlockPool
from twostroke.kv_cache.block_pool import BlockPool

ALL_KEYS = [(group_id, name) for group_id in (0, 1) for name in (b"a", b"b", b"c", b"d")]
KEYS = st.sampled_from(ALL_KEYS)


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take, share, name and give back blocks."""

    @initialize(num_blocks=st.integers(1, 8))
    def begin(self, num_blocks: int) -> None:
        """Make a new pool."""
        self.pool = BlockPool(num_blocks)
        self.naive = NaiveBlockPool(num_blocks)
        self.held: list[list[int]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        """Allocate: blank blocks first, then the cached one that was freed longest ago."""
        num_blocks = data.draw(st.integers(0, self.pool.num_free_blocks))
        block_ids = self.pool.allocate(num_blocks)
        for block_id in block_ids:
            self.naive.take(block_id)
        self.held.append(block_ids)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), key=KEYS)
    def name(self, data: st.DataObject, key: tuple[int, bytes]) -> None:
        """Name a full block."""
        block_id = data.draw(st.sampled_from([b for blocks in self.held for b in blocks]))
        if self.naive.blocks[block_id].key in (None, key):
            self.pool.name(block_id, *key)
            self.naive.name(block_id, key)

    @rule(key=KEYS)
    def share(self, key: tuple[int, bytes]) -> None:
        """Hit a prefix."""
        block_id = self.pool.find(*key)
        if block_id is not None:
            self.pool.share([block_id])
            self.naive.share(block_id)
            self.held.append([block_id])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """End a holder."""
        block_ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(reversed(block_ids))
        for block_id in reversed(block_ids):
            self.naive.free(block_id)

    @rule()
    def forget_hashes(self) -> None:
        """Reset the prefix cache as an administrator."""
        self.pool.forget_hashes()
        self.naive.forget_hashes()

    @precondition(lambda self: hasattr(self, "pool") and self.pool.num_free_blocks)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """Find a block without references to be corrupt."""
        idle = [i for i, block in enumerate(self.naive.blocks) if block.ref_count == 0 and not block.is_bad]
        block_id = data.draw(st.sampled_from(idle))
        self.pool.quarantine(block_id)
        self.naive.quarantine(block_id)

    @invariant()
    def agrees(self) -> None:
        """Check that both pools agree."""
        self.pool.check_invariants()
        assert self.pool.num_quarantined == sum(block.is_bad for block in self.naive.blocks)
        num_sound = self.pool.num_blocks - self.pool.num_quarantined
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == num_sound
        for block_id, block in enumerate(self.naive.blocks):
            assert self.pool.ref_count(block_id) == block.ref_count
            if block.key is not None:
                assert self.pool.find(*block.key) == block_id
        for key in ALL_KEYS:
            assert self.pool.was_evicted(*key) == self.naive.remembers(key)
        assert self.pool.num_cached == sum(b.ref_count == 0 and b.key is not None for b in self.naive.blocks)


TestBlockPool = BlockPoolMachine.TestCase
