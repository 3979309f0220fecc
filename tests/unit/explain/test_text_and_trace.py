from __future__ import annotations

import itertools
import json
from decimal import Decimal

import pytest

from explain_loads import random_load, times_of
from factories import make_layout
from fakes import FakeEngine
from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import EngineStarted, Event, EventRing, StepCommitted, StepScheduled
from twostroke.explain.text import timeline_text
from twostroke.explain.timeline import timeline_of
from twostroke.explain.trace import trace_of

NONE_CACHED = "none cached: no recently computed prompt begins like this one"


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """Two requests; the second waits for the only slot."""
    log = EventRing(1000)
    settings = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8)
    engine = FakeEngine(make_layout(block_size=4), 16, max_model_len=32, scheduler_config=settings, log=log)
    engine.submit("first#0.0", list(range(12)), 2)
    engine.submit("second#1.0", [50], 2, arrival_time_s=-0.25)
    engine.run()
    return list(log)


def test_the_table(events: list[Event]) -> None:
    heading, columns, *rows = timeline_text(timeline_of(events, "first")).splitlines()
    facts = "5,000.000 ms in all, first token after 4,000.000 ms, 12 prompt tokens (0 cached), 2 output tokens"
    assert heading == f"first: ended: length, {facts}"
    assert columns == "   start ms         ms  share  what              why"
    assert rows == [
        "          0  2,000.000  40.0%  waited for slots  1 of 1 running [second#1.0 (2 tokens)]",
        f"  2,000.000  1,000.000  20.0%  prefill           chunk 1 of 2, 8 tokens; {NONE_CACHED}",
        "  3,000.000  1,000.000  20.0%  prefill           chunk 2 of 2, 4 tokens",
        "  4,000.000  1,000.000  20.0%  decode            1 step, 1 token",
    ]


def test_json_has_the_same_segments(events: list[Event]) -> None:
    timeline = timeline_of(events, "second")
    fields = json.loads(json.dumps(timeline.to_dict()))
    (lane,) = fields["lanes"]
    assert (fields["request_id"], fields["e2e_ms"], lane["finish_reason"]) == ("second", 2250.0, "length")
    assert [(s["label"], s["start_ms"], s["duration_ms"]) for s in lane["segments"]] == [
        ("prepare", 0.0, 250.0),
        ("prefill", 250.0, 1000.0),
        ("decode", 1250.0, 1000.0),
    ]
    assert (lane["ttft_ms"], lane["ttft_parts_ms"]) == (1250.0, {"prepare": 250.0, "prefill": 1000.0})


@pytest.mark.parametrize("seed", range(10))
def test_parts_of_the_time_to_the_first_token_add_up_to_it(seed: int) -> None:
    events = random_load(seed)
    for sequence_id in times_of(events):
        (lane,) = json.loads(json.dumps(timeline_of(events, sequence_id).to_dict()), parse_float=Decimal)["lanes"]
        if lane["ttft_ms"] is None:
            assert lane["ttft_parts_ms"] is None
        else:
            assert sum(lane["ttft_parts_ms"].values()) == lane["ttft_ms"]
            assert "decode" not in lane["ttft_parts_ms"]


def test_drafts_have_a_line_and_stand_in_json() -> None:
    log = EventRing(1000)
    engine = FakeEngine(make_layout(block_size=4), 16, max_model_len=32, max_drafts=2, log=log)
    engine.submit("a#0.0", [7], 9)
    engine.run()
    timeline = timeline_of(log, "a")
    (lane,) = timeline.to_dict()["lanes"]
    commits = [c for event in log if isinstance(event, StepCommitted) for c in event.commits]
    stood = [sum(c.num_tokens > position + 1 for c in commits) for position in range(2)]
    num_drafts = sum(c.num_draft_tokens for c in commits)
    assert lane["drafts"] == {
        "num_passes": len(commits),
        "num_tokens": 9,
        "num_verifying_passes": sum(c.num_draft_tokens > 0 for c in commits),
        "num_draft_tokens": num_drafts,
        "num_accepted_tokens": sum(stood),
        "num_accepted_tokens_per_pos": tuple(stood),
        "tokens_per_pass": 9 / len(commits),
    }
    line = f"  drafts: {sum(stood)} of {num_drafts} accepted (by position: {stood[0]}, {stood[1]}); "
    assert line + f"{9 / len(commits):.2f} tokens a pass" in timeline_text(timeline).splitlines()


@pytest.mark.parametrize("seed", range(8))
def test_a_trace_has_every_step_and_every_request_once(seed: int) -> None:
    events = random_load(seed)
    records = json.loads(json.dumps(trace_of(events)))["traceEvents"]
    slices = [record for record in records if record["ph"] == "X"]
    steps = [record for record in slices if record["pid"] == 1]
    assert len(steps) == sum(isinstance(event, StepCommitted) for event in events)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(steps)), "steps overlap"
    tracks = {record["args"]["name"]: record["tid"] for record in records if record["name"] == "thread_name"}
    assert set(tracks) == set(times_of(events))
    for name, track in tracks.items():
        mine = [record for record in slices if record["pid"] == 2 and record["tid"] == track]
        (lane,) = timeline_of(events, name).lanes
        assert sum(record["dur"] for record in mine) == pytest.approx(lane.duration_s * 1e6)
    assert min(record["ts"] for record in slices) == 0.0


def test_counters_are_those_of_the_batches(events: list[Event]) -> None:
    records = trace_of(events)["traceEvents"]
    batches = [event.batch for event in events if isinstance(event, StepScheduled)]
    (started,) = [event for event in events if isinstance(event, EngineStarted)]

    def counted(name: str) -> list[dict[str, int]]:
        return [record["args"] for record in records if record["ph"] == "C" and record["name"] == name]

    assert counted("queue") == [{"waiting": b.num_waiting, "running": b.num_running} for b in batches]
    assert counted("queue")[0] == {"waiting": 1, "running": 1}
    assert [c["used"] for c in counted("KV blocks")] == [started.num_blocks - b.num_free_blocks for b in batches]
    assert counted("tokens")[2] == {"prefill": 8, "decode": 0}


def test_a_trace_of_nothing() -> None:
    assert [record["ph"] for record in trace_of([])["traceEvents"]] == ["M", "M"]
