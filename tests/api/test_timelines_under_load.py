"""Timelines of a load on a real server, read over HTTP: every nanosecond of every request is in exactly one segment.

`make soak` draws 50 loads, 10,000 requests in all; CI the first. A load brings its own settings of the scheduler.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import settings
from prometheus_client.parser import text_string_to_metric_families

from explain_loads import times_of
from server_process import PATIENCE_S, ServerProcess
from twostroke.engine.event_sinks import read_events
from twostroke.events import Event, RequestFinishedByCaller
from twostroke.explain.names import name_of
from twostroke.request import FinishReason

NUM_LOADS = max(1, settings().max_examples // 60)
NUM_REQUESTS = 200
NUM_CLIENTS = 40
SECRETS = ("secret-of-ann", "secret-of-bob")
ADMIN = "secret-of-admin"
FLAGS = (
    *("--api-key", f"ann:{SECRETS[0]}", "--api-key", f"bob:{SECRETS[1]}", "--admin-api-key", ADMIN),
    *("--max-model-len", "512", "--max-num-seqs", "16"),
    *("--flight-recorder-minutes", "60", "--max-queue-wait-s", "600"),
)
NUM_KV_BLOCKS = 90
"""For sixteen sequences of up to 23 blocks each, so that some are preempted."""
POLICIES = ("fair", "fcfs", "priority")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """Request of one client."""

    body: Object
    secret: str
    num_lines: int | None = None
    """Of the stream that it reads before it leaves; None: it stays."""
    first_token_timeout_s: float = PATIENCE_S
    """How long it waits for anything."""


@pytest.fixture(params=range(NUM_LOADS))
def load(request: pytest.FixtureRequest) -> Iterator[tuple[ServerProcess, Random]]:
    """Load of a server with its own settings."""
    random = Random(request.param)
    flags = ("--policy", POLICIES[request.param % 3], "--max-num-batched-tokens", str(random.choice([64, 100, 200])))
    server = ServerProcess(*FLAGS, *flags, num_kv_blocks=NUM_KV_BLOCKS)
    server.http.headers["authorization"] = f"Bearer {SECRETS[0]}"
    yield server, random
    server.stop()


def drawn(random: Random, number: int, beginnings: Sequence[Sequence[int]]) -> Asked:
    """Make any request: long or short, with or without a shared prefix, by a client that stays or disconnects."""
    beginning = random.choice(beginnings)[: random.choice([0, 50, 150])]
    rest = [random.randrange(300, 4000) for _ in range(random.randint(1, random.choice([20, 150])))]
    body: Object = {"prompt": [*beginning, *rest], "max_tokens": random.randint(1, 48), "request_id": f"r{number}"}
    body |= {"n": random.choice([1, 1, 1, 2]), "ignore_eos": random.random() < 0.7, "stream": random.random() < 0.5}
    if random.random() < 0.2:
        body["stop"] = [" ", "\n"]
    secret = random.choice(SECRETS)
    chance = random.random()
    if chance < 0.15:
        return Asked(body | {"stream": True, "ignore_eos": True}, secret, num_lines=random.randint(1, 12))
    if chance < 0.25:
        return Asked(body | {"stream": False}, secret, first_token_timeout_s=random.uniform(0.01, 0.5))
    return Asked(body, secret)


def ask(server: ServerProcess, asked: Asked) -> None:
    """Send a request on its own connection, which is closed afterwards."""
    headers = {"authorization": f"Bearer {asked.secret}"}
    url = f"{server.url}/v1/completions"
    is_patient = asked.first_token_timeout_s == PATIENCE_S
    timeout = httpx.Timeout(PATIENCE_S, read=asked.first_token_timeout_s)
    with (
        httpx.Client(headers=headers, timeout=timeout, verify=False) as client,  # to make a TLS context takes 20 ms
        contextlib.nullcontext() if is_patient else contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", url, json=asked.body) as response,
    ):
        assert response.status_code == 200, response.read()
        lines = list(itertools.islice(response.iter_lines(), asked.num_lines))
        assert asked.num_lines or not asked.body["stream"] or "data: [DONE]" in lines


def test_segments_add_up_to_the_whole_of_every_request(load: tuple[ServerProcess, Random], tmp_path: Path) -> None:
    server, random = load
    beginnings = [[random.randrange(300, 4000) for _ in range(150)] for _ in range(3)]
    plan = [drawn(random, number, beginnings) for number in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(lambda asked: ask(server, asked), plan))
    counted = samples(server.wait_for("idle", "/metrics", lambda answer: num_in_engine(answer.text) == 0).text)

    events = recorded(server, tmp_path / "events.jsonl")
    lanes: dict[str, Object] = {}
    for name in {name_of(sequence_id) for sequence_id in times_of(events)}:
        answer = server.http.get(f"/v1/requests/{name}/timeline", headers={"authorization": f"Bearer {ADMIN}"})
        timeline = json.loads(answer.text, parse_float=Decimal, parse_int=Decimal)
        assert timeline["is_complete"]
        assert timeline["e2e_ms"] == max(lane["e2e_ms"] for lane in timeline["lanes"])
        lanes |= {lane["sequence_id"]: lane for lane in timeline["lanes"]}
    stayed = {f"cmpl-{asked.body['request_id']}": asked for asked in plan if asked.num_lines is None}
    stayed = {name: asked for name, asked in stayed.items() if asked.first_token_timeout_s == PATIENCE_S}
    num_lanes = Counter(name_of(sequence_id) for sequence_id in lanes)
    assert all(num_lanes[name] == asked.body["n"] for name, asked in stayed.items())

    for lane in lanes.values():
        adds_up(lane)
    assert {name: lane["e2e_ms"] for name, lane in lanes.items()} == e2e_ms(events)
    served = [lane for lane in lanes.values() if lane["num_output_tokens"]]
    assert counted["twostroke:e2e_request_latency_seconds_count"] == len(served)
    total_s = float(sum(lane["e2e_ms"] for lane in served)) / 1e3
    assert counted["twostroke:e2e_request_latency_seconds_sum"] == pytest.approx(total_s, abs=1e-6)
    everything_happened(list(lanes.values()))


def adds_up(lane: Object) -> None:
    """Check that segments have no gap, overlap or remainder; the numbers are decimal, as sent."""
    end_ms = Decimal(0)
    for segment in lane["segments"]:
        assert segment["start_ms"] == end_ms, lane
        assert segment["duration_ms"] >= 0, lane
        assert segment["reason"], lane
        end_ms += segment["duration_ms"]
    assert end_ms == lane["e2e_ms"], lane
    if lane["ttft_ms"] is not None:
        assert sum(lane["ttft_parts_ms"].values()) == lane["ttft_ms"], lane


def e2e_ms(events: Sequence[Event]) -> Mapping[str, Decimal]:
    """Return the end-to-end time of every sequence, computed from the event log in the simplest way."""
    times = times_of(events)
    ends = {name: mine.token_times_s[-1] if mine.finish_s is None else mine.finish_s for name, mine in times.items()}
    for event in events:
        if isinstance(event, RequestFinishedByCaller) and event.reason is FinishReason.STOP:
            assert event.num_output_tokens is not None
            ends[event.request_id] = times[event.request_id].token_times_s[event.num_output_tokens - 1]
    return {
        name: Decimal(round(end_s * 1e9) - round(times[name].arrival_s * 1e9)) / 1_000_000
        for name, end_s in ends.items()
    }


def everything_happened(lanes: Sequence[Object]) -> None:
    """Check that the load had the events that make timelines difficult."""
    labels = Counter(segment["label"] for lane in lanes for segment in lane["segments"])
    assert labels.keys() >= {"prepare", "prefill", "decode", "stalled", "preempted", "recompute"}, labels
    assert labels.keys() & {"waited for slots", "waited for tokens", "waited for kv"}, labels
    assert any("chunk 2 of" in segment["reason"] for lane in lanes for segment in lane["segments"])
    assert any(lane["num_cached_tokens"] for lane in lanes)
    assert any(lane["num_preemptions"] for lane in lanes)
    assert {lane["finish_reason"] for lane in lanes} >= {"length", "stop", "abort"}
    assert any(lane["sequence_id"].endswith(".1") for lane in lanes)


def recorded(server: ServerProcess, path: Path) -> list[Event]:
    """Return the server's event log."""
    path.write_bytes(server.http.get("/flight_recorder", headers={"authorization": f"Bearer {ADMIN}"}).content)
    return list(read_events(path))


def samples(metrics: str) -> Mapping[str, float]:
    """Return samples by name; of those with labels the last one."""
    families = text_string_to_metric_families(metrics)
    return {sample.name: sample.value for family in families for sample in family.samples}


def num_in_engine(metrics: str) -> float:
    """Return the number of running and waiting sequences."""
    named = samples(metrics)
    return named["twostroke:num_requests_running"] + named["twostroke:num_requests_waiting"]
