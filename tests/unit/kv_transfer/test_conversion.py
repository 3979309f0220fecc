"""Blocks of one size into blocks of another: every byte of every token where the order says, and no other touched."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from factories import uniform_layout, unlike_layout
from twostroke.config.kv_format import KVFormat
from twostroke.kernels.head_order import HeadOrder, Section, plain_order
from twostroke.kernels.native.kv_order import head_order, read_heads
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.conversion import Conversion, OrderOf
from twostroke.kv_transfer.memory import KVMemory

UNTOUCHED = 0xA5
NUM_HEADS, NUM_WIDE_HEADS = 4, 2
"""KV heads of all ranks together, and those of layers with wide ones."""
WIDE = 24
"""Numbers of a wide head."""
SIZES = st.sampled_from([1, 2, 4, 8, 16, 32, 128])
FORMATS = st.sampled_from(["f32", "bf16", "int8", "int4"])


def order_of(name: str, kv_format: KVFormat) -> OrderOf:
    if name == "plain":
        return lambda kv, _: plain_order(kv_format, kv.head_dim)
    return lambda kv, block_size: head_order(kv_format, kv.head_dim, block_size)


def offsets(sections: tuple[Section, ...], block_size: int, token: int) -> list[int]:
    """Return the offsets of a token's bytes in a run, by definition, one byte after the other."""
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

    def ranks_of(self, group: int, head: int) -> list[tuple[int, int]]:
        """Return the ranks with a head, and its index there: ranks have equally many heads, or several in a row share
        one."""
        num_ranks, num_own, num_heads = (
            len(self.bytes),
            self.layout.groups[group].spec.num_kv_heads,
            self.num_heads(group),
        )
        if num_ranks <= num_heads:
            return [divmod(head, num_own)]
        num_holders = num_ranks // num_heads
        return [(rank, 0) for rank in range(head * num_holders, (head + 1) * num_holders)]

    def num_heads(self, group: int) -> int:
        """Return the number of heads of all ranks together."""
        return NUM_HEADS if self.layout.groups[group].spec.head_dim < WIDE else NUM_WIDE_HEADS

    def token(self, order: HeadOrder, group: int, layer: int, kind: int, head: int, position: int) -> list[int]:
        """Return the offset of a token's bytes in a rank's bytes; `head` is one of its own."""
        layout, of_group = self.layout, self.layout.groups[group]
        entry, token = divmod(position, layout.block_size)
        run = self.rows[group][entry] * layout.page_ids(of_group).bytes_per_id
        run += ((layer * 2 + kind) * of_group.spec.num_kv_heads + head) * layout.bytes_per_head(of_group)
        sections = order.values if kind else order.keys
        return [run + at for at in offsets(sections, layout.block_size, token)]


@given(data=st.data(), seed=st.integers(0, 99), order_name=st.sampled_from(["plain", "native"]), kv_format=FORMATS)
def test_every_token_arrives_where_it_belongs(
    data: st.DataObject, seed: int, order_name: str, kv_format: KVFormat
) -> None:
    """Random sizes, ranks, tables, layers and beginnings, against the definition."""
    our_size, their_size = data.draw(SIZES), data.draw(SIZES)
    windows = data.draw(st.sampled_from([[None], [None, None, None], [None, 8, 8, None], [8, 8, None]]))
    head_dim, are_full_wide = data.draw(st.sampled_from([2, 16])), data.draw(st.booleans())
    our_ranks, their_ranks = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([1, 2, 4, 8]))
    rng = np.random.default_rng(seed)
    num_tokens = max(our_size, their_size) * data.draw(st.integers(1, 3))

    def filled(block_size: int, num_ranks: int) -> Filled:
        full = (NUM_WIDE_HEADS, WIDE, None) if are_full_wide else (NUM_HEADS, head_dim, None)
        specs = [full if window is None else (NUM_HEADS, head_dim, window) for window in windows]
        layout = unlike_layout(specs, block_size=block_size, kv_format=kv_format).for_ranks(num_ranks, 1)
        return Filled(layout, num_tokens, rng, num_ranks)

    ours, theirs = filled(our_size, our_ranks), filled(their_size, their_ranks)
    our_size, their_size = ours.layout.block_size, theirs.layout.block_size
    ours.bytes[:] = UNTOUCHED
    order = order_of(order_name, kv_format)
    missing = [data.draw(st.integers(0, num_tokens // our_size)) for _ in ours.rows]
    first = data.draw(st.integers(0, num_tokens // their_size - 1))
    end = data.draw(st.integers(first + 1, num_tokens // their_size))
    layers = range(data.draw(st.integers(0, len(windows) - 1)), len(windows))
    expected, num_bytes = ours.bytes.copy(), 0
    for group_id, group in enumerate(ours.layout.groups):
        for in_block, layer_id in enumerate(group.layer_ids):
            for position in range(max(first * their_size, missing[group_id] * our_size), end * their_size):
                for kind, head in np.ndindex(2, ours.num_heads(group_id)):
                    if layer_id in layers:
                        whence, of_theirs = theirs.ranks_of(group_id, head)[0]
                        order_there, order_here = (order(group.spec, size) for size in (their_size, our_size))
                        from_ = theirs.token(order_there, group_id, in_block, kind, of_theirs, position)
                        for rank, of_ours in ours.ranks_of(group_id, head):
                            at = ours.token(order_here, group_id, in_block, kind, of_ours, position)
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
    Conversion(ours.memory, theirs.memory, order_of("native", kv_format)).copy(0, theirs.rows, ours.rows, [0], range(2))
    for kind in (0, 1):

        def numbers(pool: Filled, values: bool = bool(kind)) -> torch.Tensor:
            """[layers, heads, tokens, head_dim]."""
            heads = torch.from_numpy(pool.memory.pages(0, 0)[pool.rows[0]][:, :, int(values)].copy())
            found = read_heads(heads.flatten(0, 2), kv_format, head_dim, values=values)
            shape = (*heads.shape[:3], pool.layout.block_size, head_dim)
            return found.view(shape).permute(1, 2, 0, 3, 4).reshape(2, 2, num_tokens, head_dim)

        torch.testing.assert_close(numbers(ours), numbers(theirs), rtol=0, atol=0, equal_nan=True)
