"""`python -m benchmarks drill`: streams through two pools whose processes are killed and frozen, and undisturbed."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drill.streams import Drill, Faults, prompts, run
from twostroke.config.checks import whole_number
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.measure.report import (
    DEFAULT_FOLDER,
    check_folder,
    percentiles,
    record,
    settings,
)
from twostroke.pools.member import Role
from twostroke.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """How much happens."""

    num_streams: int = 24
    """Requests at once, again and again while faults are left."""
    num_faults: int = 50
    """Processes that are killed (SIGKILL) or frozen (SIGSTOP), one after the other."""
    prefill: int = 1
    """Prefill processes."""
    decode: int = 2
    """Decode processes; the last that lives is left alone, but for last_decode."""
    last_decode: int = 6
    """Afterwards: how often to kill the only decode process of a smaller pair of pools. A prefill process then
    decodes."""
    every_s: float = 1.0
    """Between two faults, on average; a process needs some seconds to come back."""
    heartbeat_timeout_s: float = 1.0
    """As of the server."""
    seed: int = 0
    """Of who dies when."""
    results: Path = DEFAULT_FOLDER
    """Folder for drill.json."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        whole_number("num_streams", self.num_streams, 1, 1000)
        whole_number("num_faults", self.num_faults, 1, 100_000)
        whole_number("decode", self.decode, 2, 64)
        whole_number("last_decode", self.last_decode, 0, 1000)


def run_drill(options: DrillOptions) -> dict[str, Any]:
    """Runs it; every stream must be the undisturbed one, token by token and bit by bit of its log-probabilities.

    Raises:
        AssertionError: one is not.
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
        "fenced": found.num_fenced,
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
        AssertionError: a stream is not the undisturbed one.
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
    """One line that changes, on stderr."""
    if sys.stderr.isatty():
        done = drill.num_killed + drill.num_frozen
        sys.stderr.write(f"\r{done} faults, {drill.num_rounds} rounds of streams ")


def print_drill(results: dict[str, Any]) -> None:
    """For people."""
    for name, value in results.items():
        told = ", ".join(f"{key} {figure:.4g}" for key, figure in value.items()) if isinstance(value, dict) else value
        Console().print(f"{name.replace('_', ' '):18} {told}", highlight=False)
