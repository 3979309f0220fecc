"""Block accounting without cleverness: slow lists that say the rules outright."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.kv_cache.layout import KVLayout


@dataclass
class NaiveBlock:
    """One block."""

    ref_count: int = 0
    key: tuple[int, bytes] | None = None
    freed_at: int = 0
    is_bad: bool = False
    """Whether the block is out of use for ever."""


class NaiveBlockPool:
    """Knows which blocks may be allocated next, not which of equals."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [NaiveBlock() for _ in range(num_blocks)]
        self.clock = 0
        self.evicted: list[tuple[int, bytes]] = []
        """Evicted names that no block has again, oldest first."""

    def remembers(self, key: tuple[int, bytes]) -> bool:
        """Return whether the name is among the latest evicted ones; as many are kept as there are blocks."""
        return key in self.evicted[-len(self.blocks) :]

    def may_be_next(self) -> set[int]:
        """Return the free blocks without content; if there are none, the cached one that was freed first."""
        idle = [i for i, block in enumerate(self.blocks) if block.ref_count == 0 and not block.is_bad]
        blank = {i for i in idle if self.blocks[i].key is None}
        return blank or {min(idle, key=lambda i: self.blocks[i].freed_at)}

    def take(self, block_id: int) -> None:
        """Allocate the block."""
        assert block_id in self.may_be_next()
        key = self.blocks[block_id].key
        if key is not None:
            self.evicted = [*self.evicted[-len(self.blocks) :], key]
        self.blocks[block_id] = NaiveBlock(ref_count=1)

    def share(self, block_id: int) -> None:
        """Add a reference."""
        self.blocks[block_id].ref_count += 1

    def free(self, block_id: int) -> None:
        """Drop a reference."""
        self.clock += 1
        self.blocks[block_id].ref_count -= 1
        self.blocks[block_id].freed_at = self.clock

    def name(self, block_id: int, key: tuple[int, bytes]) -> None:
        """Name a block, unless another one has the name."""
        if self.find(key) is None:
            self.blocks[block_id].key = key
            self.evicted = [other for other in self.evicted[-len(self.blocks) :] if other != key]

    def forget_hashes(self) -> None:
        """Remove the names of all blocks."""
        for block in self.blocks:
            block.key = None

    def quarantine(self, block_id: int) -> None:
        """Take a block out of use, and remove its name."""
        self.blocks[block_id] = NaiveBlock(is_bad=True)

    def find(self, key: tuple[int, bytes]) -> int | None:
        """Search every block."""
        return next((i for i, block in enumerate(self.blocks) if block.key == key), None)


def longest_prefix(
    layout: KVLayout, block_hashes: Sequence[bytes], num_tokens: int, known: set[tuple[int, bytes]]
) -> int:
    """Return the tokens of the longest usable prefix; tries every length, the longest first."""
    for length in range(min(len(block_hashes) * layout.block_size, num_tokens - 1), 0, -1):
        if all(
            length % layout.tokens_per_block(group) == 0
            and names_needed(layout, group_id, length, block_hashes) <= known
            for group_id, group in enumerate(layout.groups)
        ):
            return length
    return 0


def names_needed(
    layout: KVLayout, group_id: int, num_tokens: int, block_hashes: Sequence[bytes]
) -> set[tuple[int, bytes]]:
    """Names of the blocks of a group that the query behind `num_tokens` tokens, whole blocks, sees."""
    group = layout.groups[group_id]
    size, first = layout.tokens_per_block(group), 0
    if group.window is not None:
        first = max(0, num_tokens - group.window + 1) // size
    return {
        (group_id, block_hashes[end * size // layout.block_size - 1])
        for end in range(first + 1, num_tokens // size + 1)
    }


def largest_window_demand(layout: KVLayout, num_tokens: int, chunk: int) -> int:
    """Return the largest number of held blocks while `num_tokens` are computed in chunks, by simulating the chunks."""
    worst = 0
    for start in range(0, num_tokens, chunk):
        end = min(num_tokens, start + chunk)
        held = sum(
            layout.num_blocks_of_prefix(group, end)
            - min(layout.first_needed_block(group, start), layout.num_blocks_of_prefix(group, end))
            for group in layout.groups
        )
        worst = max(worst, held)
    return worst
