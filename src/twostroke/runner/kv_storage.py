"""KVStorage: the one tensor that holds every KV block."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from twostroke.kernels.large_pages import large_pages
from twostroke.kv_cache.layout import KVLayout
from twostroke.layers.attention_metadata import AttentionLayout


class KVStorage:
    """All KV blocks of an engine, allocated once, zeroed.

    A block is contiguous, and inside it each layer's K and V, and inside those each KV head:

    ```
    tensor, bytes [num_blocks, layers_per_block, 2, num_kv_heads, block_size * slot bytes]
                                                K,V
    ```

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
        shape = (num_all, layout.layers_per_block, 2, layout.num_kv_heads, layout.bytes_per_head)
        self.layer_written: Callable[[int], object] = _nobody_listens
        """Called behind each layer that has written the K and V of a step, in the thread that computes."""
        if shared_descriptor is not None:
            assert device.type == "cpu", f"{device} memory cannot be mapped by other processes"
            shared = mmap.mmap(shared_descriptor, num_all * layout.bytes_per_block)
            self.tensor = torch.frombuffer(shared, dtype=torch.uint8).view(shape)
        elif device.type == "cpu":
            self.tensor = large_pages(num_all * layout.bytes_per_block).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.tensor.nbytes

    def attention_layout(self, num_heads: int) -> AttentionLayout:
        """What the layers need to know of this storage, for a model with `num_heads` query heads."""
        return AttentionLayout.of(
            [(group.layer_ids, group.spec) for group in self.layout.groups],
            num_heads=num_heads,
            block_size=self.layout.block_size,
            kv_format=self.layout.kv_format,
        )

    def bytes_of_pool(self) -> memoryview:
        """Of the pool's blocks, writable; host memory only."""
        return self.tensor[: self.num_blocks].view(-1).numpy().data

    def byte_ranges(self, block_id: int, layer_in_block: int, kv_heads: range) -> tuple[tuple[int, int], ...]:
        """(offset, length) in bytes from the start of the tensor: K, then V, of a run of KV heads.

        Args:
            block_id: which block.
            layer_in_block: which of the block's layers.
            kv_heads: consecutive KV heads; their slots are contiguous.
        """
        assert kv_heads.step == 1, kv_heads
        assert kv_heads.stop <= self.layout.num_kv_heads, kv_heads
        assert 0 <= block_id < self.num_blocks, block_id
        assert 0 <= layer_in_block < self.layout.layers_per_block, layer_in_block
        head_bytes = self.layout.bytes_per_head
        layer_bytes = 2 * self.layout.num_kv_heads * head_bytes
        start = block_id * self.layout.bytes_per_block + layer_in_block * layer_bytes + kv_heads.start * head_bytes
        length = len(kv_heads) * head_bytes
        return (start, length), (start + self.layout.num_kv_heads * head_bytes, length)


def _nobody_listens(layer_id: int) -> None:
    del layer_id
