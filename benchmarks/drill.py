"""Fault drill: streams through two pools whose processes are killed and frozen, their outcomes and pauses.

`python -m benchmarks drill` compares each stream with the same one undisturbed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.pools.clients import asked, outputs_of
from twostroke.client.engine_client import EngineState
from twostroke.cluster.gateway_log import log_of
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.checks import check_int
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.event_sinks import read_events
from twostroke.errors import EngineUnavailable
from twostroke.event_codec import PackedEvent, unpack
from twostroke.events import KVImportEnded, RequestRouted
from twostroke.explain.names import name_of, sequence_of
from twostroke.kv_transfer.leases import LEASE_S
from twostroke.measure.report import DEFAULT_FOLDER, check_folder, percentiles, record, settings
from twostroke.pools.member import Role
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.replay import scheduler_at_end

STILL_ARRIVES_S = 0.5
"""Seconds after a kill during which tokens of the killed worker may still arrive."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of the processes."""

    number: int
    """Number of processes that are killed or frozen."""
    every_s: float = 0.3
    """Mean seconds between two faults."""
    seed: int = 0
    """Seed of the choice of processes."""
    only: Role | None = None
    """The pool whose workers are killed by SIGKILL, the last live one included; None: both pools, but never the last
    decode worker."""
    resizes: bool = False
    """Whether a pool now and then gets one more worker, and one less again."""


@dataclass
class Drill:
    """Record of a drill."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    token_ids: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    logprobs: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    num_killed: int = 0
    num_frozen: int = 0
    num_resized: int = 0
    """Number of changes of a pool's size."""
    num_resumed: int = 0
    num_late_updates: int = 0
    num_handed_over: int = 0
    """Completed hand-overs."""
    num_rounds: int = 0
    """Rounds of all requests."""
    num_blocks_left: dict[str, int] = field(default_factory=dict[str, int])
    """KV blocks that were still held at the end, on loan or otherwise, by each worker that lived; needs an event
    log."""
    pauses_s: list[float] = field(default_factory=list[float])
    """Longest time between two tokens of each stream around the death of a whole pool (`Faults.only`)."""
    gaps_s: list[float] = field(default_factory=list[float])
    """Seconds from the detection of a dead worker to the next token, for each resumed stream."""


def prompts(number: int) -> list[tuple[str, SamplingParams]]:
    """Return `number` different requests: greedy and sampled, short and long."""
    rng = random.Random(7)
    words = "def f(x):\n    return x\nfor i in range(9):\nclass A:\n    pass\nimport os\nx = 1\n".splitlines(
        keepends=True
    )
    made: list[tuple[str, SamplingParams]] = []
    for i in range(number):
        text = "".join(rng.choice(words) for _ in range(rng.choice([1, 8, 30, 60]))) + f"# {i}\n"
        params = SamplingParams(
            max_tokens=rng.choice([30, 80, 120]),
            temperature=rng.choice([0.0, 0.9]),
            seed=i,
            ignore_eos=rng.random() < 0.7,
            logprobs=1,
            repetition_penalty=rng.choice([1.0, 1.1]),
        )
        made.append((text, params))
    return made


