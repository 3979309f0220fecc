"""Figures of exchanges that are written down by hand."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.errors import InvalidParameter
from twostroke.measure.serve.figures import Slo, figures_of
from twostroke.measure.serve.load import LoadRun
from twostroke.measure.serve.openai_wire import Exchange


def exchange(scheduled_s: float, chunks: dict[float, int], **more: Any) -> Exchange:
    made = Exchange(scheduled_s, sent_s=scheduled_s + 0.5, chunk_times_s=[*chunks], chunk_tokens=[*chunks.values()])
    made.end_s = max([scheduled_s, *chunks])
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_latencies_count_from_when_the_request_was_due() -> None:
    one = exchange(1.0, {2.0: 1, 2.25: 1, 3.25: 4})
    assert one.lateness_s == 0.5
    assert one.ttft_s == 1.0
    assert one.e2e_s == 2.25
    assert one.gaps_s == [0.25, 1.0]
    assert one.itl_s == [0.25, 0.25, 0.25, 0.25, 0.25]
    assert one.tpot_s == 1.25 / 5
    assert exchange(1.0, {2.0: 1}).tpot_s is None
    assert exchange(1.0, {}).ttft_s is None


def test_tokens_of_one_moment_are_one_chunk() -> None:
    one = exchange(0.0, {})
    for count, time_s in ((0, 1.0), (1, 2.0), (2, 2.0), (1, 3.0)):
        one.add_tokens(count, time_s)
    assert (one.chunk_times_s, one.chunk_tokens) == ([2.0, 3.0], [3, 1])


def test_goodput_counts_what_keeps_every_limit() -> None:
    good = exchange(0.0, {1.0: 1, 1.5: 1}, prompt_tokens=10, completion_tokens=2)
    late = exchange(0.0, {1.5: 1, 2.0: 1}, prompt_tokens=10, completion_tokens=2)
    slow = exchange(0.0, {1.0: 1, 4.0: 1}, prompt_tokens=10, completion_tokens=2)
    single = exchange(0.0, {1.0: 1}, prompt_tokens=10, completion_tokens=1)
    refused = exchange(0.0, {}, failure="429", retry_after_s=2.0, end_s=0.75)
    found = figures_of(LoadRun((good, late, slow, single, refused), 0.5), Slo.parse(["ttft:1000,tpot:500"]))
    assert found["duration_s"] == 4.0
    assert found["throughput"] == {"requests_per_s": 1.0, "output_tok_s": 7 / 4, "prompt_tok_s": 10.0}
    goodput = found["goodput"]
    assert goodput["requests_per_s"] == 0.5
    assert goodput["share"] == 0.4
    assert goodput["missed"] == {"ttft": 1, "tpot": 1}
    assert goodput["slo_ms"] == {"ttft": 1000.0, "tpot": 500.0}
    assert found["failures"]["by_kind"] == {"429": 1}
    assert found["failures"]["num_refused"] == 1
    assert found["failures"]["refusal_latency_s"]["p50"] == 0.25  # from when it was sent: the server's part
    assert found["failures"]["retry_after_s"]["mean"] == 2.0
    assert found["latency"]["ttft_s"]["count"] == 4
    assert found["from_sent"]["ttft_s"]["p50"] == found["latency"]["ttft_s"]["p50"] - 0.5
    assert found["generator"]["cpu_us_per_token"] == pytest.approx(1e6 * 0.5 / 7)
    assert found["remarks"] == []


def test_a_price_says_what_a_million_tokens_cost() -> None:
    """The whole bill, with idle time and refused requests, is divided by the output tokens."""
    first = exchange(0.0, {1.0: 1, 2.0: 1}, prompt_tokens=10, completion_tokens=2)
    second = exchange(0.0, {1.0: 1, 4.0: 2}, prompt_tokens=5, completion_tokens=3)
    refused = exchange(0.0, {}, failure="429", end_s=0.75)
    run = LoadRun((first, second, refused), 0.1)
    found = figures_of(run, Slo({}), price_per_hour=3600.0)["cost"]
    assert found == {
        "price_per_hour": 3600.0,
        "total": 4.0,
        "per_million_output_tokens": pytest.approx(4e6 / 5),
        "per_million_tokens": pytest.approx(4e6 / 20),
    }
    assert figures_of(run, Slo({}))["cost"] is None


def test_cost_of_what_nobody_counted_is_left_out() -> None:
    unbilled = exchange(0.0, {1.0: 1, 2.0: 1})
    found = figures_of(LoadRun((unbilled,), 0.1), Slo({}), price_per_hour=1.8)["cost"]
    assert found["per_million_tokens"] is None
    assert found["per_million_output_tokens"] == pytest.approx(1.8 / 3600 * 2 / 2 * 1e6)
    nothing = exchange(0.0, {}, failure="connection", end_s=0.0)
    found = figures_of(LoadRun((nothing,), 0.0), Slo({}), price_per_hour=1.8)["cost"]
    assert (found["total"], found["per_million_output_tokens"], found["per_million_tokens"]) == (0.0, None, None)


def test_time_series_add_up() -> None:
    run = LoadRun((exchange(0.0, {1.0: 1, 4.0: 2}), exchange(2.0, {3.0: 5})), 0.1)
    series = figures_of(run, Slo({}))["over_time"]
    width_s = series["end_s"][0]
    assert series["end_s"][-1] == pytest.approx(4.0)
    assert sum(rate * width_s for rate in series["output_tok_s"]) == pytest.approx(8)
    assert max(series["under_way"]) == 2
    assert series["under_way"][-1] == 0


def test_doubtful_figures_say_so() -> None:
    chunks_lie = exchange(0.0, {1.0: 1, 2.0: 1}, completion_tokens=5)
    no_usage = exchange(0.0, {1.0: 1, 2.0: 1})
    remarks = figures_of(LoadRun((chunks_lie, no_usage), 1.9), Slo({}))["remarks"]
    assert [remark.split(":")[0] for remark in remarks] == [
        "1 answers had other numbers of tokens than their chunks",
        "1 answers had no usage",
        "the load generator was busy 95% of the time",
    ]


def test_a_run_in_which_nothing_came_back() -> None:
    found = figures_of(LoadRun((exchange(0.0, {}, failure="connection", end_s=0.0),), 0.0), Slo({}))
    assert found["num_completed"] == 0
    assert found["throughput"]["output_tok_s"] == 0.0
    assert found["failures"]["num_errors"] == 1
    assert found["latency"]["ttft_s"] == {}


@pytest.mark.parametrize("wrong", ["ttft", "ttft:", "ttft:-1", "ttft:inf", "ttft:nan", "latency:3", "ttft:1 ttft:2"])
def test_slos_that_are_none(wrong: str) -> None:
    with pytest.raises(InvalidParameter, match="goodput="):
        Slo.parse([wrong])
