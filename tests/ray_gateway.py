"""A gateway of pools in a Ray cluster: streams in rounds, each disturbed in its middle as the command line says.

    python ray_gateway.py '{"cluster": "HOST:PORT", "pools": {...}, "strikes": ["kill", "scale:decode:3"]}'

`engine_config` may name settings of each engine.

Prints, as its last line, what became of them in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.drill import ask, prompts
from ray_cluster import kill_all
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.event_codec import PackedEvent, unpack
from twostroke.events import KVImportEnded
from twostroke.pools.member import Role

PLAIN: dict[str, Any] = {"model": "embedded", "threads": 1, "num_kv_blocks": 2000}
NUM_REQUESTS = 12
PATIENCE_S = 60.0


class _Seen:
    """Counts hand-overs that came through, and knows whose first tokens have come."""

    def __init__(self) -> None:
        self.num_handed_over = 0
        self.begun: set[str] = set()
        self.clock_gap_s = 0.0

    def append(self, packed: PackedEvent) -> None:
        event = unpack(packed)
        self.clock_gap_s = max(self.clock_gap_s, abs(event.time_s - time.monotonic()))
        self.num_handed_over += isinstance(event, KVImportEnded) and not event.problem

    def delivered(self, name: str, now_s: float) -> None:
        self.begun.add(name)


async def main(
    cluster: str, pools: dict[str, Any], strikes: list[str], engine_config: dict[str, Any]
) -> dict[str, Any]:
    seen = _Seen()
    causes: list[str] = []
    sizes = {Role.PREFILL: pools.get("prefill", 0), Role.DECODE: pools["decode"]}
    config = PoolConfig(**pools, cluster=cluster)
    of_engine = EngineConfig.from_keywords(**{**PLAIN, **engine_config})
    engine = PooledEngine(of_engine, config, listeners=(seen,), placer=LeastBusy(), on_trouble=causes.append)
    await engine.start()
    rounds: list[Any] = []
    nodes = [_nodes(engine)]
    try:
        for number, strike in enumerate(strikes or [""]):
            seen.begun.clear()
            asked = [
                asyncio.create_task(ask(engine, f"{number}-{i}", *request, seen.delivered))
                for i, request in enumerate(prompts(NUM_REQUESTS))
            ]
            if strike:
                await _until(lambda: len(seen.begun) >= NUM_REQUESTS / 2)
                if strike.startswith("scale:"):
                    _, role, size = strike.split(":")
                    sizes[Role(role)] = int(size)
                    engine.scale({Role(role): int(size)})
                else:
                    _strike(strike, engine.pids[_busiest(engine)])
            answers = await asyncio.gather(*asked)
            rounds.append([[answer[0] for answer in answers], [answer[1] for answer in answers]])
            if strike:
                await _until(lambda: len(engine.pids) == sum(sizes.values()))
                nodes.append(_nodes(engine))
    finally:
        await engine.close()
    return {
        "rounds": rounds,
        "nodes": nodes,
        "causes": causes,
        "clock_gap_s": seen.clock_gap_s,
        "num_handed_over": seen.num_handed_over,
        "num_resumed": engine.dispatcher.num_resumed,
    }


def _busiest(engine: PooledEngine) -> str:
    """Return the decode worker with the most streams, on another node than this one if there is any."""
    here = _namespace(os.getpid())
    workers = {worker: pid for worker, pid in engine.pids.items() if worker.startswith("decode")}
    away = [worker for worker, pid in workers.items() if _namespace(pid) != here]
    return max(away or workers, key=engine.dispatcher.live_on)


def _nodes(engine: PooledEngine) -> dict[str, bool]:
    """Return for each worker whether it is on this node."""
    here = _namespace(os.getpid())
    return {worker: _namespace(pid) == here for worker, pid in engine.pids.items()}


def _strike(strike: str, pid: int) -> None:
    match strike.partition(":"):
        case "kill", _, _:
            os.kill(pid, signal.SIGKILL)
        case "freeze", _, _:
            os.kill(pid, signal.SIGSTOP)
        case "actor", _, _:
            os.kill(_parent(pid), signal.SIGKILL)
        case "rank", _, _:
            os.kill(_rank_elsewhere(pid), signal.SIGKILL)
        case _, _, namespace:
            kill_all(namespace)


def _rank_elsewhere(first: int) -> int:
    """Return the rank above 0 that is on another node than the first."""
    here = _namespace(first)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"twostroke.startup.rank_process" in command and _namespace(int(folder.name)) != here:
                return int(folder.name)
    raise AssertionError("no rank runs on another node than the first")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.005)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(asyncio.run(main(**told))) + "\n")
