"""Conversion of KV from one format to another: decode, encode again, and store in place.

```
theirs: int8, 16 tokens  ──► slots ──► float32 ──► slots ──► staged: bf16, 16 tokens ──► ours: bf16, 32 tokens
                        their order    the codec         our order                conversion.py
```

Conversion goes page by page. It changes numbers, so a borrower accepts such KV only if its user allows drift. Block
sizes and ranks do not matter here: the staged blocks have the lender's, and a Conversion moves them.

Quantized KV holds keys less their means (layers/attention.py), so these are added or subtracted where one side's KV is
quantized and the other's is not. The borrower uses its own means: the lender's differ by no more than the two sides'
computations do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twostroke.config.kv_format import KVFormat, is_quantized
from twostroke.kernels.head_order import HeadOrder
from twostroke.kv_transfer.conversion import Conversion, OrderOf
from twostroke.kv_transfer.memory import KVMemory, layers_of_group, pages_of

KeyMeans = Sequence[NDArray[np.float32]]
"""Means of the keys per KV group, [layers, num_kv_heads of all ranks, head_dim]."""
Recode = Callable[[NDArray[np.uint8], KVFormat, KVFormat, NDArray[np.float32] | None], NDArray[np.uint8]]
"""Converter of slots [n, slot bytes] from one format to another, both in plain order. It adds the last argument, [n,
head_dim], if given."""
_STAGED_BYTES = 4 << 20
"""Bytes of blocks that are converted at once."""


@dataclass(frozen=True, slots=True)
class BlockRecoder:
    """Converter of block heads from one format and order to another. Pure."""

    recode: Recode
    kv_format: KVFormat
    """Format of the incoming blocks."""
    order: HeadOrder
    to_format: KVFormat
    to_order: HeadOrder

    def heads(
        self, heads: NDArray[np.uint8], block_size: int, *, values: bool, shift: NDArray[np.float32] | None = None
    ) -> NDArray[np.uint8]:
        """Return the tokens of some heads in the other format.

        Args:
            heads: [n, bytes of a head], each the K or the V of one head of a block.
            block_size: tokens in each block, on both sides.
            values: whether the heads hold V.
            shift: [n, head_dim], added to each vector of a head; None: nothing.

        Returns:
            [n, bytes of a head in the other format].
        """
        slots = self.order.slots(heads, block_size, values=values).reshape(len(heads) * block_size, -1)
        of_slots = None if shift is None else np.repeat(shift, block_size, axis=0)
        recoded = self.recode(slots, self.kv_format, self.to_format, of_slots)
        return self.to_order.heads(recoded.reshape(len(heads), block_size, -1), values=values)


class RecodedConversion:
    """Conversion from one pool's blocks to another's, of another format or order; block sizes may differ as well.

    Args:
        ours: the pool that is filled.
        theirs: blocks that hold its tokens now.
        order: places of tokens in our blocks.
        their_orders: per KV group, places of tokens in a head of their pages.
        recode: the codec.
        key_means: means that quantized keys are stored without; None: keys are whole in every format.
    """

    def __init__(
        self,
        ours: KVMemory,
        theirs: KVMemory,
        order: OrderOf,
        their_orders: Sequence[HeadOrder],
        recode: Recode,
        key_means: KeyMeans | None = None,
    ) -> None:
        layout = replace(theirs.layout, kv_format=ours.layout.kv_format)
        self._theirs, self._block_size = theirs, layout.block_size
        sign = is_quantized(theirs.layout.kv_format) - is_quantized(layout.kv_format)
        self._key_shifts = None if key_means is None or not sign else [sign * of_group for of_group in key_means]
        # these orders are for this side's share of heads; their ranks may have other shares
        self._recoders = [
            BlockRecoder(
                recode, theirs.layout.kv_format, their_order, layout.kv_format, order(group.spec, layout.block_size)
            )
            for group, their_order in zip(ours.layout.groups, their_orders, strict=True)
        ]
        num_staged = max(1, _STAGED_BYTES // (theirs.num_ranks * layout.bytes_per_block))
        of_ranks = [bytearray(num_staged * layout.bytes_per_block) for _ in range(theirs.num_ranks)]
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
        """Fill the missing tokens of our blocks from some of their blocks; see Conversion.copy.

        Returns:
            Number of bytes of their blocks that were converted.
        """
        num_bytes = 0
        for group_id, their_row in enumerate(their_rows):
            begin_layer, end_layer = layers_of_group(self._theirs.layout.groups[group_id], layers)
            if begin_layer == end_layer:
                continue
            wanted = max(first, first_missing[group_id] * self._our_size // self._block_size)
            room = pages_of(self._staged, group_id)
            for begin in range(wanted, first + len(their_row), len(room)):
                some = their_row[begin - first : begin - first + len(room)]
                places = room[: len(some)]
                num_bytes += self._stage(group_id, some, places, range(begin_layer, end_layer))
                staged = [places if other == group_id else [] for other in range(len(their_rows))]
                self._conversion.copy(begin, staged, rows, first_missing, layers)
        return num_bytes

    def _stage(self, group_id: int, their_ids: Sequence[int], ids: Sequence[int], layers: range) -> int:
        """Convert some layers of some of their pages into staged ones; return the bytes read.

        Args:
            group_id: KV group of these pages.
            their_ids: ids of their pages.
            ids: ids of as many staged pages.
            layers: layers of a page.
        """
        num_bytes, recoder, of_page = 0, self._recoders[group_id], slice(layers.start, layers.stop)
        for rank in range(self._theirs.num_ranks):
            there, here = (
                self._theirs.pages(rank, group_id)[list(their_ids), of_page],
                self._staged.pages(rank, group_id),
            )
            num_bytes += there.nbytes
            for kind in (0, 1):
                heads = there[:, :, kind]
                shift = None if kind else self._shift_of_keys(group_id, rank, layers, len(their_ids))
                recoded = recoder.heads(
                    heads.reshape(-1, heads.shape[-1]), self._block_size, values=bool(kind), shift=shift
                )
                here[list(ids), of_page, kind] = recoded.reshape(*heads.shape[:-1], -1)
        return num_bytes

    def _shift_of_keys(self, group_id: int, rank: int, layers: range, num_pages: int) -> NDArray[np.float32] | None:
        """Return what is added to each head's keys, [pages x layers x heads of their rank, head_dim]; None: nothing."""
        if self._key_shifts is None:
            return None
        heads = self._theirs.layout.groups[group_id].spec.heads_of_rank(rank)
        of_page = self._key_shifts[group_id][layers.start : layers.stop, heads.start : heads.stop]
        return np.tile(of_page.reshape(-1, of_page.shape[-1]), (num_pages, 1))
