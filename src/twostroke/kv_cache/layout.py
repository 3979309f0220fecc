"""Division of KV memory: the exact size formula, and the layers that share a block.

Every block of the pool has the same number of bytes, whatever kind of layer it serves. Layers of one kind (equal
KVSpec) are a group. A block holds some tokens of all layers of a group, and a request has one block table per group:

    22 layers with a window, 4 full ones         a block: 44 x 8 tokens of a layer
      group 0: window    16 tokens x 22 layers   = 2 pages of 8 tokens      frees entries that left the window
      group 1: full      88 tokens x  4 layers   = 11 pages of 8 tokens

A page is `block_size` tokens of all layers of a group. Kernels read it by one id of a block table, and prefixes are
hashed page by page. If all layers are alike, as in most models, a block is a page. Kinds may differ in heads and
head_dim: their pages then differ in bytes, and a block holds more or fewer of them.

    bytes per page  = layers x (K, V) x num_kv_heads x block_size x slot bytes
    bytes per block = the largest of pages_per_block x bytes per page, over the groups

A slot is K, or V, of one token in one head: head_dim numbers and, if they are quantized, their scale and zero
(config/kv_format.py). The slots of a head are a contiguous run of bytes, so that (offset, length) locates any
heads of any layer; the backend decides their order inside (`AttentionOperator.kv_order`). Compared with bfloat16, a
block of equal bytes holds, at head_dim 128, 256 / 132 = 1.94 times the tokens in int8 and 256 / 68 = 3.76 times in
int4.

docs/decisions/043 and 044 give the reasons for this division and its costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twostroke.config.kv_format import KVFormat, slot_bytes
from twostroke.config.layer_spec import KVSpec
from twostroke.config.model import MAX_LAYERS

MAX_WASTE = 0.04
"""Largest share of the blocks' bytes that may hold nothing, for `_division`."""
_TYPICAL_TOKENS = (128, 512, 2048)
"""Lengths of the requests for which a division is chosen. Their waste is within 0.7 percentage points of the waste of
the skewed workload (benchmarks/reproduce/skewed.py), for all sizes of Gemma 3."""
_MAX_PARTS = 4
"""Limit of a block's size as a multiple of a page of the largest group, and of a page's size as a fraction of the
requested block size."""
_MAX_STEPS = MAX_LAYERS
"""Sizes of a block that are tried up to that of the largest group; every size, if layers differ only in the window."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables."""

    layer_ids: tuple[int, ...]
    spec: KVSpec
    """KV spec of each of these layers."""
    pages_per_block: int = 1

    @property
    def window(self) -> int | None:
        """Tokens that a query attends to, itself included; None: all."""
        return self.spec.window