async def run(
    config: EngineConfig,
    pools: PoolConfig,
    requests: Sequence[tuple[str, SamplingParams]],
    *,
    faults: Faults | None = None,
    hands_over: bool = True,
    progress: Callable[[Drill], object] = lambda drill: None,
) -> Drill:
    """Run all requests at once, repeatedly while faults are left; check that each request's answers agree.

    Args:
        config: of each engine; with an event log, the remaining blocks of surviving workers are counted.
        pools: sizes of the pools.
        requests: prompts with their parameters.
        faults: to inject; None: none.
        hands_over: every prompt of a block or more is handed over; False: the router decides.
        progress: called after every round.
    """
    drill = Drill()
    seen = _StreamCounts()
    placer = LeastBusy() if hands_over else None
    engine = PooledEngine(config, pools, on_trouble=lambda cause: None, listeners=(seen,), placer=placer)
    await engine.start()
    faults = faults or Faults(0)
    disturbing = asyncio.create_task(_disturb(engine, drill, faults, seen))
    resizing = asyncio.create_task(_resize(engine, pools, drill, faults))
    try:
        while True:
            answers = await asyncio.gather(
                *(
                    ask(engine, f"{drill.num_rounds}-{i}", *request, seen.delivered)
                    for i, request in enumerate(requests)
                )
            )
            for i, (token_ids, logprobs, text) in enumerate(answers):
                name = str(i)
                known = drill.token_ids.setdefault(name, token_ids)
                assert token_ids == known, f"request {i} in round {drill.num_rounds}: {token_ids} and before {known}"
                assert drill.logprobs.setdefault(name, logprobs) == logprobs
                assert drill.texts.setdefault(name, text) == text
            drill.num_rounds += 1
            progress(drill)
            if disturbing.done():
                break
        await disturbing
        resizing.cancel()
        await _settled(engine)
        if config.load.event_log is not None:
            await asyncio.sleep(LEASE_S + 1)  # until unclaimed leases have ended
        survivors = [member.worker_id for member in engine.members() if member.state is EngineState.RUNNING]
    finally:
        disturbing.cancel()
        resizing.cancel()
        await asyncio.gather(disturbing, resizing, return_exceptions=True)
        await engine.close()
    if config.load.event_log is not None:
        drill.num_blocks_left = {worker_id: _blocks_left(config.load.event_log, worker_id) for worker_id in survivors}
    drill.num_handed_over, drill.gaps_s, drill.pauses_s = seen.num_handed_over, seen.gaps_s, seen.pauses_s()
    drill.num_resumed, drill.num_late_updates = engine.dispatcher.num_resumed, engine.dispatcher.num_late_updates
    return drill


class _StreamCounts:
    """Counter of events, and of the time until the next token of resumed streams."""

    def __init__(self) -> None:
        self.num_handed_over = 0
        self.gaps_s: list[float] = []
        self._resumed_s: dict[str, float] = {}
        self._delivered_s: dict[str, list[float]] = {}
        self.killed_s: list[float] = []
        """Times at which all workers of a pool were killed at once."""

    def append(self, packed: PackedEvent) -> None:
        """Count one event; events come in order."""
        event = unpack(packed)
        if isinstance(event, KVImportEnded) and not event.problem:
            self.num_handed_over += 1
        elif isinstance(event, RequestRouted) and sequence_of(event.request_id) != event.request_id:
            self._resumed_s.setdefault(name_of(event.request_id), event.time_s)

    def delivered(self, name: str, now_s: float) -> None:
        """Record that tokens of a request have arrived."""
        self._delivered_s.setdefault(name, []).append(now_s)
        resumed_s = self._resumed_s.pop(name, None)
        if resumed_s is not None:
            self.gaps_s.append(now_s - resumed_s)

    @property
    def num_begun(self) -> int:
        """Number of requests that have received tokens."""
        return len(self._delivered_s)

    def pauses_s(self) -> list[float]:
        """Return the longest time between two tokens around each kill, for requests with tokens before and after it.

        Tokens that the dead worker had sent may still arrive for a moment.
        """
        pauses: list[float] = []
        for times_s in self._delivered_s.values():
            for killed_s in self.killed_s:
                if not times_s[0] < killed_s < times_s[-1]:
                    continue
                around = [(a, b) for a, b in pairwise(times_s) if b > killed_s and a < killed_s + STILL_ARRIVES_S]
                pauses.append(max(b - a for a, b in around))
        return pauses


async def ask(
    engine: PooledEngine,
    name: str,
    text: str,
    params: SamplingParams,
    delivered: Callable[[str, float], object] = lambda name, now_s: None,
) -> tuple[list[int], list[float], str]:
    """Run one request to its end; return its tokens, their log-probabilities and its text.

    Args:
        engine: started; the request is retried while no worker decodes.
        name: of the request.
        text: its prompt.
        params: one sequence, with log-probabilities if requested.
        delivered: called with the name and the time whenever tokens have arrived.
    """
    while True:
        try:
            stream = asked(engine, name, text, params, engine.now_s())
            break
        except EngineUnavailable:  # no worker decodes: retry, as the error says
            await asyncio.sleep(0.05)
    token_ids: list[int] = []
    logprobs: list[float] = []
    said = ""
    async for outputs in outputs_of(stream):
        delivered(name, engine.now_s())
        for completion in (completion for output in outputs for completion in output.outputs):
            token_ids += completion.token_ids
            logprobs += [
                entry[t].logprob for entry, t in zip(completion.logprobs or [], completion.token_ids, strict=True)
            ]
            said += completion.text
    return token_ids, logprobs, said


