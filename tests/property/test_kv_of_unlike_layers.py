"""The KV manager over random patterns of layers: what each block holds, token by token, kept in lists beside it.

The model here knows no block table but what the runner is told, and no arithmetic of blocks but the definition: a group
has `tokens` places in a block, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from factories import unlike_layout
from oracle import naive_blocks
from twostroke.config.cache import CacheConfig
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.prefix_cache import hash_blocks

MOST_TOKENS = 120
PATTERNS = st.one_of(
    st.lists(st.sampled_from([None, None, 5, 9, 30]), min_size=1, max_size=14),
    st.builds(
        lambda window, num, times, rest: ([window] * num + [None]) * times + [window] * rest,
        st.integers(1, 40),
        st.integers(1, 6),
        st.integers(1, 4),
        st.integers(0, 3),
    ),
)
"""Of windows: any, and those of published models, such as 5 : 1 with a rest."""


FULL = st.sampled_from([(1, 2), (2, 2), (1, 6), (3, 4)])
"""KV heads of layers without a window, and their numbers; the others have one head of 2."""


def layout_of(windows: list[int | None], full: tuple[int, int], block_size: int) -> KVLayout:
    specs = [(*full, None) if window is None else (1, 2, window) for window in windows]
    return unlike_layout(specs, block_size=block_size, kv_format="f32")


@given(windows=PATTERNS, full=FULL, block_size=st.sampled_from([1, 2, 4, 8, 16]))
def test_a_kind_is_a_group_and_its_pages_lie_in_its_block(
    windows: list[int | None], full: tuple[int, int], block_size: int
) -> None:
    layout = layout_of(windows, full, block_size)
    assert [group.window for group in layout.groups] == list(dict.fromkeys(windows))
    assert sorted(layer for group in layout.groups for layer in group.layer_ids) == list(range(len(windows)))
    assert block_size % layout.block_size == 0
    if len(layout.groups) == 1:
        assert (layout.block_size, layout.groups[0].pages_per_block) == (block_size, 1)
    for group in layout.groups:
        ids, num_layers = layout.page_ids(group), len(group.layer_ids)
        assert group.pages_per_block >= 1
        page = layout.bytes_per_page(group)
        assert page == num_layers * layout.bytes_per_layer(group)
        assert page % ids.bytes_per_id == layout.bytes_per_block % ids.bytes_per_id == 0
        for block_id in (0, 1, 7):
            firsts = [page_id * ids.bytes_per_id for page_id in ids.of_blocks([block_id])]
            begin = block_id * layout.bytes_per_block
            assert firsts == [begin + page * nth for nth in range(group.pages_per_block)]
            assert firsts[-1] + page <= begin + layout.bytes_per_block


@dataclass
class Sequence:
    """Tokens of a request, how many have a place, and what the runner knows of its block tables."""

    token_ids: list[int]
    num_tokens: int
    rows: list[list[int]] = field(default_factory=list[list[int]])
    num_promised: int = 0


class UnlikeLayers(RuleBasedStateMachine):
    """Requests that begin alike grow, roll back, end and are found again."""

    @initialize(windows=PATTERNS, full=FULL, block_size=st.sampled_from([1, 2, 4]), room=st.integers(0, 40))
    def begin(self, windows: list[int | None], full: tuple[int, int], block_size: int, room: int) -> None:
        self.layout = layout_of(windows, full, block_size)
        num_blocks = self.layout.run_blocks(MOST_TOKENS) + room
        config = CacheConfig(block_size=self.layout.block_size)
        self.kv = KVCacheManager(self.layout, num_blocks, config, MOST_TOKENS)
        self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.live: dict[str, Sequence] = {}
        self.num_admitted = 0

    def hashes(self, token_ids: list[int]) -> tuple[bytes, ...]:
        return hash_blocks(token_ids, self.layout.block_size)

    @property
    def known(self) -> set[tuple[int, bytes]]:
        pool = self.kv._prefix_cache._pool  # type: ignore[attr-defined]
        return set(pool._block_ids)

    @rule(kind=st.integers(0, 1), num_tokens=st.integers(1, MOST_TOKENS), num_own=st.sampled_from([0, 0, 3, 30]))
    def admit(self, kind: int, num_tokens: int, num_own: int) -> None:
        """Admit a request with the longest cached prefix, which has to equal the naive one."""
        tokens = [kind] * max(0, num_tokens - num_own) + [2 + self.num_admitted] * min(num_own, num_tokens)
        hashes = self.hashes(tokens)
        cached = self.kv.find_cached(hashes, num_tokens)
        assert cached.num_tokens == naive_blocks.longest_prefix(self.layout, hashes, num_tokens, self.known)
        needed = self.kv.num_blocks_to_compute(MOST_TOKENS, MOST_TOKENS)
        promised = sum(self.kv.num_blocks_outstanding(name) for name in self.live)
        if self.kv.num_blocks_to_admit(cached, needed) + promised > self.kv.num_free_blocks:
            return
        name, self.num_admitted = f"r{self.num_admitted}", self.num_admitted + 1
        self.kv.admit(name, cached, needed)
        self.live[name] = Sequence(tokens, cached.num_tokens, [[] for _ in self.layout.groups])
        self.compute(name, num_tokens - cached.num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 40), num_rejected=st.integers(0, 5))
    def grow(self, data: st.DataObject, num_tokens: int, num_rejected: int) -> None:
        """Add tokens, of which the last may be drafts that are rejected."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        sequence = self.live[name]
        num_tokens = min(num_tokens, MOST_TOKENS - sequence.num_tokens)
        if not num_tokens:
            return
        before = sequence.num_tokens
        sequence.token_ids = sequence.token_ids[:before] + [9] * num_tokens
        self.compute(name, num_tokens, num_rejected=min(num_rejected, num_tokens - 1))

    def compute(self, name: str, num_tokens: int, num_rejected: int = 0) -> None:
        """Run a step: allocate, write K and V, read all that it sees, and name blocks."""
        sequence = self.live[name]
        start, end = sequence.num_tokens, sequence.num_tokens + num_tokens
        updates = self.kv.try_allocate(name, start, end)
        assert updates is not None, "it was promised"
        for row, update in zip(sequence.rows, updates, strict=True):
            if update.block_ids:
                row[update.start :] = update.block_ids
        for position in range(start, end):
            for group_id in range(len(self.layout.groups)):
                self.memory[self.slot(sequence, group_id, position)] = self.content(sequence, group_id, position)
        for group_id, group in enumerate(self.layout.groups):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                found = self.memory.get(self.slot(sequence, group_id, position))
                assert found == self.content(sequence, group_id, position), f"{name}: {position} in group {group_id}"
        sequence.num_tokens = end - num_rejected
        if num_rejected:
            self.kv.roll_back(name, sequence.num_tokens)
            sequence.token_ids = sequence.token_ids[: sequence.num_tokens]
        self.kv.cache_blocks(name, self.hashes(sequence.token_ids), sequence.num_tokens)

    def slot(self, sequence: Sequence, group_id: int, position: int) -> tuple[int, int]:
        entry, offset = divmod(position, self.layout.tokens_per_block(self.layout.groups[group_id]))
        return sequence.rows[group_id][entry], offset

    @staticmethod
    def content(sequence: Sequence, group_id: int, position: int) -> tuple[int, tuple[int, ...]]:
        return group_id, tuple(sequence.token_ids[: position + 1])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[name]
        self.kv.free(name)

    @rule()
    def forget(self) -> None:
        self.kv.reset_prefix_cache()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        usage = self.kv.usage()
        assert usage.allocated_bytes == usage.num_used * self.layout.bytes_per_block
        assert usage.filled_bytes == self.filled_bytes()
        for name in self.live:
            assert self.kv.num_blocks_held(name) <= self.layout.peak_blocks(MOST_TOKENS, MOST_TOKENS)

    def filled_bytes(self) -> int:
        """Return the bytes of slots in the tables' blocks that hold a token, each counted once."""
        filled: set[tuple[int, int, int]] = set()
        for name, sequence in self.live.items():
            table = self.kv._tables[name]
            for group_id, group in enumerate(self.layout.groups):
                size = self.layout.tokens_per_block(group)
                for position in range(table.first_held[group_id] * size, sequence.num_tokens):
                    filled.add((group_id, table.rows[group_id][position // size], position % size))
        sizes = [len(group.layer_ids) * group.spec.bytes_per_token("f32") for group in self.layout.groups]
        return sum(sizes[group_id] for group_id, _, _ in filled)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for name in self.live:
                self.kv.free(name)
            usage = self.kv.usage()
            assert usage.num_free + usage.num_cached == usage.num_blocks


TestUnlikeLayers = UnlikeLayers.TestCase
