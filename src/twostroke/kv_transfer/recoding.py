"""KV of one format made into that of another: decoded, encoded again, and put where it belongs.

```
theirs: int8, 16 tokens  ──► slots ──► float32 ──► slots ──► staged: bf16, 16 tokens ──► ours: bf16, 32 tokens
                        their order    the codec         our order                conversion.py
```

Block by block. Numbers change here, so only a borrower whose user allows drift takes such KV. Block sizes and ranks are
none of this module's business: the staged blocks have the lender's, and a Conversion moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twostroke.config.kv_format import KVFormat
from twostroke.kernels.head_order import HeadOrder
from twostroke.kv_transfer.conversion import Conversion, OrderOf
from twostroke.kv_transfer.memory import KVMemory, layers_of_group

Recode = Callable[[NDArray[np.uint8], KVFormat, KVFormat], NDArray[np.uint8]]
"""Slots [n, slot bytes] of one format in plain order, made into slots of another."""
_STAGED_BYTES = 4 << 20
"""So many bytes of blocks are converted at once."""


@dataclass(frozen=True, slots=True)
class BlockRecoder:
    """Makes heads of blocks of one format and order into heads of another. Pure."""

    recode: Recode
    kv_format: KVFormat
    """Of what comes."""
    order: HeadOrder
    to_format: KVFormat
    to_order: HeadOrder

    def heads(self, heads: NDArray[np.uint8], block_size: int, *, values: bool) -> NDArray[np.uint8]:
        """Return the same tokens in the other format.

        Args:
            heads: [n, bytes of a head], each the K, or the V, of one head of a block.
            block_size: tokens in each, on both sides.
            values: whether they are V.

        Returns:
            [n, bytes of a head in the other format].
        """
        slots = self.order.slots(heads, block_size, values=values)
        recoded = self.recode(slots.reshape(len(heads) * block_size, -1), self.kv_format, self.to_format)
        return self.to_order.heads(recoded.reshape(len(heads), block_size, -1), values=values)


class RecodedConversion:
    """From one pool's blocks to another's, of another format or order; blocks may have another size as well.

    Args:
        ours: the pool that is filled.
        theirs: where its tokens are now.
        order: of ours.
        their_order: of a head of their blocks.
        recode: the codec.
    """

    def __init__(
        self, ours: KVMemory, theirs: KVMemory, order: OrderOf, their_order: HeadOrder, recode: Recode
    ) -> None:
        layout = replace(theirs.layout, kv_format=ours.layout.kv_format)
        self._theirs, self._block_size = theirs, layout.block_size
        self._recoder = BlockRecoder(
            recode, theirs.layout.kv_format, their_order, layout.kv_format, order(layout.block_size)
        )
        self._num_staged = max(1, _STAGED_BYTES // (theirs.num_ranks * layout.bytes_per_block))
        of_ranks = [bytearray(self._num_staged * layout.bytes_per_block) for _ in range(theirs.num_ranks)]
        self._staged = KVMemory(layout, *map(memoryview, of_ranks))
        self._conversion = Conversion(ours, self._staged, order)
        self._our_size = ours.layout.block_size

    def copy(
        self,
        first: int,
        their_rows: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        first_missing: Sequence[int],
        layers: range,
    ) -> int:
        """Fill our blocks, as far as they are missing, with the tokens of some of theirs; see Conversion.copy.

        Returns:
            Bytes of their blocks that were converted.
        """
        num_bytes = 0
        for group_id, their_row in enumerate(their_rows):
            begin_layer, end_layer = layers_of_group(self._theirs.layout.groups[group_id], layers)
            if begin_layer == end_layer:
                continue
            wanted = max(first, first_missing[group_id] * self._our_size // self._block_size)
            for begin in range(wanted, first + len(their_row), self._num_staged):
                some = their_row[begin - first : begin - first + self._num_staged]
                num_bytes += self._stage(some, begin_layer, end_layer)
                staged = [range(len(some)) if other == group_id else range(0) for other in range(len(their_rows))]
                self._conversion.copy(begin, staged, rows, first_missing, layers)
        return num_bytes

    def _stage(self, block_ids: Sequence[int], begin: int, end: int) -> int:
        """Convert layers `begin` to before `end` of some of their blocks into staged ones; return the bytes read."""
        num_bytes = 0
        for rank in range(self._theirs.num_ranks):
            there = self._theirs.heads(rank)[list(block_ids), begin:end]
            here = self._staged.heads(rank)[: len(block_ids), begin:end]
            num_bytes += there.nbytes
            for kind in (0, 1):
                heads = there[:, :, kind]
                recoded = self._recoder.heads(heads.reshape(-1, heads.shape[-1]), self._block_size, values=bool(kind))
                here[:, :, kind] = recoded.reshape(*heads.shape[:-1], -1)
        return num_bytes