@dataclass(frozen=True, slots=True)
class PageIds:
    """Ids by which kernels find the pages of a group.

    An id counts units of `bytes_per_id` from the start of the pool; the layers of a page are adjacent.

    ```
    block       | 0                                       | 1                                        44 layers each
    window id   | 0                   | 1                 | 2                   | 3                  22 layers
    full id     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |10 | 11 | 12 …                               4 layers
    ```
    """

    per_block: int
    """Number of pages in a block."""
    step: int
    """Difference between the ids of neighbouring pages in a block."""
    stride: int
    """Difference between the ids of the first pages of neighbouring blocks."""
    bytes_per_id: int

    def of_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """Return the ids of all pages of these blocks, in order.

        >>> PageIds(per_block=2, step=3, stride=10, bytes_per_id=64).of_blocks([0, 4])
        [0, 3, 40, 43]
        """
        if self.per_block == 1 and self.stride == 1:
            return list(block_ids)
        pages = range(0, self.per_block * self.step, self.step)
        return [block_id * self.stride + page for block_id in block_ids for page in pages]

    def num_ids(self, num_blocks: int) -> int:
        """Return the number of ids of such a pool; not every id is a page's."""
        return num_blocks * self.stride


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The division of KV memory for one model, block size and format."""

    groups: tuple[KVGroup, ...]
    block_size: int
    """Number of tokens in a page."""
    kv_format: KVFormat

    @classmethod
    def of(cls, layers: Sequence[KVSpec], *, block_size: int, kv_format: KVFormat) -> KVLayout:
        """Make each kind of layer a group.

        Args:
            layers: the model's layers that keep KV.
            block_size: tokens of a block, if all layers are alike. Otherwise the tokens of one group's block, and pages
                may be smaller.
            kv_format: of K and V.

        >>> full, window = (KVSpec(num_kv_heads=2, head_dim=8, window=window) for window in (None, 512))
        >>> layout = KVLayout.of(([window] * 5 + [full]) * 4 + [window] * 2, block_size=16, kv_format="bf16")
        >>> layout.block_size, [(len(g.layer_ids), g.window, layout.tokens_per_block(g)) for g in layout.groups]
        (8, [(22, 512, 16), (4, None, 88)])
        """
        kinds: dict[KVSpec, list[int]] = {}
        for layer_id, spec in enumerate(layers):
            kinds.setdefault(spec, []).append(layer_id)
        # in numbers, not bytes: so pools of different formats divide their blocks alike
        widths = [spec.num_kv_heads * spec.head_dim for spec in kinds]
        unit = math.gcd(*widths)
        sizes = [len(ids) * width // unit for ids, width in zip(kinds.values(), widths, strict=True)]
        page_size, pages = _division(list(zip(sizes, (spec.window for spec in kinds), strict=True)), block_size)
        groups = (KVGroup(tuple(ids), spec, n) for (spec, ids), n in zip(kinds.items(), pages, strict=True))
        return cls(tuple(groups), page_size, kv_format)

    def for_ranks(self, num_ranks: int, num_ranks_here: int) -> KVLayout:
        """Return the layout of each of `num_ranks` ranks, if this is the layout of each of `num_ranks_here`."""
        groups = (
            replace(group, spec=group.spec.for_all_ranks(num_ranks_here).for_rank(num_ranks)) for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def tokens_per_block(self, group: KVGroup) -> int:
        """Return the tokens of one block of this group."""
        return group.pages_per_block * self.block_size

    @property
    def block_description(self) -> str:
        """The contents of a block, in words for messages.

        >>> full, window = (KVSpec(num_kv_heads=1, head_dim=8, window=window) for window in (None, 512))
        >>> KVLayout.of([full], block_size=16, kv_format="bf16").block_description
        '16 tokens'
        >>> KVLayout.of([window] * 22 + [full] * 4, block_size=16, kv_format="bf16").block_description
        '16 tokens of the layers that see 512, or 88 of those that see all'
        """
        sizes = {self.tokens_per_block(group) for group in self.groups}
        if len(sizes) == 1:
            return f"{sizes.pop():,} tokens"
        first, *others = (
            (self.tokens_per_block(group), "all" if group.window is None else f"{group.window:,}")
            for group in self.groups
        )
        words = f"{first[0]:,} tokens of the layers that see {first[1]}"
        return ", ".join([words, *(f"or {tokens:,} of those that see {seen}" for tokens, seen in others)])

    @property
    def prefix_tokens(self) -> int:
        """Granularity of the prefix cache: blocks of all groups end at multiples of so many tokens.

        >>> full, window = (KVSpec(num_kv_heads=1, head_dim=8, window=window) for window in (None, 512))
        >>> KVLayout.of([window] * 22 + [full] * 4, block_size=16, kv_format="bf16").prefix_tokens
        176
        """
        return math.lcm(*(group.pages_per_block for group in self.groups)) * self.block_size

    def page_ids(self, group: KVGroup) -> PageIds:
        """Return the numbering of this group's pages."""
        page, block = self.bytes_per_page(group), self.bytes_per_block
        per_id = math.gcd(page, block)
        return PageIds(group.pages_per_block, page // per_id, block // per_id, per_id)

    def bytes_per_head(self, group: KVGroup) -> int:
        """Return the bytes of one KV head's K, or V, in a page. They are contiguous."""
        return self.block_size * slot_bytes(self.kv_format, group.spec.head_dim)

    def bytes_per_layer(self, group: KVGroup) -> int:
        """Return the bytes of one layer's K and V in a page."""
        return self.block_size * group.spec.bytes_per_token(self.kv_format)

    def bytes_per_page(self, group: KVGroup) -> int:
        """Return the bytes of K and V of all layers of the group in a page."""
        return len(group.layer_ids) * self.bytes_per_layer(group)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers, ignoring windows."""
        return sum(len(g.layer_ids) * g.spec.bytes_per_token(self.kv_format) for g in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, the same for every group; a group may leave a rest unused."""
        return max(group.pages_per_block * self.bytes_per_page(group) for group in self.groups)

    @property
    def filling_group(self) -> KVGroup:
        """The group whose pages fill a block completely."""
        return max(self.groups, key=lambda group: group.pages_per_block * self.bytes_per_page(group))

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages of one group that cover `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of_prefix(self, group: KVGroup, num_tokens: int) -> int:
        """Return the entries of a group's block table that cover `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block(group))

    def first_needed_block(self, group: KVGroup, num_computed_tokens: int) -> int:
        """Return the first block table entry of `group` that the query at `num_computed_tokens` can still see.

        ```
        window 6, blocks of 4 tokens, query at position 13 (q):   keys 8..13 are visible
        |0 1 2 3|4 5 6 7|8 9 10 11|12 q .. |                      first needed entry: 2
        ```
        """
        return self.first_visible(group, num_computed_tokens) // self.tokens_per_block(group)

    @staticmethod
    def first_visible(group: KVGroup, position: int) -> int:
        """Return the first position that the query at `position` sees."""
        return 0 if group.window is None else max(0, position - group.window + 1)

    def run_blocks(self, max_model_len: int) -> int:
        """Return the blocks of a contiguous reservation for the longest request: every group's whole table, ignoring
        windows."""
        return sum(self.num_blocks_of_prefix(group, max_model_len) for group in self.groups)

    def capacity_tokens(self, num_blocks: int) -> int:
        """Return the tokens of the longest request that so many blocks hold, ignoring windows."""
        low, high = 0, num_blocks * max(map(self.tokens_per_block, self.groups))
        while low < high:
            middle = (low + high + 1) // 2
            if self.run_blocks(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def peak_blocks(self, num_tokens: int, max_tokens_per_step: int) -> int:
        """Return the most blocks, over all groups, that a request of `num_tokens` holds at once.

        A group with a window holds at most the window before a step's first query plus that step's tokens.
        """
        total = 0
        for group in self.groups:
            blocks = self.num_blocks_of_prefix(group, num_tokens)
            if group.window is not None:
                # window - 1 earlier tokens and the step's own can begin anywhere inside a block
                span = group.window - 1 + max_tokens_per_step
                size = self.tokens_per_block(group)
                blocks = min(blocks, (span + size - 2) // size + 1)
            total += blocks
        return total


def _division(kinds: Sequence[tuple[int, int | None]], block_size: int) -> tuple[int, list[int]]:
    """Choose the tokens of a page, and for each kind the pages of a block.

    Smaller blocks leave less unused at a request's end, and make prefixes findable in finer steps. Blocks that the
    kinds' layers divide well leave less unused in every block. So the function takes the largest pages for which some
    block keeps the waste of typical requests within MAX_WASTE (or within twice the waste of blocks of `block_size`
    tokens for each kind), and the smallest such block.

    Args:
        kinds: for each, the size of all its layers, in layers of the narrowest unit that divides all; and their window.
        block_size: tokens of a page, at most; a power of two.

    >>> _division([(40, 1024), (8, None)], 16), _division([(6, None)], 16)
    ((16, [1, 5]), (16, [1]))
    """
    if len(kinds) == 1:
        return block_size, [1]
    largest = max(size for size, _ in kinds)
    limit = max(MAX_WASTE, 2 * _waste(kinds, [(block_size, size * block_size) for size, _ in kinds]))
    least: tuple[float, int, list[int]] | None = None
    page_size = block_size
    while page_size and page_size * _MAX_PARTS >= block_size:
        for in_all in range(largest, _MAX_PARTS * largest + 1, max(1, largest // _MAX_STEPS)):
            pages = [in_all // size for size, _ in kinds]
            waste = _waste(kinds, [(n * page_size, in_all * page_size) for n in pages])
            if waste <= limit:
                return page_size, pages
            least = min(least or (waste, page_size, pages), (waste, page_size, pages))
        page_size //= 2
    assert least is not None
    return least[1:]


def _waste(kinds: Sequence[tuple[int, int | None]], blocks: Sequence[tuple[int, int]]) -> float:
    """Return the unused share of the blocks of typical requests, if their last blocks are half full.

    Args:
        kinds: as above.
        blocks: for each kind, tokens of a block, and its size in tokens of one such layer.
    """
    allocated = used = 0.0
    for (of_layers, window), (tokens, size) in zip(kinds, blocks, strict=True):
        for length in _TYPICAL_TOKENS:
            num_tokens = length if window is None else min(length, window)
            allocated += (num_tokens / tokens + 0.5) * size
            used += num_tokens * of_layers
    return 1 - used / allocated