async def _kill_all_of(role: Role, engine: PooledEngine, drill: Drill, faults: Faults, seen: _StreamCounts) -> None:
    """Kill every worker of a pool at once, whenever all of them run and streams have begun."""
    for _ in range(faults.number):
        await asyncio.sleep(faults.every_s)
        num_begun = seen.num_begun
        while not (
            engine.dispatcher.num_live
            and seen.num_begun > num_begun
            and all(member.state is EngineState.RUNNING for member in engine.members())
        ):
            await asyncio.sleep(0.01)
        seen.killed_s.append(engine.now_s())
        for worker_id, pid in engine.pids.items():
            if worker_id.startswith(role):
                os.kill(pid, signal.SIGKILL)
                drill.num_killed += 1


async def _disturb(engine: PooledEngine, drill: Drill, faults: Faults, seen: _StreamCounts) -> None:
    """Kill and freeze workers in turn; spare the last decode worker unless `Faults.only` names its pool."""
    if faults.only is not None:
        await _kill_all_of(faults.only, engine, drill, faults, seen)
        return
    rng = random.Random(faults.seed)
    done = 0
    while done < faults.number:
        await asyncio.sleep(faults.every_s * rng.uniform(0.5, 1.5))
        pids = engine.pids
        decoders = [worker for worker in pids if worker.startswith("decode")]
        victims = [worker for worker in pids if worker.startswith("prefill") or len(decoders) > 1]
        if not victims or not engine.dispatcher.num_live:
            continue
        victim = rng.choice(victims)
        is_freeze = rng.random() < 0.4
        try:
            os.kill(pids[victim], signal.SIGSTOP if is_freeze else signal.SIGKILL)
        except ProcessLookupError:  # it was frozen before, and has just been killed for that
            continue
        drill.num_frozen += is_freeze
        drill.num_killed += not is_freeze
        done += 1


async def _resize(engine: PooledEngine, pools: PoolConfig, drill: Drill, faults: Faults) -> None:
    """Add a worker to a pool and remove one again, alternating."""
    rng = random.Random(faults.seed)
    while faults.resizes:
        for more in (1, 0):
            await asyncio.sleep(rng.uniform(5.0, 15.0))
            role = rng.choice([Role.PREFILL, Role.DECODE])
            number = (pools.prefill if role is Role.PREFILL else pools.decode) + more
            engine.scale({role: number})
            drill.num_resized += 1


def _blocks_left(event_log: Path, worker_id: str) -> int:
    """Return the blocks that were held when a worker ended, from a replay of its log."""
    log = log_of(event_log, worker_id)
    assert log is not None
    return scheduler_at_end(read_events(log)).kv_usage.num_used


async def _settled(engine: PooledEngine) -> None:
    """Wait until every request has ended everywhere."""
    deadline = time.monotonic() + 30
    while engine.dispatcher.num_live:
        assert time.monotonic() < deadline, f"{engine.dispatcher.num_live} sequences are left"
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """Load and faults of a drill."""

    num_streams: int = 24
    """Simultaneous requests, repeated while faults are left."""
    num_faults: int = 50
    """Processes that are killed (SIGKILL) or frozen (SIGSTOP), one after the other."""
    prefill: int = 1
    """Number of prefill processes."""
    decode: int = 2
    """Number of decode processes; the last live one is spared, except in last_decode."""
    last_decode: int = 6
    """Kills of the only decode process of a smaller pair of pools, after the drill. A prefill process then decodes."""
    every_s: float = 1.0
    """Mean seconds between two faults; a process needs some seconds to restart."""
    heartbeat_timeout_s: float = 1.0
    """Heartbeat timeout of the server."""
    seed: int = 0
    """Seed of the faults."""
    results: Path = DEFAULT_FOLDER
    """Folder for drill.json."""

    def __post_init__(self) -> None:
        check_int("num_streams", self.num_streams, 1, 1000)
        check_int("num_faults", self.num_faults, 1, 100_000)
        check_int("decode", self.decode, 2, 64)
        check_int("last_decode", self.last_decode, 0, 1000)


