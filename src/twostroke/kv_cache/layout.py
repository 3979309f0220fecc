"""How KV memory is divided: the exact size formula, and which layers share a block.

Every block of the pool has the same number of bytes, whatever kind of layer it serves. Layers of one kind (same
sliding window, or none) are dealt into groups of equal size, and a block holds `block_size` tokens of one group:

    6 full layers, 3 with a window         layers_per_block = gcd(6, 3) = 3
      group 0: full    layers 0 1 2
      group 1: full    layers 3 4 5          a request has one block table per group;
      group 2: window  layers 6 7 8          group 2 gives back what fell out of the window

    bytes per block = layers_per_block x (K, V) x num_kv_heads x block_size x slot bytes

A slot is K, or V, of one token in one head: head_dim numbers and, where they are quantized, their scale and zero
(config/kv_format.py). The slots of a head are its own contiguous run of bytes, so that (offset, length) says where any
heads of any layer are; their order inside is the backend's (`AttentionOperator.kv_order`). Against bfloat16 a block of
equal bytes holds, at head_dim 128, 256 / 132 = 1.94 times the tokens in int8 and 256 / 68 = 3.76 times in int4.

Most models have layers of one kind and hence one group that holds all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twostroke.config.kv_format import KVFormat, slot_bytes
from twostroke.config.layer_spec import KVSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables."""

    layer_ids: tuple[int, ...]
    spec: KVSpec
    """Of each of them."""

    @property
    def window(self) -> int | None:
        """Tokens a query sees, itself included; None sees all."""
        return self.spec.window


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The division of KV memory for one model, block size and format."""

    groups: tuple[KVGroup, ...]
    block_size: int
    kv_format: KVFormat

    @classmethod
    def of(cls, layers: Sequence[KVSpec], *, block_size: int, kv_format: KVFormat) -> KVLayout:
        """Deals the layers into groups. Their KV differs in the window at most.

        >>> full, window = (KVSpec(num_kv_heads=2, head_dim=8, window=window) for window in (None, 64))
        >>> layout = KVLayout.of([full] * 6 + [window] * 3, block_size=16, kv_format="bf16")
        >>> [(g.layer_ids, g.window) for g in layout.groups]
        [((0, 1, 2), None), ((3, 4, 5), None), ((6, 7, 8), 64)]
        """
        kinds: dict[KVSpec, list[int]] = {}
        for layer_id, spec in enumerate(layers):
            kinds.setdefault(spec, []).append(layer_id)
        assert len({replace(spec, window=None) for spec in kinds}) == 1, f"KV of several shapes: {list(kinds)}"
        per_block = math.gcd(*(len(ids) for ids in kinds.values()))
        groups = tuple(
            KVGroup(tuple(ids[i : i + per_block]), spec)
            for spec, ids in kinds.items()
            for i in range(0, len(ids), per_block)
        )
        return cls(groups, block_size, kv_format)

    @property
    def num_kv_heads(self) -> int:
        """Of each layer."""
        return self.groups[0].spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Of each layer."""
        return self.groups[0].spec.head_dim

    def dealt_among(self, num_ranks: int, num_ranks_here: int) -> KVLayout:
        """Return the layout of each of `num_ranks` ranks, where this is that of each of `num_ranks_here`."""
        groups = (
            replace(
                group,
                spec=replace(group.spec, num_kv_heads=group.spec.num_kv_heads * num_ranks_here // num_ranks),
            )
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    @property
    def layers_per_block(self) -> int:
        """Layers whose K and V one block holds."""
        return len(self.groups[0].layer_ids)

    @property
    def bytes_per_head(self) -> int:
        """What the K, or the V, of one KV head takes in a block: one contiguous run."""
        return self.block_size * slot_bytes(self.kv_format, self.head_dim)

    @property
    def bytes_per_token_and_layer(self) -> int:
        """K and V of one token in one layer."""
        return self.groups[0].spec.bytes_per_token(self.kv_format)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers, windows aside."""
        return sum(len(g.layer_ids) for g in self.groups) * self.bytes_per_token_and_layer

    @property
    def bytes_per_block(self) -> int:
        """What one block takes; the same for every group."""
        return self.layers_per_block * self.block_size * self.bytes_per_token_and_layer

    def num_blocks_of_prefix(self, num_tokens: int) -> int:
        """Entries of one block table that cover `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def first_needed_block(self, group: KVGroup, num_computed_tokens: int) -> int:
        """First block table entry of `group` that the query at position `num_computed_tokens` can still see.

        ```
        window 6, block_size 4, query at position 13 (q):   keys 8..13 are visible
        |0 1 2 3|4 5 6 7|8 9 10 11|12 q .. |                first needed entry: 2
        ```
        """
        if group.window is None:
            return 0
        first_visible = max(0, num_computed_tokens - group.window + 1)
        return first_visible // self.block_size

    def run_blocks(self, max_model_len: int) -> int:
        """Blocks of a contiguous reservation: every group's whole table, windows or not, for the longest request."""
        return self.num_blocks_of_prefix(max_model_len) * len(self.groups)

    def peak_blocks(self, num_tokens: int, max_tokens_per_step: int) -> int:
        """Most blocks, over all groups, that a request of `num_tokens` holds at once.

        A group with a window holds, at its worst, the window before a step's first query plus that step's tokens.
        """
        total = 0
        for group in self.groups:
            blocks = self.num_blocks_of_prefix(num_tokens)
            if group.window is not None:
                # window - 1 earlier tokens and the step's own can begin anywhere inside a block
                span = group.window - 1 + max_tokens_per_step
                blocks = min(blocks, (span + self.block_size - 2) // self.block_size + 1)
            total += blocks
        return total
