"""The server compared with the offline API: 64 streams at once and the same prompts to `LLM.generate`, alternating.

Both have one model thread: of two cores, the other is for the HTTP process and the client, which runs at a lower
priority (its processor time is not the server's). The server's flight recorder has the time at which a token was
sampled, the client the time of its event; both read one clock. A low-priority client reads an event after the server
has written all of its step, so the delay includes the client's work for 64 events. The reported delay is that of the
middle round: on a shared machine, single rounds differ by a third.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.alternating import columns, ratio
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.serving.local_server import local_server, room_for
from twostroke.client.input_processor import Prompt
from twostroke.events import StepCommitted, TokensDelivered
from twostroke.llm import LLM
from twostroke.measure.figure import bar_chart
from twostroke.measure.report import median, percentiles
from twostroke.measure.serve.figures import latencies
from twostroke.measure.serve.load import LoadRun, batch_priority
from twostroke.measure.serve.openai_wire import Exchange
from twostroke.measure.workload import Lengths, Workload
from twostroke.sampling_params import SamplingParams

STREAMS = 64
PROMPTS = Lengths.uniform(16, 64)
BLOCK_SIZE = 16
GOAL_RATIO = 0.97
GOAL_US_PER_TOKEN = 25.0
GOAL_DELAY_MS = 5.0
LONG_STEP_S = 0.010
"""Step time from which the delay of an event is compared with its goal."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Alternate the two, with one model thread and then with two."""
    rounds, outputs = _size(options)
    workload = options.drawn(STREAMS, PROMPTS, Lengths.fixed(outputs))
    threads = sorted({1, options.threads or 2})
    sides = {n: _side_by_side(options, workload, n, rounds) for n in threads}
    by_round, step_s, latency = _delays(options, workload, rounds)
    streams = [stream for of_round in by_round for stream in of_round]
    segments = [_by_segment(of_round) for of_round in by_round]
    one, p99_s = sides[1], {name: [of_round[name]["p99"] for of_round in segments] for name in SEGMENTS}
    delay_ms, us_per_token = 1000 * median(p99_s["sampled_to_read"]), median(one["http_us_per_token"])
    delay = Claim.at_most("event at the client after its sample, p99 ms", GOAL_DELAY_MS, delay_ms)
    claims = (
        Claim.at_least("throughput, one model thread: server / offline", GOAL_RATIO, one["ratio"]).judged(options.full),
        Claim.at_most("HTTP process, us of processor a token", GOAL_US_PER_TOKEN, us_per_token).judged(options.full),
        delay.judged(options.full and step_s >= LONG_STEP_S),
        *(
            Claim.reported(f"of this, {name.replace('_', ' ')}, p99 ms", 1000 * median(of_rounds))
            for name, of_rounds in p99_s.items()
            if name != "sampled_to_read"
        ),
        Claim.reported("a step, median ms", 1000 * step_s),
        *(
            Claim.reported(f"throughput, {n} model threads: server / offline", of["ratio"])
            for n, of in sides.items()
            if n > 1
        ),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, "streams": STREAMS, "threads": threads, "block_size": BLOCK_SIZE},
        workload={**workload.description, "prompt_tokens": workload.num_prompt_tokens},
        details={
            "sides": {str(n): of for n, of in sides.items()},
            "delay_p99_s": p99_s,
            "delay_s": _by_segment(streams),
            "delay_by_token_s": _by_place(streams),
            "step_s": step_s,
            "latency": latency,
        },
        draw=bar_chart(
            [f"{n} model thread{'s' if n > 1 else ''}" for n in sides],
            {
                "offline API": [median(of["offline_tok_s"]) for of in sides.values()],
                "server": [median(of["server_tok_s"]) for of in sides.values()],
            },
            "output tokens per second",
        ),
        warmup=1,
        repeats=rounds,
    )


def _size(options: ReproduceOptions) -> tuple[int, int]:
    """Return the rounds, and the tokens of an output."""
    if not options.full:
        return 2, 32
    return (9, 512) if options.model == "embedded" else (3, 96)


def _engine_settings(threads: int, longest: int) -> dict[str, Any]:
    """Return the settings of both sides: KV memory for all streams at their longest, and no prefix cache."""
    others = {"block_size": BLOCK_SIZE, "enable_prefix_caching": False}
    return {"threads": threads, **room_for(STREAMS, longest), **others}


def _side_by_side(options: ReproduceOptions, workload: Workload, threads: int, rounds: int) -> dict[str, Any]:
    """Return output tokens per second of both, round by round, and processor time per token of server and client."""
    settings = _engine_settings(threads, workload.max_request_tokens)
    num_tokens = workload.num_output_tokens
    found: list[dict[str, float]] = []
    with local_server(options.model, settings) as server, LLM(options.model, **settings) as llm:
        warm_up = workload.cut_outputs(8)
        _offline(llm, warm_up)
        server.run(options.model, warm_up)
        for _ in range(rounds):
            offline_s, before_s = _offline(llm, workload), server.http_cpu_s()
            with batch_priority():  # measure the server as remote clients see it
                run = server.run(options.model, workload)
            found.append(
                {
                    "offline_tok_s": num_tokens / offline_s,
                    "server_tok_s": num_tokens / run.duration_s,
                    "http_us_per_token": 1e6 * (server.http_cpu_s() - before_s) / num_tokens,
                    "client_us_per_token": 1e6 * run.generator_cpu_s / num_tokens,
                }
            )
    sides = columns(found)
    return {**sides, "ratio": ratio(sides["server_tok_s"], sides["offline_tok_s"])}


