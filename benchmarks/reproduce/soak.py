"""An hour of everything: chats, long prompts, shared prefixes, background work, refusals, clients that vanish.

    bits      every answer equals the first one to the same request, in any batch
    memory    of each process grows no faster than a bound, over the second half
    p99       of the time between tokens and to the first one: no twelfth of the run is much worse than the others,
              among the twelfths in which no other process took the processors
    the end   nothing runs, nothing is held, no connection, no thread is left over

KV memory is small, so that requests are preempted. The load leaves the engine idle for part of the time, so that
latencies are the server's and not a queue's.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tqdm.auto import tqdm

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.processor_shares import (
    ProcessorTimes,
    read_processor_times,
    used_shares,
    worst_of_parts,
)
from benchmarks.serving.clients import (
    MAX_TOKENS,
    Answers,
    Ending,
    KnownRequest,
    TimedAnswer,
    Way,
    drawn_visit,
    make_known_requests,
    visit,
)
from benchmarks.serving.local_server import (
    MB,
    LocalServer,
    at_rest,
    growth_mb_per_minute,
    leftover_claims,
    local_server,
    metrics_of,
)
from twostroke.engine.clock import monotonic_clock
from twostroke.hardware import Hardware
from twostroke.measure.figure import MEASURED, PREDICTED, style_axes
from twostroke.measure.report import percentiles
from twostroke.measure.serve.load import HttpClient, HttpFailure, Origin
from twostroke.process_memory import anonymous_bytes

GOAL_GROWTH_MB_PER_MINUTE = 0.1
"""Largest memory growth of each process: 6 MB an hour are more than an allocator's fragmentation, and less than a leak
of 350 bytes per request."""
GOAL_WORST_WINDOW = 1.5
"""Largest p99 of a window, relative to the median window's."""
WINDOWS = 12
MAX_CONTENTION = 0.1
"""Largest share of the processors that other processes may take in any interval of a judged twelfth. A smaller share
cannot stretch a step to GOAL_WORST_WINDOW times its length. One of an hour's 720 intervals covers more than 1 % of a
twelfth's requests, so it can move a p99."""
_MIN_JUDGED = WINDOWS // 2
"""Fewest judged twelfths: with fewer, p99 is reported and not judged."""
_WARM_UP = 0.5
"""Share of the run before memory counts."""
_VANISHING = 0.05
"""Share of clients that vanish."""
_BURST, _BURST_EVERY = 24, 50
"""Size and interval of bursts: so many requests at once, in place of each fiftieth, fill the memory."""
_MAX_CONCURRENT = 64
_SAMPLES = 720
"""Number of memory samples."""


