"""KV of one format into blocks of another: the numbers follow the definition, token by token."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from factories import uniform_layout
from oracle import naive_kv
from twostroke.config.kv_format import KV_FORMATS, KVFormat, is_quantized
from twostroke.kernels.head_order import HeadOrder, plain_order
from twostroke.kernels.native.kv_order import head_order, read_heads
from twostroke.kernels.reference.kv_codec import decode, encode, recode
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.memory import KVMemory
from twostroke.kv_transfer.recoding import RecodedConversion

NUM_HEADS = 2
SIZES = st.sampled_from([1, 2, 4, 16, 32])
NATIVE_FORMATS: tuple[KVFormat, ...] = ("f32", "bf16", "int8", "int4")


def order_of(name: str, kv_format: KVFormat, head_dim: int, block_size: int) -> HeadOrder:
    return plain_order(kv_format, head_dim) if name == "plain" else head_order(kv_format, head_dim, block_size)


class Side:
    """A pool, tables of a prefix in it, and a reader of its numbers that shares no code with the tested one."""

    def __init__(self, layout: KVLayout, order_name: str, num_tokens: int, rng: np.random.Generator) -> None:
        self.layout, self.order_name = layout, order_name
        assert {group.pages_per_block for group in layout.groups} == {1}, "blocks are pages"
        num_entries = num_tokens // layout.block_size
        num_blocks = num_entries * len(layout.groups) + 2
        self.bytes = np.zeros((num_blocks, layout.bytes_per_block), np.uint8)
        ids = rng.permutation(num_blocks)[: num_entries * len(layout.groups)]
        self.rows = [[int(block_id) for block_id in row] for row in ids.reshape(len(layout.groups), num_entries)]
        self.memory = KVMemory(layout, memoryview(self.bytes).cast("B"))

    @property
    def order(self) -> HeadOrder:
        head_dim = self.layout.groups[0].spec.head_dim
        return order_of(self.order_name, self.layout.kv_format, head_dim, self.layout.block_size)

    def _blocks(self) -> np.ndarray:
        """[blocks, layers, 2, heads, bytes of a head]."""
        return self.memory.pages(0, 0)

    def write(self, numbers: np.ndarray) -> None:
        """Write [groups, layers in a block, 2, heads, tokens, head_dim], each number rounded to the format."""
        size, kv_format = self.layout.block_size, self.layout.kv_format
        heads = self._blocks()
        for group, row in enumerate(self.rows):
            for entry, block_id in enumerate(row):
                of_block = numbers[group, ..., entry * size : (entry + 1) * size, :]
                for kind in (0, 1):
                    vectors = torch.from_numpy(of_block[:, kind].copy())
                    slots = encode(vectors.reshape(-1, vectors.shape[-1]), kv_format).numpy()
                    runs = self.order.heads(slots.reshape(-1, size, slots.shape[-1]), values=bool(kind))
                    heads[block_id, :, kind] = runs.reshape(*vectors.shape[:2], -1)

    def read(self) -> torch.Tensor:
        """Return the numbers in the shape of `write`, by the backend's own reader."""
        size, kv_format, head_dim = self.layout.block_size, self.layout.kv_format, self.layout.groups[0].spec.head_dim
        groups = []
        for row in self.rows:
            kinds = []
            for kind in (0, 1):
                heads = torch.from_numpy(self._blocks()[row][:, :, kind].copy())
                flat = heads.flatten(0, 2)
                if self.order_name == "plain":
                    found = decode(flat.reshape(len(flat) * size, -1), kv_format, torch.float32)
                else:
                    found = read_heads(flat, kv_format, head_dim, values=bool(kind))
                by_token = found.view(*heads.shape[:3], size, head_dim).permute(1, 2, 0, 3, 4)
                kinds.append(by_token.reshape(*by_token.shape[:2], -1, head_dim))
            groups.append(torch.stack(kinds, dim=1))
        return torch.stack(groups)