def _offline(llm: LLM, workload: Workload) -> float:
    """Return the seconds that `LLM.generate` takes for the workload."""
    prompts: list[Prompt] = [{"prompt_token_ids": r.prompt_token_ids} for r in workload.requests]
    params = [SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True) for r in workload.requests]
    start_s = time.monotonic()
    llm.generate(prompts, params)
    return time.monotonic() - start_s


Hop = tuple[TokensDelivered, float]
"""Path of a token: its step's delivery, and the time (seconds) at which the client had read it."""
SEGMENTS: Mapping[str, Callable[[TokensDelivered, float], float]] = {
    # the engine accounts for the step and encodes its report
    "sampled_to_sent": lambda step, _: step.sent_s - step.sampled_s,
    # between the processes, until the event loop has read the report
    "sent_to_received": lambda step, _: step.received_s - step.sent_s,
    # the HTTP process makes and writes the step's events, until the last one is written
    "received_to_written": lambda step, _: step.time_s - step.received_s,
    # from the report in the HTTP process to this token's event at the client
    "received_to_read": lambda step, read_s: read_s - step.received_s,
    # the whole delay
    "sampled_to_read": lambda step, read_s: read_s - step.sampled_s,
}
"""Seconds between the points that a token passes."""


def _by_segment(streams: Sequence[Sequence[Hop]]) -> dict[str, dict[str, float]]:
    """Return the percentiles of each segment over all tokens."""
    return {name: percentiles([of(*hop) for stream in streams for hop in stream]) for name, of in SEGMENTS.items()}


def _by_place(streams: Sequence[Sequence[Hop]]) -> dict[str, dict[str, float]]:
    """Return the percentiles of the whole delay by the token's place in its stream."""
    places = {"first": slice(1), "between": slice(1, -1), "last": slice(-1, None)}
    return {name: _by_segment([s[place] for s in streams])["sampled_to_read"] for name, place in places.items()}


def _delays(
    options: ReproduceOptions, workload: Workload, rounds: int
) -> tuple[list[list[list[Hop]]], float, dict[str, Any]]:
    """Return each round's streams, the median step (seconds), and the latencies of all rounds at the client."""
    found: list[list[list[Hop]]] = []
    exchanges: list[Exchange] = []
    steps: list[StepCommitted] = []
    with local_server(options.model, _engine_settings(1, workload.max_request_tokens)) as server:
        server.run(options.model, workload.cut_outputs(8), [f"warm-up-{i}" for i in range(len(workload))])
        for number in range(rounds):
            names = [f"r{number}-{i}" for i in range(len(workload))]
            with batch_priority():
                run = server.run(options.model, workload, names)
            events = server.events()
            steps = [event for event in events if isinstance(event, StepCommitted)]
            delivered = {event.sampled_s: event for event in events if isinstance(event, TokensDelivered)}
            found.append(_streams(steps, delivered, _read_s(run, names)))
            exchanges += run.exchanges
    # the recorder still has the steps of the rounds before
    step_s = median([step.operator_time_s for step in steps if len(step.commits) == STREAMS])
    return found, step_s, latencies(exchanges)


def _read_s(run: LoadRun, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the times (seconds) at which the client had read each token, by request."""
    found: dict[str, list[float]] = {}
    for name, exchange in zip(names, run.exchanges, strict=True):
        pairs = zip(exchange.chunk_times_s, exchange.chunk_tokens, strict=True)
        found[f"cmpl-{name}"] = [run.start_s + time_s for time_s, count in pairs for _ in range(count)]
    return found


def _streams(
    steps: Sequence[StepCommitted], delivered: Mapping[float, TokensDelivered], read_s: Mapping[str, Sequence[float]]
) -> list[list[Hop]]:
    """Match the times at which each token was sampled, sent, received, written and read; a list per stream.

    Args:
        steps: steps in order, with the tokens that each made by request.
        delivered: delivery events by the time of their step's result.
        read_s: times at which the client had read each token, by request.
    """
    sampled: dict[str, list[float]] = {}
    for step in steps:
        for commit in step.commits:
            caller, _, _ = commit.request_id.rpartition("#")  # the engine appends a number of its own
            sampled.setdefault(caller, []).extend([step.time_s] * commit.num_tokens)
    return [
        [(delivered[at_s], read) for at_s, read in zip(sampled[caller], reads, strict=True)]
        for caller, reads in read_s.items()
    ]
