"""KVStorage: the one tensor that holds every KV block."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twostroke.kernels.memory import large_pages
from twostroke.kv_cache.layout import KVGroup, KVLayout, PageIds
from twostroke.layers.attention import AttentionLayout

_MAX_IDS = 1 << 31
"""Limit of ids, which kernels take as int32."""


class KVStorage:
    """All KV blocks of an engine, allocated once, zeroed.

    A block is contiguous. It holds pages, a page holds each layer's K and V, and these hold each KV head:

    ```
    tensor, bytes [num_blocks, bytes_per_block]
    tensors, of each KV group, the same memory as [ids, layers of a page, 2, num_kv_heads, block_size * slot bytes]
                                                                         K,V
    ```

    An id (PageIds) says where a page starts. Where a page is longer than the step from one id to the next, it covers
    the places of the following ids, which are then unused.

    The backend decides what the bytes of a head mean (`AttentionOperator.kv_order`).

    Slots of a block after a request's last token are finite at all times: the step that opens a block zeroes them
    (kernels/reference/attention_plan.py). Code that fills a block in another way must fill all of it.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        num_scratch_blocks: int = 0,
        num_branch_blocks: int = 0,
        shared_descriptor: int | None = None,
    ) -> None:
        """Allocate layout.bytes_per_block bytes for each block.

        Args:
            layout: layout of the model's KV.
            num_blocks: blocks of the pool.
            device: where they are.
            num_scratch_blocks: blocks after those of the pool, for results that are not kept.
            num_branch_blocks: blocks after these, for branches of drafts (runner/branches.py).
            shared_descriptor: memory of num_bytes_for bytes that other processes may map; host memory only.
        """
        self.layout, self.num_blocks = layout, num_blocks
        self.scratch_ids = range(num_blocks, num_blocks + num_scratch_blocks)
        self.branch_ids = range(self.scratch_ids.stop, self.scratch_ids.stop + num_branch_blocks)
        num_all = self.branch_ids.stop
        self.layer_written: Callable[[int], object] | None = None
        """Called after each layer that has written the K and V of a step, in the computing thread."""
        if shared_descriptor is not None:
            assert device.type == "cpu", f"{device} memory cannot be mapped by other processes"
            shared = mmap.mmap(shared_descriptor, num_all * layout.bytes_per_block)
            self.tensor = torch.frombuffer(shared, dtype=torch.uint8).view(num_all, -1)
        elif device.type == "cpu":
            self.tensor = large_pages(num_all * layout.bytes_per_block).view(num_all, -1)
        else:
            self.tensor = torch.zeros((num_all, layout.bytes_per_block), dtype=torch.uint8, device=device)
        self.page_ids = tuple(map(layout.page_ids, layout.groups))
        """Ids of pages, per KV group."""
        self.tensors = tuple(
            _pages_of(self.tensor, layout, group, ids) for group, ids in zip(layout.groups, self.page_ids, strict=True)
        )
        """Pages by id, per KV group (see the class)."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.tensor.nbytes

    def attention_layout(self, num_heads: int) -> AttentionLayout:
        """Return the layout of this storage for the layers of a model with `num_heads` query heads."""
        return AttentionLayout.of(
            [
                (group.layer_ids, group.spec, ids.bytes_per_id)
                for group, ids in zip(self.layout.groups, self.page_ids, strict=True)
            ],
            num_heads=num_heads,
            block_size=self.layout.block_size,
            kv_format=self.layout.kv_format,
        )

    def contiguous_page_ids(self, num_tokens: int, first_block: int = 0) -> list[list[int]]:
        """Return page ids, per KV group, of a sequence in consecutive blocks from `first_block` on.

        It takes KVLayout.run_blocks(num_tokens) blocks.
        """
        rows: list[list[int]] = []
        for group, ids in zip(self.layout.groups, self.page_ids, strict=True):
            num_blocks = self.layout.num_blocks_of_prefix(group, num_tokens)
            rows.append(ids.of_blocks(range(first_block, first_block + num_blocks)))
            first_block += num_blocks
        width = max(map(len, rows))  # rows of one length; entries after the last token are never read
        return [row + row[-1:] * (width - len(row)) for row in rows]

    def page(self, group_id: int, page_id: int) -> Tensor:
        """Return a page, to read or to write: uint8 [layers, 2, num_kv_heads, bytes of a head]."""
        return self.tensors[group_id][page_id]

    def pool_bytes(self) -> memoryview:
        """Return the bytes of the pool's blocks, writable; host memory only."""
        return self.tensor[: self.num_blocks].view(-1).numpy().data


class JoinedStorages:
    """Storages with the same page numbers joined into one; each holds the layers of one shape of K and V."""

    def __init__(self, storages: Sequence[KVStorage], of_groups: Sequence[int]) -> None:
        """Join storages of one KV group each.

        Args:
            storages: storages with the same number of blocks.
            of_groups: index of the storage that holds each group of the attention layout.
        """
        self.storages = tuple(storages)
        self.layer_written: Callable[[int], object] | None = None
        self.tensors = tuple(storages[which].tensors[0] for which in of_groups)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(storage.nbytes for storage in self.storages)


def _pages_of(blocks: Tensor, layout: KVLayout, group: KVGroup, ids: PageIds) -> Tensor:
    """View all blocks, bytes [num_blocks, bytes_per_block], as the pages of one group, by their ids."""
    num_heads, head_bytes = group.spec.num_kv_heads, layout.bytes_per_head(group)
    num_ids = max(0, blocks.numel() - layout.bytes_per_page(group) + ids.bytes_per_id) // ids.bytes_per_id
    assert num_ids <= _MAX_IDS, f"{blocks.numel():,} bytes in steps of {ids.bytes_per_id}"
    sizes = (num_ids, len(group.layer_ids), 2, num_heads, head_bytes)
    strides = (ids.bytes_per_id, layout.bytes_per_layer(group), num_heads * head_bytes, head_bytes, 1)
    return blocks.as_strided(sizes, strides)
