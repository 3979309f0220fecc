from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from twostroke.kv_cache.prefix_cache import HASH_BYTES, hash_blocks

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(token_ids=TOKENS, block_size=st.sampled_from([1, 2, 4, 16]), salt=st.sampled_from([None, "", "tenant"]))
def test_growing_a_chain_equals_hashing_at_once(token_ids: list[int], block_size: int, salt: str | None) -> None:
    hashes: list[bytes] = []
    for end in range(len(token_ids) + 1):
        new = token_ids[len(hashes) * block_size : end]
        hashes.extend(hash_blocks(new, block_size, salt, parent=hashes[-1] if hashes else None))
    assert tuple(hashes) == hash_blocks(token_ids, block_size, salt)
    assert len(hashes) == len(token_ids) // block_size


@given(token_ids=st.lists(st.integers(0, 3), min_size=8, max_size=8), position=st.integers(0, 7))
def test_a_changed_token_changes_its_block_and_all_that_follow(token_ids: list[int], position: int) -> None:
    other = list(token_ids)
    other[position] += 1
    same = [a == b for a, b in zip(hash_blocks(token_ids, 2), hash_blocks(other, 2), strict=True)]
    assert same == [entry < position // 2 for entry in range(4)]


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    assert hash_blocks([1, 2, 9, 9], 2)[1] != hash_blocks([3, 4, 9, 9], 2)[1]


def test_tokens_cannot_be_shifted_across_their_borders() -> None:
    assert hash_blocks([1, 0], 2) != hash_blocks([256, 0], 2)
    assert hash_blocks([0, 1], 2) != hash_blocks([1, 0], 2)


def test_salts_separate_and_an_empty_one_is_none() -> None:
    assert hash_blocks([1, 2], 2, "") == hash_blocks([1, 2], 2, None)
    assert len({hash_blocks([1, 2], 2, salt) for salt in (None, "a", "b")}) == 3
    assert len(hash_blocks([1, 2], 2)[0]) == HASH_BYTES


def test_hashes_stay_what_they_are_on_every_machine() -> None:
    assert hash_blocks([1, 2, 3, 4], 2)[1].hex() == "14fe380e8c2eba28dd14410b26d63f57"