def run_drill(options: DrillOptions) -> dict[str, Any]:
    """Run the drill; check that every stream equals the undisturbed one in all tokens and log-probabilities.

    Raises:
        AssertionError: a stream differs.
    """
    check_folder(options.results)
    config = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=2000)
    requests = prompts(options.num_streams)
    quiet = asyncio.run(run(config, PoolConfig(decode=1), requests))
    faults = Faults(options.num_faults, options.every_s, options.seed, resizes=True)
    pools = PoolConfig(prefill=options.prefill, decode=options.decode, heartbeat_timeout_s=options.heartbeat_timeout_s)
    with tempfile.TemporaryDirectory(prefix="twostroke-drill-") as folder:
        logged = replace(config, load=replace(config.load, event_log=Path(folder) / "drill.jsonl"))
        found = asyncio.run(run(logged, pools, requests, faults=faults, progress=_progress))
    assert found.token_ids == quiet.token_ids, "tokens differ from those of one process"
    assert found.logprobs == quiet.logprobs, "log-probabilities differ from those of one process"
    last = _last_decode(config, requests, quiet, options)
    assert not any(found.num_blocks_left.values()), f"blocks are still held: {found.num_blocks_left}"
    results = {
        "streams": options.num_streams * found.num_rounds,
        "killed": found.num_killed,
        "frozen": found.num_frozen,
        "resized": found.num_resized,
        "handed_over": found.num_handed_over,
        "resumed": found.num_resumed,
        "fenced": found.num_late_updates,
        "different_streams": 0,
        "blocks_left": found.num_blocks_left,
        "gap_ms": percentiles([1000 * gap_s for gap_s in found.gaps_s]),
        **last,
    }
    record(
        "python -m benchmarks drill",
        options,
        name="drill",
        config={"model": "embedded", "threads": 1},
        workload=settings(options),
        results=results,
    )
    return results


def _last_decode(
    config: EngineConfig, requests: Sequence[tuple[str, SamplingParams]], quiet: Drill, options: DrillOptions
) -> dict[str, Any]:
    """Kill the only decode process repeatedly, then the only prefill process; return how the streams were disturbed.

    Raises:
        AssertionError: a stream differs from the undisturbed one.
    """
    told: dict[str, Any] = {}
    for role in (Role.DECODE, Role.PREFILL) if options.last_decode else ():
        faults = Faults(options.last_decode, options.every_s, options.seed, only=role)
        pools = PoolConfig(prefill=1, decode=1, heartbeat_timeout_s=options.heartbeat_timeout_s)
        found = asyncio.run(run(config, pools, requests, faults=faults, progress=_progress))
        assert found.token_ids == quiet.token_ids, f"tokens differ after the last {role} process was killed"
        assert found.logprobs == quiet.logprobs, f"log-probabilities differ after the last {role} process was killed"
        told[f"last_{role}_killed"] = found.num_killed
        told[f"last_{role}_pause_ms"] = percentiles([1000 * pause_s for pause_s in found.pauses_s])
    return told


def _progress(drill: Drill) -> None:
    """Update a progress line on stderr."""
    if sys.stderr.isatty():
        done = drill.num_killed + drill.num_frozen
        sys.stderr.write(f"\r{done} faults, {drill.num_rounds} rounds of streams ")


def print_drill(results: dict[str, Any]) -> None:
    """Print the results."""
    for name, value in results.items():
        told = ", ".join(f"{key} {figure:.4g}" for key, figure in value.items()) if isinstance(value, dict) else value
        Console().print(f"{name.replace('_', ' '):18} {told}", highlight=False)
