"""Reports of the server about itself: metrics, timelines, traces, the flight recorder, health."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.local_server import LocalServer
from faulty_engine import ROT
from metrics_page import check_documented
from server_process import ServerProcess
from twostroke.cli.doctor import doctor
from twostroke.cli.explain import explain
from twostroke.engine.event_sinks import read_events
from twostroke.errors import ClientError, InvalidParameter
from twostroke.events import StepCommitted, TokensDelivered
from twostroke.kv_check import Verdict
from twostroke.scheduler.replay import replay

BODY: dict[str, Any] = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def server(dumps: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(
        *("--metrics-compat", "vllm", "--metrics-compat", "sglang", "--max-num-seqs", "2"),
        *("--flight-recorder-dir", str(dumps)),
    )
    yield server
    server.stop()


def samples(server: ServerProcess) -> dict[str, float]:
    """Return every sample of /metrics, by its name and its labels without model_name and engine."""
    found: dict[str, float] = {}
    text = server.http.get("/metrics").text
    check_documented(text)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + (json.dumps(labels, sort_keys=True) if labels else "")] = sample.value
    return found


def test_metrics_agree_with_the_answers(server: ServerProcess) -> None:
    before = samples(server)
    usages = [server.post("/v1/completions", BODY | {"n": n}).json()["usage"] for n in (1, 3)]
    stopped = server.post("/v1/completions", BODY | {"stop": ["*"], "max_tokens": 1000}).json()["usage"]
    idle = re.compile(r"^twostroke:num_requests_running\S* 0\.0$", re.MULTILINE)
    # the client of a text that has stopped gets its answer before the engine is told
    server.wait_for("idle", "/metrics", lambda answer: idle.search(answer.text))
    after = samples(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    num_tokens = sum(usage["completion_tokens"] for usage in (*usages, stopped))
    for prefix in ("twostroke", "vllm"):
        # a stop string is found in the text: steps until the engine is told make tokens that are dropped
        assert num_tokens <= grown(f"{prefix}:generation_tokens_total") < num_tokens + 1000
        assert grown(f"{prefix}:request_generation_tokens_sum") == num_tokens
        assert grown(f'{prefix}:request_success_total{{"finished_reason": "length"}}') == 4
        assert grown(f'{prefix}:request_success_total{{"finished_reason": "stop"}}') == 1
        assert grown(f"{prefix}:time_to_first_token_seconds_count") == 5
    assert after["twostroke:num_requests_running"] == after["twostroke:num_requests_waiting"] == 0
    assert grown('twostroke:http_responses_total{"route": "/v1/completions", "status": "200"}') == 3


def test_a_server_that_checks_its_cache_finds_bad_memory_and_shows_it(tmp_path: Path) -> None:
    """At a real server whose engine loses bits: counted, dumped, explained, and the answer is right all the same."""
    server = ServerProcess(
        *("--kv-check-rate", "1", "--flight-recorder-dir", str(tmp_path)),
        command=(sys.executable, str(Path(__file__).parents[1] / "rotting_server.py")),
    )
    try:
        long = {"prompt": [10 + i % 50 for i in range(70)], "max_tokens": 4, "temperature": 0}
        first, sound = (server.post("/v1/completions", long).json() for _ in range(2))
        before = samples(server)
        server.post("/v1/completions", long | {"prompt": [ROT]})
        rotten = server.post("/v1/completions", long | {"request_id": "rotten"}).json()
        assert first["choices"] == sound["choices"] == rotten["choices"]
        assert sound["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        assert rotten["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        after = samples(server)
        counts = [
            [found[f'twostroke:kv_checks_total{{"verdict": "{verdict}"}}'] for verdict in Verdict]
            for found in (before, after)
        ]
        assert counts == [[1, 0, 0], [1, 0, 1]]
        assert (before["twostroke:kv_quarantined_blocks"], after["twostroke:kv_quarantined_blocks"]) == (0, 1)
        assert after["twostroke:kv_check_seconds_total"] > before["twostroke:kv_check_seconds_total"] > 0
        text = server.http.get("/v1/requests/cmpl-rotten/timeline", params={"format": "text"}).text
        assert "corrupt, and out of use now" in text
        server.wait_for("dumped", "/health", lambda _: "the last" in server.stderr)
        (dump,) = tmp_path.glob("twostroke-flight-*.jsonl")
        assert replay(read_events(dump)) is None
        assert "is corrupt" in server.stderr
    finally:
        server.stop()


def test_refusals_and_ignored_fields_are_counted(server: ServerProcess) -> None:
    server.post("/v1/completions", BODY | {"temperature": -1})
    server.post("/v1/completions", BODY | {"best_off": 1})
    server.http.get("/no/such/path")
    found = samples(server)
    assert found['twostroke:http_responses_total{"route": "/v1/completions", "status": "400"}'] == 1
    assert found['twostroke:http_responses_total{"route": "other", "status": "404"}'] == 1
    assert found['twostroke:ignored_params_total{"field": "best_off"}'] == 1


def test_a_timeline_as_text_and_one_that_is_not_there(server: ServerProcess) -> None:
    server.post("/v1/completions", BODY | {"request_id": "seen"})
    text = server.http.get("/v1/requests/cmpl-seen/timeline", params={"format": "text"}).text
    assert "prefill" in text
    assert "decode" in text
    missing = server.http.get("/v1/requests/cmpl-never/timeline")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    assert server.http.get("/v1/requests/cmpl-seen/timeline", params={"format": "xml"}).status_code == 400


def test_explain_asks_a_server(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.post("/v1/completions", BODY | {"request_id": "asked"})
    explain("cmpl-asked", url=server.url, trace=tmp_path / "trace.json")
    assert capsys.readouterr().out == server.http.get("/v1/requests/cmpl-asked/timeline?format=text").text
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    explain("cmpl-asked", url=server.url, json_output=True)
    assert json.loads(capsys.readouterr().out)["request_id"] == "cmpl-asked"
    for given, told in (("cmpl-never", "answers 404"), ("cmpl-asked", "cannot be reached")):
        with pytest.raises(InvalidParameter, match=told):
            explain(given, url=server.url if given == "cmpl-never" else "http://127.0.0.1:9")
    with pytest.raises(ClientError, match="no run is given: use twostroke explain cmpl-asked --event-log FILE"):
        explain("cmpl-asked")


def test_doctor_asks_a_server(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.post("/v1/completions", BODY).json()
    doctor(url=server.url, json_output=True)
    assert json.loads(capsys.readouterr().out)["signals"]["num_requests"] >= 1
    with pytest.raises(InvalidParameter, match=r"cannot be reached \(Connection refused\)"):
        doctor(url="http://127.0.0.1:9")
    after = server.post("/v1/completions", BODY).json()
    assert after["choices"] == before["choices"], "it only looked"


def test_the_trace_opens_in_perfetto(server: ServerProcess) -> None:
    server.post("/v1/completions", BODY)
    events = server.http.get("/v1/trace").json()["traceEvents"]
    assert {event["ph"] for event in events} >= {"X", "C", "M"}


def test_the_flight_recorder_replays(server: ServerProcess, tmp_path: Path) -> None:
    server.post("/v1/completions", BODY)
    path = tmp_path / "flight.jsonl"
    path.write_bytes(server.http.get("/flight_recorder").content)
    assert "def f" not in path.read_text()
    assert replay(read_events(path)) is None


def test_every_hop_of_a_token_is_recorded(server: ServerProcess, tmp_path: Path) -> None:
    server.post("/v1/completions", BODY)
    path = tmp_path / "dump.jsonl"
    path.write_bytes(server.http.get("/flight_recorder").content)
    events = list(read_events(path))
    sampled = {event.time_s for event in events if isinstance(event, StepCommitted) and event.commits}
    delivered = [event for event in events if isinstance(event, TokensDelivered)]
    assert delivered
    for event in delivered:
        assert event.sampled_s in sampled
        assert event.sampled_s <= event.sent_s <= event.received_s <= event.time_s


def test_what_was_left_to_the_engine_is_told_as_it_was_chosen(server: ServerProcess) -> None:
    """The server starts with "auto" for the types and the kernels."""
    engine = server.http.get("/server_info").json()["engine"]
    assert (engine["dtype"], engine["kv_cache_dtype"], engine["block_size"]) == ("bfloat16", "bf16", 16)
    assert engine["num_threads"] >= 1
    assert engine["kernels"].startswith(("native", "reference"))
    told = [
        json.dumps(engine),
        json.dumps(server.http.get("/live/state").json()["engines"]),
        server.http.get("/v1/models").text,
        server.http.get("/metrics").text,
    ]
    assert not [text for text in told if '"auto"' in text]
    assert 'cache_dtype="bf16"' in told[-1]


def test_a_crash_leaves_a_dump_and_health_says_why(server: ServerProcess, dumps: Path) -> None:
    server.post("/v1/completions", BODY | {"request_id": "before"})
    found = server.http.get("/server_info").json()
    assert found["health"]["state"] == "running"
    os.kill(LocalServer(server.url, server.process.pid).engine_pid(), signal.SIGKILL)
    server.wait_for("restarted", "/server_info", lambda answer: answer.json()["health"]["num_restarts"] == 1)
    server.wait_for("ready", "/ready", lambda answer: answer.status_code == 200)
    (dump,) = dumps.glob("twostroke-flight-*.jsonl")
    assert any("cmpl-before" in repr(event) for event in read_events(dump))
    assert re.search(r"signal 9; the last \d+ events are in", server.stderr)
    assert server.post("/v1/completions", BODY).status_code == 200
    assert samples(server)["twostroke:engine_starts_total"] == 2


def test_a_refusal_at_the_gate_counts_for_its_route() -> None:
    """Requests without a key are told from requests for unknown paths."""
    server = ServerProcess("--api-key", "secret", "--admin-api-key", "admin")
    try:
        for path in ("/metrics", "/v1/requests/cmpl-a/timeline", "/no/such/path"):
            assert server.http.get(path).status_code == 401
        text = server.http.get("/metrics", headers={"authorization": "Bearer admin"}).text
    finally:
        server.stop()
    for route in ("/metrics", "/v1/requests/{request_id:request}/timeline", "other"):
        assert f'route="{route}",status="401"}} 1.0\n' in text