@given(
    data=st.data(),
    seed=st.integers(0, 99),
    kv_format=st.sampled_from(KV_FORMATS),
    to_format=st.sampled_from(KV_FORMATS),
    head_dim=st.sampled_from([2, 16, 24]),
    has_means=st.booleans(),
)
def test_every_number_is_that_of_the_definition(
    data: st.DataObject, seed: int, kv_format: KVFormat, to_format: KVFormat, head_dim: int, has_means: bool
) -> None:
    """Sizes, orders, beginnings, ends and layers are random; what is not converted stays as it was.

    Keys of a quantized format are less their means, where there are some.
    """
    their_size, our_size = data.draw(SIZES), data.draw(SIZES)
    theirs_by, ours_by = (
        data.draw(st.sampled_from(["plain", "native"] if one in NATIVE_FORMATS else ["plain"]))
        for one in (kv_format, to_format)
    )
    windows = data.draw(st.sampled_from([[None], [None, None], [None, 8, 8, None]]))
    rng = np.random.default_rng(seed)
    num_tokens = max(our_size, their_size) * data.draw(st.integers(1, 2))

    def side(size: int, stored_as: KVFormat, order_name: str) -> Side:
        layout = uniform_layout(
            windows, block_size=size, num_kv_heads=NUM_HEADS, head_dim=head_dim, kv_format=stored_as
        )
        return Side(layout, order_name, num_tokens, rng)

    theirs, ours = side(their_size, kv_format, theirs_by), side(our_size, to_format, ours_by)
    layout = theirs.layout
    shape = (len(layout.groups), len(layout.groups[0].layer_ids), 2, NUM_HEADS, num_tokens, head_dim)
    theirs.write((rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3)).astype(np.float32))
    missing = [data.draw(st.integers(0, num_tokens // our_size)) for _ in ours.rows]
    first = data.draw(st.integers(0, num_tokens // their_size - 1))
    end = data.draw(st.integers(first + 1, num_tokens // their_size))
    layers = range(data.draw(st.integers(0, len(windows) - 1)), len(windows))

    of_means = (len(layout.groups[0].layer_ids), NUM_HEADS, head_dim)
    means = [rng.standard_normal(of_means).astype(np.float32) if has_means else None for _ in layout.groups]
    sign = is_quantized(kv_format) - is_quantized(to_format)
    given_numbers, expected = theirs.read(), ours.read()
    for group_id, group in enumerate(layout.groups):
        for in_block, layer_id in enumerate(group.layer_ids):
            for position in range(max(first * their_size, missing[group_id] * our_size), end * their_size):
                for kind, head in np.ndindex(2, NUM_HEADS):
                    if layer_id in layers:
                        at = (group_id, in_block, kind, head, position)
                        number, mean = given_numbers[at], means[group_id]
                        if mean is not None and kind == 0 and sign:
                            number = number + sign * torch.from_numpy(mean[in_block, head])
                        is_same = kv_format == to_format
                        expected[at] = number if is_same else naive_kv.stored(number, to_format, torch.float32)
    conversion = RecodedConversion(
        ours.memory,
        theirs.memory,
        lambda kv, size: order_of(ours_by, to_format, kv.head_dim, size),
        [theirs.order] * len(layout.groups),
        recode,
        [mean for mean in means if mean is not None] or None,
    )
    conversion.copy(first, [row[first:end] for row in theirs.rows], ours.rows, missing, layers)
    torch.testing.assert_close(ours.read(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv_format", NATIVE_FORMATS)
@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
@pytest.mark.parametrize("head_dim", [2, 24, 64])
def test_slots_and_heads_are_inverse_and_lose_no_bit(kv_format: KVFormat, block_size: int, head_dim: int) -> None:
    order = head_order(kv_format, head_dim, block_size)
    layout = uniform_layout([None], block_size=block_size, num_kv_heads=1, head_dim=head_dim, kv_format=kv_format)
    heads = np.random.default_rng(1).integers(0, 256, (3, layout.bytes_per_head(layout.groups[0])), np.uint8)
    for values in (False, True):
        before = heads.copy()
        np.testing.assert_array_equal(order.heads(order.slots(heads, block_size, values=values), values=values), heads)
        np.testing.assert_array_equal(heads, before)


def test_codes_of_the_same_format_are_not_encoded_again() -> None:
    slots = np.random.default_rng(2).integers(0, 256, (5, 12), np.uint8)
    assert recode(slots, "int8", "int8") is slots
