"""Messages to a lender about the layers of a step."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest

from factories import make_layout
from twostroke.batch import NewRequest
from twostroke.engine.generation import Generation, GenerationRequest
from twostroke.engine.kv_lending import KVLending
from twostroke.request import Arrival
from twostroke.sampling_params import SamplingParams


def arrival(num_tokens: int, **more: int) -> Arrival:
    new = NewRequest("r", tuple(range(num_tokens)), SamplingParams(max_tokens=1), 0)
    return Generation(GenerationRequest(new, 0.0, 1, lend_as=7, **more), 4, hashes_blocks=True).arrival


@pytest.mark.parametrize(("split_layers", "behind"), [(0, [1, 2, 3]), (3, [None, 1, 2])])
def test_of_several_ranks_a_layer_is_there_when_the_next_is_written(
    split_layers: int, behind: list[int | None]
) -> None:
    lender = Mock()
    scheduler = Mock(**{"block_tables.return_value": ((0, 1),)})
    lending = KVLending(scheduler, lender, make_layout(block_size=4), split_layers=split_layers)
    lending.arrived(arrival(8))
    share = Mock(request_id="r", num_computed_tokens=0, num_scheduled_tokens=8)
    lending.decided(Mock(preempted_request_ids=(), admitted=(), requests=(share,)))
    for layer_id, num_there in enumerate(behind):
        lending.layer_written(layer_id)
        assert lender.layer_ready.call_args == (None if num_there is None else call([7], num_there))
    lending.computed()
    assert lender.layer_ready.call_args == call([7], 3)


@pytest.mark.parametrize(("their_size", "num_blocks"), [(0, 5), (2, 5), (4, 5), (8, 4), (16, 4), (32, 0)])
def test_whole_blocks_of_both_sides_are_lent(their_size: int, num_blocks: int) -> None:
    lender = Mock()
    KVLending(Mock(), lender, make_layout(block_size=4)).arrived(arrival(22, lend_block_size=their_size))
    lender.grant.assert_called_once_with(7, num_blocks)
    assert lender.invalidate.called == (num_blocks == 0)