@dataclass(slots=True)
class _Soak:
    """Observations of a run."""

    answers: Answers = field(default_factory=Answers)
    counts: Counter[str] = field(default_factory=Counter[str])
    """Number of requests by kind."""
    endings: Counter[tuple[Way, Ending]] = field(default_factory=Counter[tuple[Way, Ending]])
    ttft_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(WINDOWS)])
    gaps_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(WINDOWS)])
    times_s: list[float] = field(default_factory=list[float])
    memory: dict[str, list[int]] = field(default_factory=lambda: {"http": [], "engine": [], "others": []})
    """Bytes of each process at these times."""
    processors: list[ProcessorTimes] = field(default_factory=list[ProcessorTimes])


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run the soak: an hour in full, otherwise some seconds."""
    for_s, per_s, num_orders = (3600.0, 4.0, 160) if options.full else (8.0, 5.0, 16)
    settings: dict[str, Any] = {
        "threads": options.threads or 1,
        "max_num_seqs": 24,
        "max_model_len": MAX_TOKENS + 96,
        "num_kv_blocks": 72,
    }
    with local_server(options.model, settings) as server:
        before, counted_before, threads_before = at_rest(server), metrics_of(server), _num_threads(server)
        soak = asyncio.run(
            _run(server, _Clients(server, for_s, per_s, make_known_requests(num_orders, options.seed), options.seed))
        )
        after, threads = at_rest(server), _num_threads(server)
        counted = metrics_of(server).since(counted_before)["counted"]
    windows = {name: [percentiles(part) for part in of] for name, of in (("ttft", soak.ttft_s), ("itl", soak.gaps_s))}
    busy = used_shares(soak.processors, Hardware.of_this_machine().cores)
    begin_s = soak.times_s[0] if soak.times_s else 0.0
    taken = worst_of_parts(busy, begin_s, begin_s + for_s, WINDOWS)
    preemptions = counted.get("twostroke:num_preemptions_total", 0.0)
    return Reproduction(
        title="" if options.full else "Some seconds of everything",
        claims=(
            Claim.equal("answers that differ from the first to the same order", 0, len(soak.answers.differing)),
            Claim.equal("answers that were none, or of another status", 0, len(soak.answers.wrong)),
            Claim.reported("answers compared", soak.answers.num_repeated),
            *leftover_claims(before, after),
            Claim.reported("threads more than before", threads - threads_before),
            Claim.equal("vanishing clients: those who stayed and got no whole answer", 0, _let_down(soak)),
            Claim.at_least("preemptions", 1, preemptions).judged(options.full),
            *_memory(soak, full=options.full),
            *latency_claims(windows, taken, full=options.full),
        ),
        remarks=contention_remarks(taken),
        config={"model": options.model_name, **settings},
        workload={
            "for_s": for_s,
            "arrivals_per_s": per_s,
            "burst": _BURST,
            "burst_every": _BURST_EVERY,
            "orders": num_orders,
            "vanishing": _VANISHING,
        },
        details={
            "requests": dict(soak.counts),
            "endings": {f"{way}: {ending}": count for (way, ending), count in sorted(soak.endings.items())},
            "windows": windows,
            "taken_by_others": {
                "worst_by_twelfth": taken,
                # about 120 of them at most
                "intervals": [
                    {"others": one.others, "stolen": one.stolen} for one in busy[:: max(1, len(busy) // 120)]
                ],
            },
            "memory_mb": {
                name: [round(size / MB, 2) for size in sizes[:: max(1, len(sizes) // 60)]]
                for name, sizes in soak.memory.items()
            },
            "wrong": soak.answers.wrong[:10],
            "counted_by_the_server": counted,
        },
        draw=lambda figure: _draw(figure, soak, windows, taken),
        figure_size=(9.0, 4.0),
    )


def _let_down(soak: _Soak) -> int:
    """Return the bad endings of clients that may disconnect; those of known requests are counted per request."""
    bad = (Ending.BROKEN, Ending.ERROR, Ending.STUCK)
    return sum(
        count
        for (way, ending), count in soak.endings.items()
        if ending is Ending.STUCK or (way is Way.STAYS and ending in bad)
    )


def _memory(soak: _Soak, *, full: bool) -> Iterator[Claim]:
    for name, sizes in soak.memory.items():
        growth = growth_mb_per_minute(soak.times_s, sizes, warm_up=_WARM_UP)
        words = f"memory, {name}, MB a minute over the second half"
        yield Claim.at_most(words, GOAL_GROWTH_MB_PER_MINUTE, growth).judged(full)
        yield Claim.reported(f"memory, {name}, MB at the end", (sizes[-1] if sizes else 0) / MB)


def latency_claims(
    windows: Mapping[str, Sequence[Mapping[str, float]]], taken: Sequence[float | None], *, full: bool
) -> Iterator[Claim]:
    """Compare the worst p99 of the judged twelfths with their median.

    Args:
        windows: percentiles of "itl" and "ttft", by twelfth.
        taken: the largest share of the processors that other processes took, by twelfth; None if unknown, and then that
            twelfth is judged.
        full: False reports and does not judge.
    """
    judged = [share is None or share <= MAX_CONTENTION for share in taken]
    yield Claim.reported("twelfths that are judged by their p99", sum(judged))
    for name, words in (("itl", "p99 ITL"), ("ttft", "p99 TTFT")):
        found = [part["p99"] for part, ours in zip(windows[name], judged, strict=True) if ours and part.get("p99")]
        if found:
            middle = statistics.median(found)
            yield Claim.reported(f"{words} ms, the median twelfth", middle * 1e3)
            worst = Claim.at_most(f"{words}, the worst twelfth over it", GOAL_WORST_WINDOW, max(found) / middle)
            yield worst.judged(full and len(found) >= _MIN_JUDGED)
        every = [part["p99"] for part in windows[name] if part.get("p99")]
        if every:
            over = max(every) / statistics.median(every)
            yield Claim.reported(f"{words}, the worst of all twelfths over their median", over)


def contention_remarks(taken: Sequence[float | None]) -> tuple[str, ...]:
    """Name the twelfths that are not judged, with the share of the processors that other processes took."""
    left_out = [
        f"{i} ({share:.0%})" for i, share in enumerate(taken, 1) if share is not None and share > MAX_CONTENTION
    ]
    remarks: list[str] = []
    if left_out:
        remarks.append(
            f"other processes took more than {MAX_CONTENTION:.0%} of the processors for some seconds in twelfth "
            f"{', '.join(left_out)}: p99 is not judged there"
        )
    if len(taken) - len(left_out) < _MIN_JUDGED:
        remarks.append(
            f"p99 is not judged at all: {len(taken) - len(left_out)} twelfths are left, and it takes {_MIN_JUDGED}. "
            "Run it where nothing else runs."
        )
    if all(share is None for share in taken):
        remarks.append("this machine does not say what other processes take, so p99 is judged in every twelfth")
    return tuple(remarks)


async def _run(server: LocalServer, clients: _Clients) -> _Soak:
    watching = asyncio.create_task(_watch(server, clients.for_s / _SAMPLES, clients.soak))
    await clients.come()
    watching.cancel()
    return clients.soak


async def _watch(server: LocalServer, every_s: float, soak: _Soak) -> None:
    engine = server.engine_pid()
    while True:
        soak.times_s.append(monotonic_clock())
        others = [pid for pid in server.family() if pid not in (server.pid, engine)]
        for name, pids in (("http", [server.pid]), ("engine", [engine]), ("others", others)):
            soak.memory[name].append(sum(map(anonymous_bytes, pids)))
        # this process, too: it runs the clients
        reading = read_processor_times([os.getpid(), server.pid, engine, *others])
        if reading is not None:
            soak.processors.append(reading)
        await asyncio.sleep(every_s)


class _Clients:
    """Clients that arrive one after another, independently of earlier ones, until there are too many at once.

    Args:
        server: that they send requests to.
        for_s: duration of the run.
        per_s: arrivals, of a request or a burst.
        deck: different requests, each with a known answer.
        seed: of all other choices.
    """

    def __init__(
        self, server: LocalServer, for_s: float, per_s: float, deck: Sequence[KnownRequest], seed: int
    ) -> None:
        self.soak = _Soak()
        self.for_s, self._per_s = for_s, per_s
        self._origin = Origin.parse(server.url)
        self._random = Random(seed)
        self._deck = deck
        self._client = HttpClient(self._origin)
        self._room = asyncio.Semaphore(_MAX_CONCURRENT)
        self._begin_s = monotonic_clock()

    async def come(self) -> None:
        """Run all clients to their end; each request of the deck is sent once, then random ones."""
        unseen, numbers = iter(self._deck), itertools.count(1)
        async with asyncio.TaskGroup() as group:
            with tqdm(total=int(self.for_s), desc="soak", unit="s", disable=None, leave=False) as bar:
                while (elapsed_s := monotonic_clock() - self._begin_s) < self.for_s:
                    bar.update(int(elapsed_s) - bar.n)
                    for _ in range(1 if next(numbers) % _BURST_EVERY else _BURST):
                        await self._room.acquire()
                        if self._random.random() < _VANISHING:
                            group.create_task(self._vanish())
                        else:
                            group.create_task(self._ask(next(unseen, None) or self._random.choice(self._deck)))
                    await asyncio.sleep(self._random.expovariate(self._per_s))
        await self._client.close()

    async def _ask(self, order: KnownRequest) -> None:
        soak, heard, sent_s = self.soak, TimedAnswer(), monotonic_clock()
        try:
            await self._client.send(self._origin.request("POST", order.path, {}, order.body), heard)
        except HttpFailure as failure:
            soak.answers.wrong.append(f"{order.kind}: {failure}")
            return
        finally:
            self._room.release()
        soak.counts[order.kind] += 1
        if soak.answers.take(order, heard) and order.is_timed:
            window = min(WINDOWS - 1, int((sent_s - self._begin_s) / self.for_s * WINDOWS))
            soak.ttft_s[window].append(heard.times_s[0] - sent_s)
            soak.gaps_s[window] += [later - earlier for earlier, later in itertools.pairwise(heard.times_s)]

    async def _vanish(self) -> None:
        planned = drawn_visit(self._random)
        try:
            self.soak.endings[planned.way, await visit(self._origin, planned)] += 1
        finally:
            self._room.release()


def _num_threads(server: LocalServer) -> int:
    """Return the threads of all of the server's processes."""
    return sum(len(list(Path(f"/proc/{pid}/task").glob("*"))) for pid in server.family())


def _draw(figure: Any, soak: _Soak, windows: dict[str, list[dict[str, float]]], taken: Sequence[float | None]) -> None:
    memory, latency = figure.subplots(1, 2)
    minutes = [(at - soak.times_s[0]) / 60 for at in soak.times_s]
    for (name, sizes), style in zip(soak.memory.items(), ("-", "--", ":"), strict=True):
        if any(sizes):
            memory.plot(minutes, [size / MB for size in sizes], style, color=MEASURED, label=name)
    style_axes(memory, xlabel="minutes", ylabel="MB of its own", ylim=(0, None))
    twelfths = range(1, WINDOWS + 1)
    for name, colour in (("ttft", PREDICTED), ("itl", MEASURED)):
        latency.plot(twelfths, [part.get("p99", 0.0) * 1e3 for part in windows[name]], "o-", color=colour, label=name)
    for i, share in enumerate(taken, 1):
        if share is not None and share > MAX_CONTENTION:
            latency.axvspan(i - 0.5, i + 0.5, color="#eeeeee", zorder=0)
    style_axes(latency, xlabel="twelfth of the run (grey: not judged)", ylabel="p99, ms", yscale="log")
