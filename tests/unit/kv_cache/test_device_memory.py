"""The account of a card: never more than it has, and monotone in everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from factories import uniform_layout
from twostroke.config.cache import CacheConfig
from twostroke.errors import DoesNotFit
from twostroke.kv_cache.device_memory import DeviceMemory, reserve_bytes
from twostroke.kv_cache.sizing import KVDemand, size_kv_cache

LAYOUT = uniform_layout([None] * 4, block_size=16, num_kv_heads=2, head_dim=8, kv_format="bf16")
PARTS = ("others_bytes", "weight_bytes", "draft_bytes", "step_bytes", "reserve_bytes")
CARDS = st.builds(
    DeviceMemory,
    total_bytes=st.integers(1, 1 << 40),
    utilization=st.floats(0.001, 1.0),
    **{name: st.integers(0, 1 << 38) for name in PARTS},
)


@given(CARDS)
def test_never_more_than_the_card_has_and_every_byte_has_a_name(card: DeviceMemory) -> None:
    taken = sum(num_bytes for num_bytes, _ in card.parts)
    assert taken == sum(getattr(card, name) for name in PARTS)
    assert 0 <= card.default_bytes <= card.usable_bytes
    assert card.usable_bytes == max(0, card.total_bytes - taken)
    if card.default_bytes:
        assert card.default_bytes + taken <= card.utilization * card.total_bytes <= card.total_bytes
    for num_bytes, words in card.parts:
        assert f"{num_bytes:,} {words}" in card.account
        assert f"{num_bytes:,} {words}" in card.arithmetic


@given(CARDS, st.sampled_from(PARTS), st.integers(0, 1 << 30), st.floats(0.001, 1.0))
def test_monotone(card: DeviceMemory, name: str, more: int, utilization: float) -> None:
    larger: dict[str, Any] = {name: getattr(card, name) + more}
    assert replace(card, **larger).default_bytes <= card.default_bytes
    assert replace(card, total_bytes=card.total_bytes + more).default_bytes >= card.default_bytes
    low, high = sorted((card.utilization, utilization))
    assert replace(card, utilization=low).default_bytes <= replace(card, utilization=high).default_bytes
    assert reserve_bytes(more) <= reserve_bytes(more + 1)


@given(CARDS, st.integers(0, 1 << 40))
def test_the_named_utilization_is_enough_and_a_hundredth_less_is_not(card: DeviceMemory, kv_bytes: int) -> None:
    found = card.utilization_for(kv_bytes)
    if found is None:
        assert replace(card, utilization=1.0).default_bytes < kv_bytes
        return
    assert replace(card, utilization=found).default_bytes >= kv_bytes
    if kv_bytes and found >= 0.02:
        assert replace(card, utilization=found - 0.01).default_bytes < kv_bytes


@given(CARDS, st.sampled_from([{}, {"num_kv_blocks": 40}, {"kv_cache_memory": 1 << 20}]))
def test_blocks_stay_within_the_card(card: DeviceMemory, config: dict[str, int]) -> None:
    try:
        sizing = size_kv_cache(
            LAYOUT,
            CacheConfig(**config),
            KVDemand(max_model_len=None, model_context=4096, max_tokens_per_step=512),
            card,
        )
    except DoesNotFit:
        assert (card.usable_bytes if config else card.default_bytes) < 40 * LAYOUT.bytes_per_block + (1 << 20)
        return
    assert sizing.kv_bytes <= (card.usable_bytes if config else card.default_bytes)
    if not config:
        assert sizing.kv_bytes + LAYOUT.bytes_per_block > card.default_bytes  # and nothing stays allocated
