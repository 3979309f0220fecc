"""Tokens are passes and drafts that stood, whatever comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twostroke.outputs import DraftTally, num_accepted

PASSES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 8)).map(lambda made: (min(made[0], made[1] + 1), made[1])), max_size=20
)
"""Tokens and drafts; a pass gives at most one token more than it had drafts."""


def tallied(passes: list[tuple[int, int]]) -> DraftTally:
    tally = DraftTally()
    for num_tokens, num_drafts in passes:
        tally.passed(num_tokens, num_drafts)
    return tally


@given(st.lists(PASSES, max_size=3))
def test_tokens_are_passes_and_drafts_that_stood(sequences: list[list[tuple[int, int]]]) -> None:
    found = DraftTally.total([tallied(passes) for passes in sequences])
    counted = [(tokens, drafts) for passes in sequences for tokens, drafts in passes if tokens]
    if not any(drafts for _, drafts in counted):
        assert found is None
        return
    assert found is not None
    assert found.num_tokens == sum(tokens for tokens, _ in counted)
    assert found.num_passes + found.num_accepted_tokens == found.num_tokens
    assert found.tokens_per_pass == found.num_tokens / len(counted)
    assert found.num_draft_tokens == sum(drafts for _, drafts in counted)
    assert found.num_verifying_passes == sum(drafts > 0 for _, drafts in counted)
    per_pos = found.num_accepted_tokens_per_pos
    assert sum(per_pos) == found.num_accepted_tokens == sum(num_accepted(t, d) for t, d in counted)
    assert list(per_pos) == sorted(per_pos, reverse=True), "a draft stands only behind those before it"
    assert len(per_pos) == max(drafts for _, drafts in counted)
    assert found == DraftTally.total([tallied(counted)]), "it does not matter whose they are"


def test_k_accepted_drafts_are_k_plus_1_tokens_of_one_pass() -> None:
    for k in range(1, 9):
        found = DraftTally.total([tallied([(k + 1, k)])])
        assert found is not None
        assert (found.num_passes, found.num_accepted_tokens, found.tokens_per_pass) == (1, k, k + 1)
        assert found.num_accepted_tokens_per_pos == (1,) * k
