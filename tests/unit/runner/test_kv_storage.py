"""The KV tensor: its size to the byte, and where in it things are."""

from __future__ import annotations

import pytest
import torch

from factories import uniform_layout
from twostroke.config.kv_format import KV_FORMATS, KVFormat
from twostroke.kv_cache.layout import KVLayout
from twostroke.runner.kv_storage import KVStorage

CPU = torch.device("cpu")


def layout(windows: list[int | None], kv_format: KVFormat = "f32") -> KVLayout:
    return uniform_layout(windows, block_size=4, num_kv_heads=3, head_dim=8, kv_format=kv_format)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("windows", [[None], [None] * 6 + [64] * 3, [8] * 5], ids=str)
def test_bytes_are_as_the_formula_says(windows: list[int | None], kv_format: KVFormat) -> None:
    shape = layout(windows, kv_format)
    kv = KVStorage(shape, 11, CPU)
    assert kv.nbytes == 11 * shape.bytes_per_block
    assert kv.tensor.is_contiguous()
    assert not kv.tensor.any()


def test_attention_layout() -> None:
    kv = KVStorage(layout([None, 64, None, 64]), 5, CPU)
    found = kv.attention_layout(num_heads=6)
    assert found.layer_slots == ((0, 0), (1, 0), (0, 1), (1, 1))
    assert [shape.window for shape in found.shapes] == [None, 64]
    id_bytes = 2 * kv.layout.bytes_per_layer(kv.layout.groups[0])
    assert {(shape.num_heads, shape.num_kv_heads, shape.id_bytes) for shape in found.shapes} == {(6, 3, id_bytes)}
