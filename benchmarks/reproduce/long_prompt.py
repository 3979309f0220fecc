"""A prompt of 131,072 tokens, computed in chunks together with short requests, which get a token in every step.

The budget of a step is shared: eight decodes leave 504 of 512 tokens for the prompt, so it takes 261 steps, and no
request waits longer than one of them. Memory is bounded by the chunk: beyond the KV itself it must not grow with the
prompt. (Attention over the whole prompt at once would hold 131k x 131k scores per head: 64 GiB each.)

It runs twice: in the engine alone with the model, and through a server with one layer of it.

Through `twostroke serve`, the memory of both processes, TTFT, and the short requests' tokens are measured. The model is
then the embedded one's shape with a single layer and random weights. So the benchmark measures a server's memory and
work for such a prompt apart from attention.
"""

from __future__ import annotations

import bisect
import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from benchmarks.serving.local_server import local_server
from twostroke.config.cache import CacheConfig
from twostroke.config.kv_format import resolve_kv_format
from twostroke.config.model import ModelConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.engine.event_sinks import read_events
from twostroke.kv_cache.layout import KVLayout
from twostroke.measure.figure import MEASURED, PREDICTED
from twostroke.measure.from_log import run_from_log
from twostroke.measure.model_engine import model_engine
from twostroke.measure.report import percentiles
from twostroke.measure.serve.openai_wire import Exchange
from twostroke.measure.workload import Workload, workload_of_lengths
from twostroke.model.checkpoint import read_model_config
from twostroke.model.model_files import find_folder_only
from twostroke.outputs import RequestTimes
from twostroke.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from twostroke.served_run import Run

BLOCK_SIZE = 16
MORE_TOKENS = 64
"""Output tokens of each short request beyond one per step of the long prompt, because it may begin a little later."""


def num_starved(run: Run) -> int:
    """Return the steps between a request's first and last token that gave it no token, over all requests."""
    ends = [step.end_s for step in run.steps]
    starved = 0
    for request in run.requests:
        times_s = request.times.token_times_s
        starved += bisect.bisect_right(ends, times_s[-1]) - bisect.bisect_left(ends, times_s[0]) - len(times_s)
    return starved


