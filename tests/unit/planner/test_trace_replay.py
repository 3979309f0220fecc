"""A trace in simulated time: whose step times, how many blocks, what was left out, and what other settings give."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from traces import conversations, long_documents, write_trace
from twostroke.config.engine import EngineConfig
from twostroke.cost.calibration import Calibration, Timing
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.planner import trace_replay, worker_kinds
from twostroke.planner.options import TraceOptions
from twostroke.planner.show_replay import print_replayed_trace, replayed_trace_json
from twostroke.planner.trace_replay import TraceReplayResult, replay_trace
from twostroke.simulation.settings import WhatIf

SECOND = StepTimeModel(layers=Curve((1,), (1.0,)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)


def replayed(path: Path, *words: str, **given: Any) -> TraceReplayResult:
    """On an L4, lengths divided by 64, in blocks of 8."""
    config = EngineConfig.from_keywords(**{"model": "embedded", "threads": 1, "block_size": 8} | given)
    what_ifs = (WhatIf.read(words),) if words else ()
    return replay_trace(path, config, TraceOptions(device_name="L4", trace_divisor=64), what_ifs)


def text_of(found: TraceReplayResult) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    print_replayed_trace(found, console)
    return console.export_text()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "chats.jsonl", conversations(150))


def test_a_trace_is_replayed_whole_by_floors(trace: Path) -> None:
    found = replayed(trace, "request_rate_factor=1000", "max_num_seqs=2")
    assert found.num_requests == len(found.predicted.run.requests) == 150
    assert found.num_beyond_context == found.num_beyond_kv == 0
    told = json.loads(json.dumps(replayed_trace_json(found)))
    assert told["step_times"]["are_floors"] is True
    assert told["machine"] == "L4"
    assert told["predicted"]["num_cached_tokens"] > 0
    (other,) = told["what_if"]
    assert other["settings"] == {"request_rate_factor": 1000, "max_num_seqs": 2}
    assert other["ttft_p99"] > told["predicted"]["ttft_p99"]
    text = text_of(found)
    for words in (
        "chats.jsonl: 150 requests",
        "on L4: published figures, so step times are floors",
        "prefix cache: ",
        "what if A: request_rate_factor=1000 max_num_seqs=2",
        "simulated ",
        "by floors",
        "TTFT p99 ms",
        "preemptions",
    ):
        assert words in text, words
    assert "left out" not in text


def test_what_is_too_long_is_counted_and_said(tmp_path: Path) -> None:
    entries = long_documents(60)
    lengths = [sum(trace_replay.num_tokens_of(entry, 64)) for entry in entries]
    found = replayed(write_trace(tmp_path / "t", entries), max_model_len=400, num_kv_blocks=50)
    assert found.memory.max_model_len == 400
    assert (found.num_beyond_context, found.num_beyond_kv) == (sum(n > 400 for n in lengths), 0)
    assert f"{found.num_beyond_context:,} more are left out: longer than the 400 tokens" in text_of(found)
    found = replayed(tmp_path / "t", num_kv_blocks=45)
    assert found.memory.max_model_len == 360
    assert found.num_beyond_kv == sum(360 < n <= found.max_context for n in lengths)
    assert "longer than the 360 tokens that all of the KV memory holds" in text_of(found)
    assert found.num_requests + found.num_beyond_kv + found.num_beyond_context == 60


def test_fewer_blocks_find_less(trace: Path) -> None:
    found = replayed(trace, "num_kv_blocks=100", num_kv_blocks=4000, max_model_len=700)
    cached = [sum(one.num_cached_tokens for one in p.run.requests) for p in (found.predicted, *found.what_ifs)]
    assert cached[0] > cached[1] > 0


def test_this_machine_needs_a_calibration(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_keywords(model="embedded", threads=1, block_size=8)
    options = TraceOptions(trace_divisor=64, memory=1 << 28)
    monkeypatch.setattr(worker_kinds, "find_calibration", lambda *_: (None, "not calibrated"))
    with pytest.raises(InvalidParameter, match=r"has no step times on this machine .* --device-name T4, A10"):
        replay_trace(trace, config, options)
    calibration = Calibration(
        model="embedded",
        load={},
        machine={},
        context_tokens=0,
        most_drafts=1,
        step_s=(Timing(1, 1.0), Timing(2, 1.0)),
        step_times=SECOND,
    )
    monkeypatch.setattr(worker_kinds, "find_calibration", lambda *_: (calibration, "calibrated: a.json"))
    found = replay_trace(trace, config, options)
    assert found.predicted.run.duration_s >= len(found.predicted.run.steps)
    assert "on this machine: calibrated: a.json" in text_of(found)
    assert "by floors" not in text_of(found)


def test_too_few_requests_answer_no_what_if(tmp_path: Path) -> None:
    """The limit of `plan --search`, and of an event log's what-ifs."""
    trace = write_trace(tmp_path / "two.jsonl", conversations(2))
    assert replayed(trace).num_requests == 2
    assert "two.jsonl: 2 requests, " in text_of(replayed(trace))
    with pytest.raises(
        InvalidParameter, match=r"has 2 requests of at most .* tokens, the longest that fits; with fewer"
    ):
        replayed(trace, "max_num_seqs=2")


def test_nothing_fits(trace: Path) -> None:
    with pytest.raises(InvalidParameter, match="holds no request of at most 2 tokens"):
        replayed(trace, max_model_len=2)
