"""A long prompt through `twostroke serve`: memory of both processes, TTFT, and the short requests' tokens.

The model is the embedded one's shape with a single layer and random weights. The benchmark measures what a server holds
and does for such a prompt apart from attention.
"""

from __future__ import annotations

import bisect
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.local_server import LocalServer, local_server
from twostroke.config.kv_format import resolve_kv_format
from twostroke.engine.event_sinks import read_events
from twostroke.errors import SetupError
from twostroke.kv_cache.layout import KVLayout
from twostroke.measure.from_log import run_of_log
from twostroke.measure.report import percentiles
from twostroke.measure.serve.http_connection import Origin
from twostroke.measure.serve.load import LoadRun
from twostroke.measure.serve.target import Load, Target, run_loads
from twostroke.measure.workload import Workload, of_lengths
from twostroke.model.checkpoint import read_model_config
from twostroke.model.model_files import find_folder_only
from twostroke.process_memory import peak_resident_bytes, resident_bytes
from twostroke.served_run import Run

BLOCK_SIZE = 16
MORE_TOKENS = 64
"""Output tokens of each short request beyond one per step of the long prompt, because it may begin a little later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Measurements of the served run."""

    run: Run
    """The run as the engine's event log records it."""
    http_growth_bytes: int
    """Largest growth of the HTTP process's memory."""
    engine_growth_bytes: int
    """Largest growth of the engine process's memory, KV included: memory becomes resident when it is first written."""
    kv_bytes: int
    ttft_s: float
    """TTFT of the long prompt, at the client."""
    itl_s: dict[str, float]
    """ITL percentiles of the short requests, at the client."""
    log_bytes: int

    @property
    def num_starved(self) -> int:
        """Steps between a request's first and last token that brought it no token, summed over all requests."""
        ends = [step.end_s for step in self.run.steps]
        starved = 0
        for request in self.run.requests:
            times_s = request.times.token_times_s
            num_steps = bisect.bisect_right(ends, times_s[-1]) - bisect.bisect_left(ends, times_s[0])
            starved += num_steps - len(times_s)
        return starved

    def as_json(self) -> dict[str, Any]:
        """Return the figures for a result."""
        return {
            "http_growth_bytes": self.http_growth_bytes,
            "engine_growth_bytes": self.engine_growth_bytes,
            "kv_bytes": self.kv_bytes,
            "ttft_long_s": self.ttft_s,
            "itl_s": self.itl_s,
            "event_log_bytes": self.log_bytes,
        }


def serve_long_prompt(long_prompt: int, num_short: int, budget: int, *, threads: int | None, seed: int) -> Served:
    """Serve one long prompt beside short requests, over HTTP.

    Args:
        long_prompt: tokens of the long prompt.
        num_short: number of short requests that decode meanwhile.
        budget: tokens per step.
        threads: threads of the model; None: one for each processor of this machine.
        seed: seed of the prompts.

    Raises:
        SetupError: the server does not start, or a request failed.
    """
    num_steps = -(-long_prompt // (budget - num_short))
    lengths = [(BLOCK_SIZE, num_steps + MORE_TOKENS)] * num_short + [(long_prompt, 4)]
    with tempfile.TemporaryDirectory(prefix="twostroke-bench-") as temporary:
        folder = _one_layer(Path(temporary) / "model", max(sum(pair) for pair in lengths))
        config = read_model_config(folder)
        workload = of_lengths(lengths, vocab_size=config.vocab_size, seed=seed)
        num_blocks = sum(-(-request.num_tokens // BLOCK_SIZE) for request in workload.requests)
        log = Path(temporary) / "events.jsonl"
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "max_num_seqs": num_short + 1,
            "max_num_batched_tokens": budget,
            "max_model_len": workload.max_request_tokens,
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": num_blocks,
            "enable_prefix_caching": False,
            "event_log": log,
            "max_queue_wait_s": 3600,
            **({} if threads is None else {"threads": threads}),
        }
        with local_server(str(folder), settings) as server:
            _ask(server, folder, of_lengths([(budget, 2)], vocab_size=config.vocab_size))
            pids = server.pid, server.engine_pid()
            before = [resident_bytes(pid) for pid in pids]
            run = _ask(server, folder, workload)
            grown = [peak_resident_bytes(pid) - was for pid, was in zip(pids, before, strict=True)]
        seen = run_of_log(read_events(log))
        log_bytes = log.stat().st_size
    kv_format = resolve_kv_format("auto", config.dtype)
    layout = KVLayout.of(config.kv_specs, block_size=BLOCK_SIZE, kv_format=kv_format)
    *short, long = run.exchanges
    assert long.ttft_s is not None, "a request that ended well has a first token"
    gaps = [gap for exchange in short for gap in exchange.itl_s]
    return Served(
        run=seen,
        http_growth_bytes=grown[0],
        engine_growth_bytes=grown[1],
        kv_bytes=num_blocks * layout.bytes_per_block,
        ttft_s=long.ttft_s,
        itl_s={**percentiles(gaps), "max": max(gaps)},
        log_bytes=log_bytes,
    )


def _ask(server: LocalServer, folder: Path, workload: Workload) -> LoadRun:
    target = Target(origin=Origin.parse(server.url), model=str(folder), token_counts="token-ids")
    (found,) = run_loads([Load(target, workload)])
    for exchange in found.exchanges:
        if exchange.failure is not None:
            raise SetupError(f"a request failed with {exchange.failure}: {exchange.message}")
    return found


def _one_layer(target: Path, num_tokens: int) -> Path:
    """Write the embedded model's folder without weights, with one layer and a longer context."""
    own = find_folder_only("embedded", "its shape is made smaller")
    target.mkdir()
    for path in own.glob("*.json"):
        shutil.copy(path, target / path.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("early_exit_layers", None)
    config |= {"num_hidden_layers": 1, "max_position_embeddings": num_tokens}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target