def serve_long_prompt(
    long_prompt: int, num_short: int, budget: int, *, threads: int | None, seed: int
) -> tuple[Run, dict[str, Any]]:
    """Serve one long prompt together with short requests, over HTTP.

    Args:
        long_prompt: tokens of the long prompt.
        num_short: number of short requests that decode meanwhile.
        budget: tokens per step.
        threads: threads of the model; None: one for each processor of this machine.
        seed: seed of the prompts.

    Returns:
        The run from the engine's event log, and figures: the largest growth of each process's memory (the engine's
        includes its KV: memory becomes resident when it is first written), and latencies at the client.

    Raises:
        SetupError: the server does not start, or a request failed.
    """
    num_steps = -(-long_prompt // (budget - num_short))
    lengths = [(BLOCK_SIZE, num_steps + MORE_TOKENS)] * num_short + [(long_prompt, 4)]
    with tempfile.TemporaryDirectory(prefix="twostroke-bench-") as temporary:
        folder = _one_layer(Path(temporary) / "model", max(sum(pair) for pair in lengths))
        config = read_model_config(folder)
        workload = workload_of_lengths(lengths, vocab_size=config.vocab_size, seed=seed)
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
            server.run(str(folder), workload_of_lengths([(budget, 2)], vocab_size=config.vocab_size), ["warm-up"])
            pids = server.pid, server.engine_pid()
            before = [resident_bytes(pid) for pid in pids]
            run = server.run(str(folder), workload, [f"r{i}" for i in range(len(workload))])
            grown = [peak_resident_bytes(pid) - was for pid, was in zip(pids, before, strict=True)]
        seen = run_from_log(read_events(log))
        log_bytes = log.stat().st_size
    *short, long = run.exchanges
    assert long.ttft_s is not None, "a request that ended well has a first token"
    return seen, {
        "http_growth_bytes": grown[0],
        "engine_growth_bytes": grown[1],
        "kv_bytes": num_blocks * _bytes_per_block(config, BLOCK_SIZE),
        "ttft_long_s": long.ttft_s,
        "itl_s": _itl_s(short),
        "event_log_bytes": log_bytes,
    }


def _bytes_per_block(config: ModelConfig, block_size: int) -> int:
    kv_format = resolve_kv_format("auto", config.dtype)
    return KVLayout.of(config.kv_specs, block_size=block_size, kv_format=kv_format).bytes_per_block


def _itl_s(requests: Iterable[Exchange | RequestTimes]) -> dict[str, float]:
    gaps = [gap for request in requests for gap in request.itl_s]
    return {**percentiles(gaps), "max": max(gaps)}


def _one_layer(target: Path, num_tokens: int) -> Path:
    """Write the embedded model's folder without weights, with one layer and a longer context."""
    own = find_folder_only("embedded", "its shape is made smaller")
    changes = {"num_hidden_layers": 1, "max_position_embeddings": num_tokens, "early_exit_layers": []}
    return _copied(own, target, "*.json", changes)


def _copied(folder: Path, target: Path, names: str, changes: dict[str, Any]) -> Path:
    """Copy the files of a model that match a pattern, and change its config."""
    target.mkdir(exist_ok=True)
    for path in folder.glob(names):
        if path.is_file():
            shutil.copy(path, target / path.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return target


BUDGET = 512
NUM_SHORT = 8
SHORT_PROMPT = 16
WORKING_BYTES = 256 << 20
"""Most bytes that a step may take in addition to weights and KV."""
HTTP_BYTES = 64 << 20
"""Most memory that the HTTP process may take for the prompt: its body, its token ids, and copies of these."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Count steps, then run a model and observe its memory."""
    long_prompt = 131_072 if options.full else 2048
    num_steps = -(-long_prompt // (BUDGET - NUM_SHORT))
    # the short ones are there before the long one begins, and still there when it has ended
    lengths = [(SHORT_PROMPT, num_steps + 8)] * NUM_SHORT + [(long_prompt, 4)]
    workload = options.workload_of_lengths(lengths)
    scheduler = SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=NUM_SHORT + 1)
    cache = CacheConfig(enable_prefix_caching=False)
    counted = counting_engine(scheduler, cache, max_model_len=workload.max_request_tokens).run(workload)
    claims = _step_claims("counted", counted, num_steps)
    details: dict[str, Any] = {}
    runs: dict[str, Run] = {}
    if options.with_model:
        runs["model"], details = _model(workload, scheduler, cache, options)
        claims += _step_claims("on the model", runs["model"], num_steps)
        claims.append(
            Claim.at_most(
                "peak memory beyond KV and what a single chunk took, MiB", WORKING_BYTES >> 20, details["working_mib"]
            )
        )
        claims.append(Claim.reported("TTFT of the long prompt, s", details["ttft_long_s"]))
        stall = details["itl_s"]["max"] / details["chunk_step_s"]["p50"]
        claims.append(Claim.reported("longest gap between tokens of a short request, in median chunk steps", stall))
        run, served = serve_long_prompt(long_prompt, NUM_SHORT, BUDGET, threads=options.threads, seed=options.seed)
        claims += _served_claims(run, served)
        details["served"] = served
    return Reproduction(
        title=f"A prompt of {long_prompt:,} tokens beside {NUM_SHORT} short requests",
        claims=tuple(claims),
        config={"max_num_batched_tokens": BUDGET, "model": options.model_name if options.with_model else None},
        workload={"long_prompt": long_prompt, "num_short": NUM_SHORT, "short_prompt": SHORT_PROMPT},
        details=details,
        remarks=() if options.with_model else ("time and memory were left out: they need a model",),
        draw=(lambda figure: _draw(figure, runs["model"])) if runs else None,
    )


def _step_claims(where: str, run: Run, num_steps: int) -> list[Claim]:
    # the first step computes the short prompts and the beginning of the long one; from then on they decode
    beside = [s for s in run.steps[1:] if s.num_prefill_tokens]
    starved = sum(s.num_decode_tokens != NUM_SHORT for s in beside)
    chunks = sum(1 for s in run.steps if s.num_prefill_tokens)
    return [
        Claim.within(f"steps that computed the long prompt, {where}", num_steps, chunks, 1 / num_steps),
        Claim.equal(f"of these, steps in which a short request got no token, {where}", 0, starved),
        Claim.at_most(f"most tokens in a step, {where}", BUDGET, max(s.num_tokens for s in run.steps)),
    ]


def _served_claims(run: Run, served: dict[str, Any]) -> list[Claim]:
    working = max(0, served["engine_growth_bytes"] - served["kv_bytes"])
    return [
        Claim.equal("steps in which a request that had begun got no token, served", 0, num_starved(run)),
        Claim.at_most("engine process beyond KV, served, MiB", WORKING_BYTES >> 20, working >> 20),
        Claim.at_most("HTTP process, growth, served, MiB", HTTP_BYTES >> 20, served["http_growth_bytes"] >> 20),
        Claim.reported("TTFT of the long prompt, served, one layer, s", served["ttft_long_s"]),
        Claim.reported("ITL of the short requests, served, one layer, p99 s", served["itl_s"]["p99"]),
    ]


def _model(
    workload: Workload, scheduler: SchedulerConfig, cache: CacheConfig, options: ReproduceOptions
) -> tuple[Run, dict[str, Any]]:
    longest = workload.max_request_tokens
    with tempfile.TemporaryDirectory(prefix="twostroke-bench-") as temporary:
        own = find_folder_only(options.model, "its context is lengthened in a folder's config.json")
        # its output beyond the supported context is meaningless, but the cost is real
        most = max(longest, read_model_config(own).max_position_embeddings)
        folder = _copied(own, Path(temporary), "*", {"max_position_embeddings": most})
        config = read_model_config(folder)
        num_blocks = sum(-(-r.num_tokens // cache.block_size) for r in workload.requests)
        engine = model_engine(
            replace(options.load(longest), model=str(folder)), scheduler, replace(cache, num_kv_blocks=num_blocks)
        )
    engine.run(
        workload_of_lengths([(BUDGET, 2)], vocab_size=config.vocab_size)
    )  # warm-up: the operators' one-time allocations
    before, resets = resident_bytes(), reset_peak()
    run = engine.run(workload, progress="long prompt")
    peak = peak_resident_bytes()
    engine.close()
    kv_bytes = num_blocks * _bytes_per_block(config, cache.block_size)
    return run, {
        "kv_bytes": kv_bytes,
        "resident_before_bytes": before,
        "peak_bytes": peak,
        "peak_is_of_this_run": resets,
        "working_mib": max(0, peak - before - kv_bytes) >> 20,
        "ttft_long_s": run.requests[NUM_SHORT].times.ttft_s,
        "itl_s": _itl_s(request.times for request in run.requests[:NUM_SHORT]),
        "chunk_step_s": percentiles([s.wall_s for s in run.steps[1:] if s.num_prefill_tokens]),
        "decode_step_s": percentiles([s.wall_s for s in run.steps if not s.num_prefill_tokens]),
    }


def _draw(figure: Any, run: Run) -> None:
    axes = figure.add_subplot()
    ends = [s.end_s for s in run.steps]
    axes.bar(range(len(ends)), [s.num_prefill_tokens for s in run.steps], 1.0, color=PREDICTED, label="prefill tokens")
    axes.set(xlabel="step", ylabel="tokens of the long prompt")
    times = axes.twinx()
    times.plot([1000 * s.wall_s for s in run.steps], color=MEASURED, label="step time")
    times.set(ylabel="milliseconds a step", ylim=(0, None))
    figure.legend(fontsize=8, frameon=False, loc="outside upper center", ncols=2)
