"""Comparisons of plans, by hand."""

from __future__ import annotations

from twostroke.planner.what_if import TwoPools


def test_a_link_hides_the_transfer_where_it_carries_a_token_while_the_next_is_computed() -> None:
    pools = TwoPools(kv_bytes_per_token=131_072, prefill_tokens_per_s=20_000, is_predicted=True)
    assert pools.needed_bytes_per_s == 131_072 * 20_000
    assert pools.is_hidden is None
    enough = TwoPools(131_072, 20_000, True, link_bytes_per_s=131_072 * 20_000)
    assert enough.is_hidden
    half = TwoPools(131_072, 20_000, True, link_bytes_per_s=131_072 * 10_000)
    assert half.is_hidden is False
