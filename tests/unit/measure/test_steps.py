"""Steps that are timed for the model of step times fit into any context and determine each of its terms."""

from __future__ import annotations

import pytest

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_fit import fit_step_model
from twostroke.measure.steps import measure_steps


@pytest.mark.parametrize("max_model_len", [6, 40, 200, 600])
def test_any_context_holds_what_is_timed(max_model_len: int) -> None:
    load = LoadConfig(threads=1, max_model_len=max_model_len)
    found = measure_steps(load, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), CacheConfig(), repeats=2)
    assert found.limits is not None
    works = [step.work for step in found.steps]
    assert {1, 2, 3, 4} <= {work.num_logits_rows for work in works if not work.num_pairs} or max_model_len == 6
    assert max(work.num_tokens for work in works) <= 64


def test_both_strokes_are_timed_alone_and_together() -> None:
    load = LoadConfig(threads=1, max_model_len=400)
    found = measure_steps(load, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), CacheConfig(), repeats=3)
    works = [step.work for step in found.steps]
    chunks = {work.num_tokens for work in works if work.num_pairs and not work.num_seen}
    assert {16, 32, 64} <= chunks
    assert any(work.num_pairs and work.num_seen for work in works), "no step of both strokes"
    model = fit_step_model(found.steps)
    assert model.layers.at(64) > model.layers.at(1)
    assert model.quality is not None
