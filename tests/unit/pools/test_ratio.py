from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twostroke.errors import InvalidParameter
from twostroke.pools.ratio import suggested_ratio

USUAL: dict[str, Any] = {
    "prompt_tokens_per_s": 3000.0,
    "output_tokens_per_s": 800.0,
    "prefill_tokens_per_s": 1000.0,
    "step_s": 0.03,
    "step_s_per_sequence": 0.001,
    "tpot_target_s": 0.05,
    "max_num_seqs": 64,
}


@given(prompts=st.floats(0, 1e6), outputs=st.floats(0, 1e6), num_members=st.integers(2, 200), slope=st.floats(0, 0.01))
def test_a_split_is_as_even_as_whole_members_allow(
    prompts: float, outputs: float, num_members: int, slope: float
) -> None:
    load = {"prompt_tokens_per_s": prompts, "output_tokens_per_s": outputs, "step_s_per_sequence": slope}
    ratio = suggested_ratio(**(USUAL | load))
    num_prefill, num_decode = ratio.split(num_members)
    assert min(num_prefill, num_decode) >= 1
    assert num_prefill + num_decode == num_members
    busiest = max(ratio.num_prefill / num_prefill, ratio.num_decode / num_decode)
    for other in range(1, num_members):
        assert busiest <= max(ratio.num_prefill / other, ratio.num_decode / (num_members - other))


def test_nothing_to_decode_has_no_ratio() -> None:
    ratio = suggested_ratio(**(USUAL | {"output_tokens_per_s": 0.0}))
    assert (ratio.prefill_per_decode, ratio.split(4)) == (None, (3, 1))


def test_what_cannot_be_divided_by_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="prefill_tokens_per_s=0"):
        suggested_ratio(**(USUAL | {"prefill_tokens_per_s": 0.0}))
    with pytest.raises(InvalidParameter, match=r"step_s=0.*: must be more than 0 where a stream adds nothing"):
        suggested_ratio(**(USUAL | {"step_s": 0.0, "step_s_per_sequence": 0.0}))
    assert suggested_ratio(**(USUAL | {"step_s": 0.0})).decode_tokens_per_s == pytest.approx(1000.0)
    with pytest.raises(InvalidParameter, match="num_members=1: each pool needs a member"):
        suggested_ratio(**USUAL).split(1)
