"""Clients that connect, stream and vanish at any moment, and an engine that is killed: the state of the server after
it.

chaos    500 clients at a time, each repeatedly, for five minutes; most of them disconnect in the middle of something.
         Then nothing runs, no block of the KV cache and no connection is held, and memory has not grown.
killed   SIGKILL of the engine's process while clients wait: each of them gets an answer or an error, and the next
         request is served.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.serving.clients import TIMEOUT_S, Ending, Visit, Way, drawn_visit, visit
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
from twostroke.measure.serve.load import Origin
from twostroke.process_memory import resident_bytes

GOAL_GROWTH_MB_PER_MINUTE = 1.0
_THINK_S = 1.0
"""Mean time between two visits of a client."""
_SAMPLE_S = 1.0
_WARM_UP = 0.3
"""Share of the run before memory counts, since caches fill and pages are touched for the first time."""
_FLIGHT_MINUTES = 0.5
"""Length of the server's flight recorder, which fills up within the warm-up."""


@dataclass(slots=True)
class _Chaos:
    """Observations of the clients, and the memory of both processes meanwhile."""

    endings: Counter[tuple[Way, Ending]] = field(default_factory=Counter[tuple[Way, Ending]])
    times_s: list[float] = field(default_factory=list[float])
    memory: dict[str, list[int]] = field(default_factory=lambda: {"http": [], "engine": []})
    """Bytes of each process at these times."""

    def count(self, *endings: Ending, way: Way | None = None) -> int:
        """Return the number of visits with these endings."""
        return sum(n for (its_way, its), n in self.endings.items() if its in endings and way in (None, its_way))


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run the clients, then kill the engine."""
    num_clients, for_s, num_killed = (500, 300.0, 64) if options.full else (40, 6.0, 12)
    settings: dict[str, Any] = {
        "threads": options.threads or 1,
        "max_num_seqs": 64,
        "max_model_len": 256,
        "num_kv_blocks": 800,
        "flight_recorder_minutes": _FLIGHT_MINUTES,
    }
    with local_server(options.model, settings) as server:
        before = at_rest(server)
        answers_before = metrics_of(server)
        chaos = asyncio.run(_let_in(server, num_clients, for_s, options.seed))
        after = at_rest(server)
        counted = metrics_of(server).since(answers_before)["counted"]
        killed, back_s = asyncio.run(_kill(server, num_killed, options.seed))
        restarted = at_rest(server)
    growth = {
        name: growth_mb_per_minute(chaos.times_s, sizes, warm_up=_WARM_UP) for name, sizes in chaos.memory.items()
    }
    told = sum(killed[ending] for ending in (Ending.WHOLE, Ending.ERROR, Ending.REFUSED))
    claims = (
        *leftover_claims(before, after),
        Claim.equal("clients that heard nothing", 0, chaos.count(Ending.STUCK)),
        Claim.equal("who stayed and got no whole answer", 0, chaos.count(Ending.BROKEN, Ending.ERROR, way=Way.STAYS)),
        *(
            Claim.at_most(f"memory, {name} process, MB a minute", GOAL_GROWTH_MB_PER_MINUTE, mb).judged(options.full)
            for name, mb in growth.items()
        ),
        Claim.equal("engine killed: clients neither answered nor told", 0, killed.total() - told),
        Claim.at_least("engine killed: clients that lost their answer", 1, killed[Ending.ERROR]),
        Claim.equal("engine killed: restarts", 1, restarted.num_restarts - after.num_restarts),
        Claim.reported("engine killed: seconds until it serves again", back_s),
        Claim.reported("visits", chaos.endings.total()),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, **settings},
        workload={"num_clients": num_clients, "for_s": for_s, "think_s": _THINK_S, "seed": options.seed},
        details={
            "endings": {
                way: {ending: n for (of, ending), n in sorted(chaos.endings.items()) if of is way} for way in Way
            },
            "endings_when_killed": dict(killed),
            "memory_mb": {name: _outline(sizes) for name, sizes in chaos.memory.items()},
            "longest_pause_of_the_drill_s": round(float(np.diff(chaos.times_s).max(initial=0.0)), 1),
            "counted_by_the_server": counted,
        },
    )


# ---------------------------------------------------------------------- clients


async def _let_in(server: LocalServer, num_clients: int, for_s: float, seed: int) -> _Chaos:
    """Run vanishing clients until time is up and the last one has left."""
    chaos, origin = _Chaos(), Origin.parse(server.url)
    until_s = monotonic_clock() + for_s

    async def client(number: int) -> None:
        random = Random(seed * 1_000_003 + number)
        while monotonic_clock() < until_s:
            await asyncio.sleep(random.expovariate(1 / _THINK_S))
            planned = drawn_visit(random)
            chaos.endings[planned.way, await visit(origin, planned)] += 1

    async def watch() -> None:
        pids = {"http": server.pid, "engine": server.engine_pid()}
        while monotonic_clock() < until_s:
            chaos.times_s.append(monotonic_clock())
            for name, pid in pids.items():
                chaos.memory[name].append(resident_bytes(pid))
            await asyncio.sleep(_SAMPLE_S)

    await asyncio.gather(watch(), *(client(number) for number in range(num_clients)))
    return chaos


async def _kill(server: LocalServer, num_clients: int, seed: int) -> tuple[Counter[Ending], float]:
    """Kill the engine's process while clients read and wait; return their endings, and the seconds until one is
    served."""
    origin, has_begun = Origin.parse(server.url), asyncio.Event()
    random = Random(seed)

    def planned(number: int) -> Visit:
        token_ids = tuple(random.randrange(300, 4000) for _ in range(16))
        return Visit(Way.STAYS, token_ids, max_tokens=200, stream=number % 2 == 0)

    waiting = [asyncio.create_task(visit(origin, planned(n), has_begun.set)) for n in range(num_clients)]
    await has_begun.wait()
    os.kill(server.engine_pid(), signal.SIGKILL)
    killed_s = monotonic_clock()
    endings = Counter(await asyncio.gather(*waiting))
    while await visit(origin, planned(0)) is not Ending.WHOLE:
        if monotonic_clock() - killed_s > TIMEOUT_S:
            break
        await asyncio.sleep(0.05)
    return endings, monotonic_clock() - killed_s


# ---------------------------------------------------------------------- figures


def _outline(sizes: Sequence[int]) -> list[float]:
    """Return about thirty of the samples, including the first and the last."""
    chosen = np.linspace(0, len(sizes) - 1, num=min(31, len(sizes))).astype(int)
    return [round(sizes[index] / MB, 1) for index in chosen]
