"""What the live view costs: the same load without viewers and with two, in turn, and what the fold of the log takes.

The client gives way to the server, and so do the viewers, who read frames and look at none. Which of the two comes
first changes from round to round. Throughput of a machine that others use is noisy; how far the median may be off is
told beside it, and so is the processor time of the process that speaks HTTP, where all of the view's work is done: the
engine does nothing for it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import urllib.request
from collections.abc import Generator
from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.serving.local_server import LocalServer, local_server
from twostroke.events import Event
from twostroke.live.state import LiveState
from twostroke.measure.report import median
from twostroke.measure.serve.load import giving_way
from twostroke.measure.workload import Lengths, Workload
from twostroke.metrics.engine_metrics import FleetMetrics

STREAMS = 64
NUM_VIEWERS = 2
GOAL_RATIO = 0.99


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Alternates the two."""
    rounds, outputs = (40, 384) if options.full else (2, 32)
    workload = options.drawn(STREAMS, Lengths.uniform(16, 64), Lengths.fixed(outputs))
    settings: dict[str, Any] = {
        "threads": 1,
        "max_num_seqs": STREAMS,
        "max_model_len": workload.max_request_tokens,
        "num_kv_blocks": STREAMS * -(-workload.max_request_tokens // 16),
    }
    tok_s: dict[bool, list[float]] = {False: [], True: []}
    http_s: dict[bool, list[float]] = {False: [], True: []}
    num_frames = 0
    with local_server(options.model, settings) as server:
        _rate(server, options.model, workload.cut_outputs(8))
        for number in range(rounds):
            for are_there in (False, True) if number % 2 else (True, False):
                with _viewers(server) if are_there else contextlib.nullcontext([0]) as counted:
                    begin_s = server.http_cpu_s()
                    tok_s[are_there].append(_rate(server, options.model, workload))
                    http_s[are_there].append(server.http_cpu_s() - begin_s)
                num_frames += sum(counted)
        events = server.events()
    ratios = [b / a for a, b in zip(tok_s[False], tok_s[True], strict=True)]
    low, high = _of_median(ratios)
    extra_s = median([b - a for a, b in zip(http_s[False], http_s[True], strict=True)])
    beside_s = sum(workload.num_output_tokens / rate for rate in tok_s[True])
    claims = (
        Claim.at_least("throughput: two viewers / none", GOAL_RATIO, median(ratios)).judged(options.full),
        Claim.reported("the true median is more than this, in 19 of 20 runs", low),
        Claim.reported("and less than this", high),
        Claim.reported(
            "processor time of the HTTP process for two viewers, share of a core", extra_s / (beside_s / rounds)
        ),
        Claim.reported("the fold of the log, viewers or not, us a token", _fold_us(events)),
        Claim.reported("frames a second and viewer", num_frames / NUM_VIEWERS / beside_s),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, "streams": STREAMS, "viewers": NUM_VIEWERS, **settings},
        workload=dict(workload.description),
        details={
            "without_tok_s": tok_s[False],
            "with_viewers_tok_s": tok_s[True],
            "ratios": ratios,
            "http_s_without": http_s[False],
            "http_s_with_viewers": http_s[True],
        },
        warmup=1,
        repeats=rounds,
    )


def _of_median(values: list[float]) -> tuple[float, float]:
    """Between which two the median of all such values lies, in 95 of 100 cases: by the binomial distribution, whatever
    theirs is (the order statistics of the sign test).

    >>> _of_median([float(i) for i in range(1, 21)]), _of_median([1.0, 2.0])
    ((6.0, 15.0), (1.0, 2.0))
    """
    ordered, num_values = sorted(values), len(values)
    skipped, left = 0, 0.5**num_values
    while left <= 0.025:
        skipped += 1
        left += math.comb(num_values, skipped) * 0.5**num_values
    first = max(0, skipped - 1)
    return ordered[first], ordered[num_values - 1 - first]


def _rate(server: LocalServer, model: str, workload: Workload) -> float:
    """Output tokens per second of the workload, all at once."""
    with giving_way():
        return workload.num_output_tokens / server.run(model, workload).duration_s


@contextlib.contextmanager
def _viewers(server: LocalServer) -> Generator[list[int]]:
    """Two that read the feed; how many frames each has got."""
    counted = [0] * NUM_VIEWERS
    over = threading.Event()

    def look(number: int) -> None:
        with urllib.request.urlopen(f"{server.url}/live/events", timeout=30) as lines:
            for line in lines:
                counted[number] += line.startswith(b"event: ")
                if over.is_set():
                    return

    viewers = [threading.Thread(target=look, args=(number,), daemon=True) for number in range(NUM_VIEWERS)]
    for viewer in viewers:
        viewer.start()
    yield counted
    over.set()
    for viewer in viewers:
        viewer.join(5)


def _fold_us(events: list[Event]) -> float:
    """Microseconds a token that the fold takes, without anybody who looks."""
    metrics = FleetMetrics("model", lambda _: None)
    state = LiveState(metrics)
    spent_s = 0.0
    for event in events:
        taken = metrics.observe(event)
        begin_s = time.perf_counter()
        state.observe(event, taken)
        spent_s += time.perf_counter() - begin_s
    figures = state.whole("model", 0.0)["engines"]["engine"]["figures"]
    return 1e6 * spent_s / max(1.0, figures["generation_tokens"])
