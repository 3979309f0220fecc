from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pool_cases import CHAINS, chain
from twostroke.errors import InvalidParameter
from twostroke.pools.directory import PrefixDirectory
from twostroke.pools.prefix_index import PrefixIndex


def naive_depth(known: set[bytes], hashes: tuple[bytes, ...]) -> int:
    return next((i for i, block_hash in enumerate(hashes) if block_hash not in known), len(hashes))


@given(chains=st.lists(CHAINS, max_size=20), asked=CHAINS, bound=st.integers(1, 12))
def test_the_bound_holds_and_what_is_known_of_a_chain_is_its_first_part(
    chains: list[tuple[bytes, ...]], asked: tuple[bytes, ...], bound: int
) -> None:
    index = PrefixIndex(bound)
    known: set[bytes] = set()
    for hashes in chains:
        gone = index.add(hashes)
        known = (known | set(hashes[:bound])) - set(gone)
        index.check_invariants()
        assert set(index) == known
        assert index.depth(hashes) == min(len(hashes), bound)
    for hashes in [*chains, asked]:
        assert index.depth(hashes) == naive_depth(known, hashes)
        assert not known & set(hashes[index.depth(hashes) :])  # nothing behind a gap


def test_an_index_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="max_hashes=0"):
        PrefixIndex(0)


def test_what_was_evicted_is_not_believed_in() -> None:
    index = PrefixIndex(10)
    index.add(chain("a", 4))
    index.drop([*chain("a", 4)[2:], b"never known"])
    assert index.depth(chain("a", 4)) == 2


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "drop", "reset", "close"]), st.sampled_from("abcde"), CHAINS),
    max_size=30,
)


@given(steps=STEPS, asked=CHAINS)
def test_a_directory_lists_only_who_has_it(
    steps: list[tuple[str, str, tuple[bytes, ...]]], asked: tuple[bytes, ...]
) -> None:
    directory = PrefixDirectory(max_holders=2)
    for member_id in "abcd":  # e never joins
        directory.open(member_id, max_hashes=9)
    for step, member_id, hashes in steps:
        if step == "add":
            directory.add(member_id, hashes)
        elif step == "drop":
            directory.drop(member_id, hashes[len(hashes) // 2 :])
        elif step == "reset":
            directory.reset(member_id)
        else:
            directory.close(member_id)
        directory.check_invariants()
    for member_id in directory.holders(asked, most=3):
        assert directory.depth(member_id, asked) > 0
    assert len(directory.holders(asked, most=3)) <= 3


def test_holders_of_a_part_come_after_those_of_the_whole() -> None:
    directory = PrefixDirectory(max_holders=4)
    for member_id in "abcd":
        directory.open(member_id, max_hashes=100)
    whole = chain("turn", 4, chain("system", 4))
    for member_id in ("a", "b", "c"):
        directory.add(member_id, whole[:4])
    directory.add("d", whole)
    assert directory.holders(whole, most=3) == ["d", "c", "b"]
    assert directory.holders(chain("unknown", 3), most=3) == []
