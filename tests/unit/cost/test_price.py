"""The price of tokens: the arithmetic, and the refusal of invalid prices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost.price import RunCost, check_price_per_hour, cost_per_million_tokens
from twostroke.errors import InvalidParameter

RATES = st.floats(1e-3, 1e6)


@given(RATES, RATES, st.integers(1, 10**9), st.integers(1, 10**9))
def test_the_bill_is_shared_by_the_tokens(price: float, duration_s: float, prompts: int, outputs: int) -> None:
    found = RunCost.of(price, duration_s, num_prompt_tokens=prompts, num_output_tokens=outputs)
    assert found.total == pytest.approx(price * duration_s / 3600)
    assert found.per_million_output_tokens is not None
    assert found.per_million_tokens is not None
    assert found.per_million_output_tokens * outputs == pytest.approx(found.total * 1e6)
    assert found.per_million_tokens * (prompts + outputs) == pytest.approx(found.total * 1e6)
    assert found.per_million_output_tokens == pytest.approx(cost_per_million_tokens(price, outputs / duration_s))


@pytest.mark.parametrize("price", [0, 0.0, -1.0, float("nan"), float("inf"), 1e16, True, "2.5", [1.0]], ids=str)
def test_what_is_no_price_is_refused(price: object) -> None:
    with pytest.raises(InvalidParameter, match=r"price_per_hour=.*must be a number above 0"):
        check_price_per_hour(price)


@pytest.mark.parametrize("price", [None, 1, 2.5, 1e-9])
def test_prices(price: object) -> None:
    check_price_per_hour(price)
