"""Hostile bodies: every string and every list of every route with large values of every wrong type, and more.

wrong types   each field once with each value of 1 MB: how long other clients wait, and how much memory it takes
digits        4 MB of digits as a prompt, a chat, and to be counted: the slowest text for most tokenizers
long texts    4 MB of digits and of words whose tokens are truncated, counted and returned: how much memory that takes
heavy         valid requests, as large as each parameter may be
many parts    hundreds of thousands of fields, lists, levels and calls, wherever a body may have some
unfinished    200 clients that send all but the last byte of 4 MB
scores        prompt_logprobs of a long prompt: the longest gap between the tokens of another stream

A body that seems to block the event loop for longer than the goal is sent again, twice at most, and the shortest time
counts: longer times are caused by other work on the machine.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.hostile.fields import fields_of, is_right_within, value_of, wrong_for
from benchmarks.hostile.heavy import Heavy, heavy_requests, long_texts, many_parts
from benchmarks.hostile.probe import Effect, Probe, as_json
from benchmarks.serving.local_server import LocalServer, local_server
from twostroke.errors import SetupError
from twostroke.measure.serve.load import Origin
from twostroke.process_memory import peak_resident_bytes, reset_peak, resident_bytes

GOAL_HELD_MS = 100.0
GOAL_TIMES_BODY = 10.0
MB = 10**6
DIGITS_BYTES = 4 * MB
NUM_UNFINISHED = 200
UNFINISHED_BYTES = 4 * 2**20
ROOM_BYTES = 64 * 2**20
"""The server's own limit, --max-unfinished-body-bytes."""
_TAIL_BYTES = 1024
_MAX_TRIES = 3
_HOLDERS = {
    "digits": "4 MB of digits",
    "long_texts": "a long text",
    "heavy": "a large valid request",
    "many_parts": "a body of many parts",
}
"""Requests that may block the event loop, by kind."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Send all bodies one after the other to a server whose /health is requested continuously."""
    size = MB if options.full else MB // 8
    settings: dict[str, Any] = {"threads": options.threads or 1, "max_num_seqs": 8, "tool_call_parser": "hermes"}
    with local_server(options.model, settings) as server, Probe(server).running() as probe:
        fields = fields_of(json.loads(server.ask("/openapi.json")))
        pairs = [(field, name) for field in fields for name in wrong_for(field)]
        cases = pairs if options.full else pairs[::8]
        effects = {
            f"{field}: {name}": _settled(probe, field.route, field.body(value_of(name, size)), name)
            for field, name in cases
        }
        right_within = {f"{field}: {name}" for field, name in cases if is_right_within(field, name)}
        unfinished = _unfinished(server, NUM_UNFINISHED if options.full else 40)
        longest: int = json.loads(server.ask("/v1/models"))["data"][0]["max_model_len"]
        divisor = 1 if options.full else 8
        of_kinds = {
            "digits": _effects(probe, "digits", _digits()),
            "long_texts": _effects(probe, "text", long_texts(DIGITS_BYTES // divisor)),
            "heavy": _effects(probe, "heavy", heavy_requests(longest, divisor)),
            "many_parts": _effects(probe, "parts", many_parts(divisor)),
        }
        gap_ms, scored_ms = _gaps_ms(server, probe, longest, 64 if options.full else 16)
    worst_held = max(effects, key=lambda name: effects[name].beyond_parsing_s)
    wrong = {name: effect for name, effect in effects.items() if name not in right_within}
    worst_size = max(wrong, key=lambda name: wrong[name].times_body)
    many_size = max((effects[name].times_body for name in right_within), default=0.0)
    large_texts = max(effect.times_body for kind in ("digits", "long_texts") for effect in of_kinds[kind].values())
    room, of_room = "times their limit", unfinished["grown_bytes"] / ROOM_BYTES
    limits = (
        ("longest time the loop was held beyond parsing the body, ms", GOAL_HELD_MS, _held_ms(effects)),
        ("most memory a body of a wrong type took, times its size", GOAL_TIMES_BODY, wrong[worst_size].times_body),
        *(
            (f"longest time {words} held the loop beyond parsing, ms", GOAL_HELD_MS, _held_ms(of_kinds[kind]))
            for kind, words in _HOLDERS.items()
        ),
        ("most memory that a long text took, times its size", GOAL_TIMES_BODY, large_texts),
        (f"memory of {unfinished['num_bodies']} unfinished bodies, {room}", 3.0, of_room),
    )
    statuses = [effect.status for found in (effects, *of_kinds.values()) for effect in found.values()]
    claims = (
        Claim.equal("answers of 5xx", 0, sum(status >= 500 for status in statuses)),
        *(Claim.at_most(what, bound, measured).judged(options.full) for what, bound, measured in limits),
        Claim.reported("the same of too many elements of the right type", many_size),
        Claim.reported("longest gap between tokens beside a long prompt, ms", gap_ms),
        Claim.reported("longest gap between tokens beside the same with prompt_logprobs 20, ms", scored_ms),
        Claim.reported("fields", len(fields)),
        Claim.reported("requests", len(effects)),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, **settings},
        workload={"body_bytes": size, "fields": len(fields), "requests": len(effects)},
        details={
            "worst_held": {worst_held: as_json(effects[worst_held])},
            "worst_size": {worst_size: as_json(effects[worst_size])},
            **{kind: {name: as_json(effect) for name, effect in found.items()} for kind, found in of_kinds.items()},
            "unfinished": unfinished,
            "by_value": _worst(effects, lambda name: name.rpartition(": ")[2]),
            "by_route": _worst(effects, lambda name: name.partition(" ")[0]),
        },
    )


def _effects(probe: Probe, kind: str, requests: Iterable[Heavy]) -> dict[str, Effect]:
    """Send each request; return their effects by name."""
    return {name: _settled(probe, route, body, f"{kind} {name}") for name, route, body in requests}


def _held_ms(effects: Mapping[str, Effect]) -> float:
    return 1000 * max(effect.beyond_parsing_s for effect in effects.values())


def _worst(effects: Mapping[str, Effect], group_of: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Return for each group of requests their number, their statuses, and the worst of each figure."""
    groups: dict[str, list[Effect]] = {}
    for name, effect in effects.items():
        groups.setdefault(group_of(name), []).append(effect)
    return {
        name: {
            "num_requests": len(found),
            "statuses": sorted({effect.status for effect in found}),
            "beyond_parsing_ms": round(1000 * max(effect.beyond_parsing_s for effect in found), 2),
            "times_body": round(max(effect.times_body for effect in found), 2),
        }
        for name, found in groups.items()
    }


def _settled(probe: Probe, route: str, body: bytes, kind: str) -> Effect:
    """Return the effect of a body: the shortest time of up to three, and the most memory."""
    effects = [probe.effect_of(route, body, kind)]
    while 1000 * effects[-1].beyond_parsing_s > GOAL_HELD_MS and len(effects) < _MAX_TRIES:
        effects.append(probe.effect_of(route, body, kind))
    shortest = min(effects, key=lambda effect: effect.beyond_parsing_s)
    return replace(shortest, grown_bytes=max(effect.grown_bytes for effect in effects))


def _digits() -> Iterator[Heavy]:
    text = "7" * DIGITS_BYTES
    messages = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": messages},
        "/tokenize": {"prompt": text},
        "/v1/embeddings": {"input": text},
    }
    return ((route, route, json.dumps(body).encode()) for route, body in bodies.items())


def _unfinished(server: LocalServer, number: int) -> dict[str, Any]:
    """Send all but the ends of many bodies; return the growth of the server's process, and its answers."""
    origin = Origin.parse(server.url)
    reset_peak(server.pid)
    before, largest = resident_bytes(server.pid), 0
    head = origin.request("POST", "/v1/completions", {"content-type": "application/json"}).rstrip(b"\r\n")
    head += b"\r\ncontent-length: %d\r\n\r\n" % UNFINISHED_BYTES
    statuses: list[int] = []
    with contextlib.ExitStack() as open_connections:
        connections: list[socket.socket] = []
        for _ in range(number):
            connection = open_connections.enter_context(socket.create_connection((origin.host, origin.port), 60))
            with contextlib.suppress(ConnectionError):  # it may be given up before all is sent
                connection.sendall(head)
                connection.sendall(b"a" * (UNFINISHED_BYTES - _TAIL_BYTES))
            connections.append(connection)
            largest = max(largest, resident_bytes(server.pid))
        time.sleep(0.5)
        largest = max(largest, resident_bytes(server.pid), peak_resident_bytes(server.pid))
        for connection in connections:
            connection.settimeout(0.01)
            with contextlib.suppress(OSError):
                statuses.append(int(connection.recv(64).split(b" ")[1]))
    return {"grown_bytes": largest - before, "num_bodies": number, "num_given_up": statuses.count(503)}


def _gaps_ms(server: LocalServer, probe: Probe, longest: int, num_tokens: int) -> tuple[float, float]:
    """Return the longest gap of another stream during a long prompt, without its scores and with them."""
    prompt = [7 + i % 50 for i in range(longest - 8)]
    return (
        _longest_gap_ms(server, probe, {"prompt": prompt, "max_tokens": 1}, num_tokens),
        _longest_gap_ms(server, probe, {"prompt": prompt[::-1], "max_tokens": 1, "prompt_logprobs": 20}, num_tokens),
    )


def _longest_gap_ms(server: LocalServer, probe: Probe, beside: dict[str, Any], num_tokens: int) -> float:
    """Return the longest gap between a stream's events, from before another request until after its answer."""
    origin = Origin.parse(server.url)
    connection = http.client.HTTPConnection(origin.host, origin.port, timeout=600)
    asked = {"prompt": "def f(", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    stream = connection.getresponse()
    if stream.status != 200:
        raise SetupError(f"the server refuses a stream: {stream.read()!r}")
    times_s: list[float] = []
    has_begun, is_over = threading.Event(), threading.Event()

    def read() -> None:
        while not is_over.is_set() and (line := stream.readline()):
            if line.startswith(b"data:"):
                times_s.append(time.perf_counter())
            if len(times_s) == num_tokens:
                has_begun.set()
        has_begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    has_begun.wait()
    first = len(times_s)
    effect = probe.effect_of("/v1/completions", json.dumps(beside).encode(), "ids")
    is_over.set()
    reader.join()
    connection.close()
    if effect.status != 200:
        raise SetupError(f"the server refuses a long prompt with {effect.status}.")
    seen_s = times_s[first - 1 :]
    return 1000 * max((after - before for before, after in itertools.pairwise(seen_s)), default=0.0)
