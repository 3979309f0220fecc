"""KVStorage: the one tensor that holds every KV block."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.kernels.large_pages import large_pages
from twostroke.kv_cache.layout import KVLayout
from twostroke.layers.attention_metadata import AttentionLayout


class KVStorage:
    """All KV blocks of an engine, allocated once, zeroed.

    A block is contiguous, in it each page, in that each layer's K and V, and in those each KV head:

    ```
    tensor, bytes [num_blocks, bytes_per_block]
    tensors, of each KV group, the same memory as [ids, layers_per_id, 2, num_kv_heads, block_size * slot bytes]
                                                                      K,V
    ```

    An id (PageIds) is where a page begins. A page with more than layers_per_id layers reaches into the places of the
    ids behind it, which then are no page's.

    What the bytes of a head are is the backend's business (`AttentionOperator.kv_order`).

    Slots of a block behind a request's last token are finite at all times: the step that opens a block zeroes them
    (kernels/reference/attention_plan.py). Whoever fills a block in another way fills all of it.
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
        """Allocates layout.bytes_per_block bytes for each block.

        Args:
            layout: of the model.
            num_blocks: of the pool.
            device: where they are.
            num_scratch_blocks: behind those of the pool, for whoever computes something that is not to be kept.
            num_branch_blocks: behind these, for branches of drafts (runner/branches.py).
            shared_descriptor: of memory that other processes may map, of num_bytes_for bytes; host memory only.
        """
        self.layout, self.num_blocks = layout, num_blocks
        self.scratch_ids = range(num_blocks, num_blocks + num_scratch_blocks)
        self.branch_ids = range(self.scratch_ids.stop, self.scratch_ids.stop + num_branch_blocks)
        num_all = self.branch_ids.stop
        self.layer_written: Callable[[int], object] = _nobody_listens
        """Called behind each layer that has written the K and V of a step, in the thread that computes."""
        if shared_descriptor is not None:
            assert device.type == "cpu", f"{device} memory cannot be mapped by other processes"
            shared = mmap.mmap(shared_descriptor, num_all * layout.bytes_per_block)
            self.tensor = torch.frombuffer(shared, dtype=torch.uint8).view(num_all, -1)
        elif device.type == "cpu":
            self.tensor = large_pages(num_all * layout.bytes_per_block).view(num_all, -1)
        else:
            self.tensor = torch.zeros((num_all, layout.bytes_per_block), dtype=torch.uint8, device=device)
        self.page_ids = tuple(map(layout.page_ids, layout.groups))
        """Per KV group."""
        self.tensors = tuple(
            self.tensor.view(-1, ids.layers_per_id, 2, layout.num_kv_heads, layout.bytes_per_head)
            for ids in self.page_ids
        )
        """Per KV group, see above."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.tensor.nbytes

    def attention_layout(self, num_heads: int) -> AttentionLayout:
        """What the layers need to know of this storage, for a model with `num_heads` query heads."""
        return AttentionLayout.of(
            [
                (group.layer_ids, group.spec, ids.layers_per_id)
                for group, ids in zip(self.layout.groups, self.page_ids, strict=True)
            ],
            num_heads=num_heads,
            block_size=self.layout.block_size,
            kv_format=self.layout.kv_format,
        )

    def rows_of_runs(self, num_tokens: int, first_block: int = 0) -> list[list[int]]:
        """Return page ids, per KV group, of a sequence whose blocks follow each other from `first_block` on.

        It takes KVLayout.run_blocks(num_tokens) blocks.
        """
        rows: list[list[int]] = []
        for group, ids in zip(self.layout.groups, self.page_ids, strict=True):
            num_blocks = self.layout.num_blocks_of_prefix(group, num_tokens)
            rows.append(ids.of_blocks(range(first_block, first_block + num_blocks)))
            first_block += num_blocks
        width = max(map(len, rows))  # rows of one length; what is behind the last token is never read
        return [row + row[-1:] * (width - len(row)) for row in rows]

    def page(self, group_id: int, page_id: int) -> Tensor:
        """Return a page, to read or to write: uint8 [layers, 2, num_kv_heads, bytes of a head]."""
        heads = self.tensors[group_id].flatten(0, 1)
        first = page_id * self.page_ids[group_id].layers_per_id
        return heads[first : first + len(self.layout.groups[group_id].layer_ids)]

    def bytes_of_pool(self) -> memoryview:
        """Of the pool's blocks, writable; host memory only."""
        return self.tensor[: self.num_blocks].view(-1).numpy().data

    def byte_ranges(
        self, group_id: int, page_id: int, layer_in_page: int, kv_heads: range
    ) -> tuple[tuple[int, int], ...]:
        """(offset, length) in bytes from the start of the tensor: K, then V, of a run of KV heads.

        Args:
            group_id: of which KV group the page is.
            page_id: which page.
            layer_in_page: which of its layers.
            kv_heads: consecutive KV heads; their slots are contiguous.
        """
        assert kv_heads.step == 1, kv_heads
        assert kv_heads.stop <= self.layout.num_kv_heads, kv_heads
        ids = self.page_ids[group_id]
        assert 0 <= page_id < ids.num_ids(self.num_blocks), page_id
        assert 0 <= layer_in_page < len(self.layout.groups[group_id].layer_ids), layer_in_page
        head_bytes = self.layout.bytes_per_head
        layer = page_id * ids.layers_per_id + layer_in_page
        start = layer * self.layout.bytes_per_layer + kv_heads.start * head_bytes
        length = len(kv_heads) * head_bytes
        return (start, length), (start + self.layout.num_kv_heads * head_bytes, length)


def _nobody_listens(layer_id: int) -> None:
    del layer_id
