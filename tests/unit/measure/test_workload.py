"""Workloads: seeded, shared where they say so, and traces that keep their sharing when they shrink."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from twostroke.errors import InvalidParameter
from twostroke.measure.workload import (
    Lengths,
    SyntheticSpec,
    TraceSpec,
    block_content,
    synthetic,
    with_arrivals,
    workload_of_lengths,
    workload_of_trace,
)
from twostroke.simulation.trace import TraceEntry, read_trace


def _spec(**changes: object) -> SyntheticSpec:
    base: dict[str, object] = {
        "num_requests": 40,
        "prompt_lengths": Lengths.uniform(3, 9),
        "output_lengths": Lengths.exponential(5),
    }
    return SyntheticSpec(**(base | changes))  # type: ignore[arg-type]


def test_the_seed_decides_everything() -> None:
    assert synthetic(_spec(seed=1)) == synthetic(_spec(seed=1))
    assert synthetic(_spec(seed=1)) != synthetic(_spec(seed=2))


def test_requests_are_as_specified() -> None:
    workload = synthetic(_spec(vocab_size=100, reserved_token_ids=10))
    assert len(workload) == 40
    assert all(3 <= len(r.prompt_token_ids) <= 9 and r.max_tokens >= 1 for r in workload.requests)
    assert {t for r in workload.requests for t in r.prompt_token_ids} <= set(range(10, 100))
    assert all(r.arrival_s == 0 for r in workload.requests)
    assert len({r.seed for r in workload.requests}) == 40
    assert workload.num_prompt_tokens == sum(len(r.prompt_token_ids) for r in workload.requests)
    assert workload.num_output_tokens == sum(workload.output_lengths)
    assert json.loads(json.dumps(workload.description))["output_lengths"] == "exponential:5"


def test_arrivals_keep_their_rate_and_leave_lengths_alone() -> None:
    timed = synthetic(_spec(num_requests=4000, request_rate=8.0))
    arrivals = [r.arrival_s for r in timed.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(500, rel=0.07)
    assert timed.output_lengths == synthetic(_spec(num_requests=4000)).output_lengths


def test_groups_share_a_prefix_and_nothing_else() -> None:
    workload = synthetic(_spec(num_prefix_groups=3, prefix_length=20))
    prefixes = [r.prompt_token_ids[:20] for r in workload.requests]
    assert len(set(prefixes)) == 3
    assert prefixes[0] == prefixes[3] != prefixes[1]
    assert len({r.prompt_token_ids for r in workload.requests}) == 40


@pytest.mark.parametrize(
    "bad",
    [
        {"num_requests": 0},
        {"request_rate": 0.0},
        {"prefix_length": 5},
        {"num_prefix_groups": 2},
        {"vocab_size": 16},
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter):
        _spec(**bad)


def test_given_lengths_and_arrivals() -> None:
    workload = with_arrivals(workload_of_lengths([(3, 5), (8, 1)]), [0.5, 2.0])
    assert [(len(r.prompt_token_ids), r.max_tokens, r.arrival_s) for r in workload.requests] == [
        (3, 5, 0.5),
        (8, 1, 2.0),
    ]
    assert workload.max_request_tokens == 9
    assert len(workload.first(1)) == 1
    assert workload.within_context(8).output_lengths == (5,)
    with pytest.raises(ValueError, match="zip"):
        with_arrivals(workload, [0.0])


TRACE = [
    TraceEntry(0.0, 1100, 130, (0, 1, 2)),
    TraceEntry(1.5, 1024, 1, (0, 1)),
    TraceEntry(2.0, 513, 64, (0, 7)),
]


def test_a_scaled_trace_keeps_lengths_and_sharing() -> None:
    spec = TraceSpec(divisor=64)
    workload = workload_of_trace(TRACE, spec)
    assert spec.block_size == 8
    assert [len(r.prompt_token_ids) for r in workload.requests] == [18, 16, 9]  # each /64, rounded up
    assert workload.output_lengths == (3, 1, 1)
    first, second, third = (r.prompt_token_ids for r in workload.requests)
    assert first[:16] == second
    assert first[:8] == third[:8]
    assert first[8] != third[8]
    assert [r.arrival_s for r in workload_of_trace(TRACE, TraceSpec(time_divisor=2)).requests] == [0.0, 0.75, 1.0]
    assert workload_of_trace(TRACE, TraceSpec(max_output_tokens=1)).output_lengths == (1, 1, 1)


@pytest.mark.parametrize("divisor", [1, 4, 32, 128, 256])
def test_blocks_stay_blocks_whatever_the_divisor(divisor: int) -> None:
    spec = TraceSpec(divisor=divisor)
    for entry, request in zip(TRACE, workload_of_trace(TRACE, spec).requests, strict=True):
        assert -(-len(request.prompt_token_ids) // spec.block_size) == len(entry.hash_ids)


def test_different_hash_ids_are_different_contents() -> None:
    spec = TraceSpec(divisor=256, vocab_size=1024)
    contents = {block_content(i, spec) for i in range(200_000)}
    assert len(contents) == 200_000
    assert all(16 <= t < 1024 for content in list(contents)[:1000] for t in content)


def test_traces_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1500, "input_length": 513, "output_length": 3, "hash_ids": [4, 5]}\n\n')
    assert read_trace(path) == [TraceEntry(1.5, 513, 3, (4, 5))]
    for text in (
        '{"timestamp": 0}\n',
        "nonsense\n",
        '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [4]}',
    ):
        path.write_text(text)
        with pytest.raises(InvalidParameter, match="Mooncake"):
            read_trace(path)
    with pytest.raises(InvalidParameter, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")


def test_lengths_and_contents_do_not_depend_on_the_platform() -> None:
    """Figures are compared across machines, so the draw itself is pinned."""
    workload = synthetic(_spec(seed=7))
    assert sum(workload.output_lengths) == 187
    assert workload.requests[0].prompt_token_ids[:3] == (1163, 1150, 639)


def test_arrivals_of_shape_one_are_poissons_draw_by_draw() -> None:
    spec = SyntheticSpec(num_requests=50, request_rate=4.0, seed=3)
    exponential = np.cumsum(np.random.default_rng((3, 1)).exponential(1 / 4.0, 50))
    assert [r.arrival_s for r in synthetic(spec).requests] == exponential.tolist()


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_burstiness_changes_how_even_arrivals_are_and_not_how_many(burstiness: float, variation: float) -> None:
    spec = SyntheticSpec(num_requests=20_000, request_rate=5.0, burstiness=burstiness, prompt_lengths=Lengths.fixed(1))
    gaps = np.diff([0.0, *(r.arrival_s for r in synthetic(spec).requests)])
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-9)
    json.dumps(synthetic(spec).description, allow_nan=False)


def test_blocks_of_few_words_are_told_apart() -> None:
    spec = TraceSpec(vocab_size=16 + 260, divisor=128)  # three digits and a fourth token
    assert len({block_content(i, spec)[:3] for i in range(260**2 + 500)}) == 260**2 + 500
    with pytest.raises(InvalidParameter, match="trace_divisor=256"):
        block_content(3, TraceSpec(vocab_size=16 + 260, divisor=256))
    with pytest.raises(InvalidParameter, match="trace=1000000"):
        block_content(1_000_000, spec)
