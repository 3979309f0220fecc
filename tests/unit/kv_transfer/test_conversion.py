"""Blocks of one size into blocks of another: every byte of every token where the order says, and no other touched."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from factories import uniform_layout
from twostroke.config.kv_format import KVFormat
from twostroke.kernels.head_order import HeadOrder, Section, plain_order
from twostroke.kernels.native.kv_order import head_order, read_heads
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.conversion import Conversion, OrderOf
from twostroke.kv_transfer.memory import KVMemory

UNTOUCHED = 0xA5
NUM_HEADS = 4
"""KV heads of all ranks together."""
SIZES = st.sampled_from([1, 2, 4, 8, 16, 32, 128])
FORMATS = st.sampled_from(["f32", "bf16", "int8", "int4"])


def order_of(name: str, kv_format: KVFormat, head_dim: int) -> OrderOf:
    if name == "plain":
        return lambda _: plain_order(kv_format, head_dim)
    return lambda block_size: head_order(kv_format, head_dim, block_size)


def offsets(sections: tuple[Section, ...], block_size: int, token: int) -> list[int]:
    """Where the bytes of a token are in a run: the definition, one byte after the other."""
    found: list[int] = []
    begin = 0
    for section in sections:
        tile = begin + token // section.lanes * section.lanes * section.bytes_per_token
        for unit in range(section.units):
            at = tile + (unit * section.lanes + token % section.lanes) * section.unit_bytes
            found += range(at, at + section.unit_bytes)
        begin += block_size * section.bytes_per_token
    return found


class Filled:
    """A pool of random bytes, of one rank or several, and tables of a prefix in it."""

    def __init__(self, layout: KVLayout, num_tokens: int, rng: np.random.Generator, num_ranks: int = 1) -> None:
        self.layout = layout
        num_blocks = layout.run_blocks(num_tokens) + 2
        self.bytes = rng.integers(0, 256, (num_ranks, num_blocks, layout.bytes_per_block), np.uint8)
        blocks = iter(rng.permutation(num_blocks).tolist())
        self.rows: list[list[int]] = []
        for group in layout.groups:
            ids = [next(blocks) for _ in range(layout.num_blocks_of_prefix(group, num_tokens))]
            self.rows.append(layout.page_ids(group).of_blocks(ids)[: num_tokens // layout.block_size])
        self.memory = KVMemory(layout, *(memoryview(of_rank).cast("B") for of_rank in self.bytes))

    def ranks_of(self, head: int) -> list[tuple[int, int]]:
        """Who has a head, and where among its own: each has equally many, or a head is that of several in a row."""
        num_ranks, num_own = len(self.bytes), self.layout.num_kv_heads
        if num_ranks <= NUM_HEADS:
            return [divmod(head, num_own)]
        num_holders = num_ranks // NUM_HEADS
        return [(rank, 0) for rank in range(head * num_holders, (head + 1) * num_holders)]

    def token(self, order: HeadOrder, group: int, layer: int, kind: int, head: int, position: int) -> list[int]:
        """Where in the bytes of a rank those of the token are; `head` is one of its own."""
        layout = self.layout
        entry, token = divmod(position, layout.block_size)
        layer += self.rows[group][entry] * layout.page_ids(layout.groups[group]).layers_per_id
        run = ((layer * 2 + kind) * layout.num_kv_heads + head) * layout.bytes_per_head
        sections = order.values if kind else order.keys
        return [run + at for at in offsets(sections, layout.block_size, token)]


@given(data=st.data(), seed=st.integers(0, 99), order_name=st.sampled_from(["plain", "native"]), kv_format=FORMATS)
def test_every_token_arrives_where_it_belongs(
    data: st.DataObject, seed: int, order_name: str, kv_format: KVFormat
) -> None:
    """Random sizes, ranks, tables, layers and beginnings, against the definition."""
    our_size, their_size = data.draw(SIZES), data.draw(SIZES)
    windows = data.draw(st.sampled_from([[None], [None, None, None], [None, 8, 8, None], [8, 8, None]]))
    head_dim = data.draw(st.sampled_from([2, 16]))
    our_ranks, their_ranks = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([1, 2, 4, 8]))
    rng = np.random.default_rng(seed)
    num_tokens = max(our_size, their_size) * data.draw(st.integers(1, 3))

    def filled(block_size: int, num_ranks: int) -> Filled:
        layout = uniform_layout(
            windows,
            block_size=block_size,
            num_kv_heads=NUM_HEADS,
            head_dim=head_dim,
            kv_format=kv_format,
        ).dealt_among(num_ranks, 1)
        return Filled(layout, num_tokens, rng, num_ranks)

    ours, theirs = filled(our_size, our_ranks), filled(their_size, their_ranks)
    our_size, their_size = ours.layout.block_size, theirs.layout.block_size
    ours.bytes[:] = UNTOUCHED
    order = order_of(order_name, kv_format, head_dim)
    missing = [data.draw(st.integers(0, num_tokens // our_size)) for _ in ours.rows]
    first = data.draw(st.integers(0, num_tokens // their_size - 1))
    end = data.draw(st.integers(first + 1, num_tokens // their_size))
    layers = range(data.draw(st.integers(0, len(windows) - 1)), len(windows))
    expected, num_bytes = ours.bytes.copy(), 0
    for group_id, group in enumerate(ours.layout.groups):
        for in_block, layer_id in enumerate(group.layer_ids):
            for position in range(max(first * their_size, missing[group_id] * our_size), end * their_size):
                for kind, head in np.ndindex(2, NUM_HEADS):
                    if layer_id in layers:
                        whence, of_theirs = theirs.ranks_of(head)[0]
                        from_ = theirs.token(order(their_size), group_id, in_block, kind, of_theirs, position)
                        for rank, of_ours in ours.ranks_of(head):
                            at = ours.token(order(our_size), group_id, in_block, kind, of_ours, position)
                            found = theirs.bytes.reshape(their_ranks, -1)[whence, from_]
                            expected.reshape(our_ranks, -1)[rank, at] = found
                            num_bytes += len(at)
    conversion = Conversion(ours.memory, theirs.memory, order)
    their_rows = [row[first:end] for row in theirs.rows]
    assert conversion.copy(first, their_rows, ours.rows, missing, layers) == num_bytes
    np.testing.assert_array_equal(ours.bytes, expected)


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (4, 128), (128, 8), (1, 16), (16, 1), (2, 4), (1, 2)])
def test_the_numbers_are_those_that_were_stored(kv_format: KVFormat, sizes: tuple[int, int]) -> None:
    """By the reader of blocks, which knows the order by itself."""
    head_dim, num_tokens = 32, 256
    rng = np.random.default_rng(3)
    theirs, ours = (
        Filled(
            uniform_layout([None, None], block_size=size, num_kv_heads=2, head_dim=head_dim, kv_format=kv_format),
            num_tokens,
            rng,
        )
        for size in sizes
    )
    Conversion(ours.memory, theirs.memory, order_of("native", kv_format, head_dim)).copy(
        0, theirs.rows, ours.rows, [0], range(2)
    )
    for kind in (0, 1):

        def numbers(pool: Filled, values: bool = bool(kind)) -> torch.Tensor:
            """[layers, heads, tokens, head_dim]."""
            blocks = pool.memory.heads(0).reshape(-1, 2, 2, 2, pool.layout.bytes_per_head)
            heads = torch.from_numpy(blocks[pool.rows[0]][:, :, int(values)].copy())
            found = read_heads(heads.flatten(0, 2), kv_format, head_dim, values=values)
            shape = (*heads.shape[:3], pool.layout.block_size, head_dim)
            return found.view(shape).permute(1, 2, 0, 3, 4).reshape(2, 2, num_tokens, head_dim)

        torch.testing.assert_close(numbers(ours), numbers(theirs), rtol=0, atol=0, equal_nan=True)
