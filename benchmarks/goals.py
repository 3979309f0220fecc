"""Goals of each kind of result, and whether a saved result meets them. Pure.

A reproduction writes its claims with their verdicts. Other benchmarks only write figures. Their goals are here, so
that one function reports for every file under `benchmarks/results` which goals it misses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from benchmarks.claim import Claim
from benchmarks.compare.options import BEFORE
from twostroke.measure.report import BenchResult

GATE = 0.97
"""Least rate with the speculation gate, as a share of the rate without drafts (`benchmarks spec`)."""
SPEEDUPS = {"draft_model": 1.5, "medusa": 1.5, "eagle": 1.3, "early_exit": 1.3}
"""Least speed-up of `benchmarks spec` for one request with the best number of drafts, on every model."""
EDIT_SPEEDUP = 2.0
"""Least speed-up of n-gram drafts in edits."""
SYNTHETIC_ERROR = 0.15
"""Largest error of a synthetic drafter's predicted speed-up, in Qwen3-0.6B's shape."""
LAYERWISE = 1.15
"""Longest hand-over layer by layer, relative to the longer of prefill and transfer (`benchmarks handover`)."""
LINK_SHARE = 0.9
SHARED_MEMORY_GB_S = 5.0
PREDICTION_MEDIAN, PREDICTION_P95 = 0.10, 0.20
"""Largest errors of predicted times (`benchmarks prediction`)."""
LAST_WORKER_PAUSE_MS, MEDIAN_GAP_MS = 1_000.0, 200.0
"""Longest pauses of streams when workers die (`benchmarks drill`)."""
FALL, PREFILL_TO_DECODE, BATCH_GAIN = 0.05, 3.0, 2.0
"""Fall of TPOT to a longer context; rates of prefill and of the largest batch over one request (`bench sweep`)."""
FIRST_TOKEN_S, START_MEMORY = 5.0, 1.15
"""Seconds from the start of a process; memory relative to weights and KV (`bench start`)."""
MEMORY_SHARE, OVER_LLAMA_CPP = 0.9, 3.0
BESIDE_PEERS = {
    16: {"decode, batch 1": 1.1, "prefill 512": 1.8, "end to end, batch 32": 2.0},
    8: {"decode, batch 1": 1.3, "prefill 512": 2.0, "end to end, batch 32": 2.0},
    4: {"decode, batch 1": 1.4, "prefill 512": 2.5, "end to end, batch 32": 2.2},
}
"""Least multiples of the best peer's rate, by the bits of a weight (`benchmarks compare`)."""
SPARSE_BESIDE = {
    "llama.cpp": {"decode, batch 1": 1.2, "prefill 512": 2.0, "end to end, batch 8": 2.0},
    "ik_llama.cpp": {"decode, batch 1": 1.0},
}
"""Goals of models with experts, by peer: our rate over its rate on the same file."""
BESIDE_BEFORE = 0.99
"""Least rate relative to another version of twostroke (`--peers twostroke-before`)."""
BESIDE_SERVERS = {"llama-server": 4.5, "vllm": 1.2}
"""Least multiples of a server's output tokens per second, by its name (`benchmarks servers`)."""


def goals_of(result: BenchResult) -> list[Claim]:
    """Return the goals of a result; none if its figures are only reported."""
    found = [goals(result) for name, goals in _KINDS.items() if name in result.results]
    return [goal for goals in found for goal in goals]


def _claims(result: BenchResult) -> Iterator[Claim]:
    for claim in result.results["claims"]:
        if claim["holds"] is not None:
            rule, predicted = claim["rule"], claim["predicted"]
            if rule == "equal" or rule.startswith("within"):
                rule = f"{rule.replace('equal', '=')} {'of ' if rule != 'equal' else ''}{predicted:.4g}"
            yield Claim(claim["what"], predicted, claim["measured"], rule, claim["holds"])


def _prediction(result: BenchResult) -> Iterator[Claim]:
    yield Claim.at_most("error of predicted times, median", PREDICTION_MEDIAN, result.results["median_error"])
    yield Claim.at_most("error of predicted times, p95", PREDICTION_P95, result.results["p95_error"])


def _handovers(result: BenchResult) -> Iterator[Claim]:
    for row in result.results["handovers"]:
        what = f"{row['transport']}, {row['megabytes']} MB"
        yield Claim.at_least(f"{what}: bytes over the formula's", 1.0, float(row["is_exact"]))
        yield Claim.at_most(f"{what}: layer by layer", LAYERWISE, row["layerwise"]["ratio"])
        if "share_of_link" in row:
            yield Claim.at_least(f"{what}: share of the link", LINK_SHARE, row["share_of_link"])
        if row["transport"] == "shm":
            yield Claim.at_least(f"{what}: GB/s", SHARED_MEMORY_GB_S, row["gb_per_s"])


def _gate(result: BenchResult) -> Iterator[Claim]:
    for row in result.results["gate"]:
        if row["method"] != "none":
            given = "" if row["set_acceptance"] is None else f" at {row['set_acceptance']:g}"
            yield Claim.at_least(f"gate, {row['method']}{given}, batch {row['batch']}", GATE, row["speedup"])


def _drafts(result: BenchResult) -> Iterator[Claim]:
    rows, model = result.results["fixed"], result.results["model"]
    least = SPEEDUPS | ({"ngram": EDIT_SPEEDUP} if result.config["options"]["task"] == "edit" else {})
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] in least):
        best = max(row["speedup"] for row in rows if row["method"] == method)
        yield Claim.at_least(f"{method}, best number of drafts", least[method], best)
    for row in rows:
        if model == "qwen3" and row["method"] == "synthetic":
            what = f"synthetic at {row['set_acceptance']:g}, {row['num_drafts']} drafts: error of the prediction"
            yield Claim.at_most(what, SYNTHETIC_ERROR, abs(row["speedup"] / row["predicted"] - 1))


def _compare(result: BenchResult) -> Iterator[Claim]:
    engines: Mapping[str, Any] = result.results["engines"]
    ours = engines["twostroke"]
    ratios = {
        figure: {
            peer: found["figures"][figure]["twostroke_to_this"]
            for peer, found in engines.items()
            if peer != "twostroke" and figure in found["figures"]
        }
        for figure in ours["figures"]
    }
    if BEFORE.name in engines:
        for figure, of_peers in ratios.items():
            if BEFORE.name in of_peers:
                yield Claim.at_least(f"{figure}, of the version before", BESIDE_BEFORE, of_peers[BEFORE.name])
        return
    if "for a token)" in ours["about"]["startup"]:
        yield from _sparse(ratios)
        return
    bits = _bits(result)
    for figure, least in BESIDE_PEERS[bits].items():
        if ratios.get(figure):
            yield Claim.at_least(f"{figure}, of the best peer", least, min(ratios[figure].values()))
    over_llama_cpp = ratios.get("end to end, batch 32", {}).get("llama.cpp")
    if over_llama_cpp is not None and bits < 16:
        yield Claim.at_least("end to end, batch 32, of llama.cpp", OVER_LLAMA_CPP, over_llama_cpp)
    weights = re.search(r"([\d,]+) bytes of weights", ours["about"]["startup"])
    if weights and "decode, batch 1" in ours["figures"]:
        read_gb_s = int(weights[1].replace(",", "")) * ours["figures"]["decode, batch 1"]["median_tok_s"] / 1e9
        share = read_gb_s / result.results["limits"]["read_gb_s"]
        yield Claim.at_least("decode, batch 1, weights over the memory's rate", MEMORY_SHARE, share)


def _sparse(ratios: Mapping[str, Mapping[str, float]]) -> Iterator[Claim]:
    for peer, goals in SPARSE_BESIDE.items():
        for figure, least in goals.items():
            if peer in ratios.get(figure, {}):
                yield Claim.at_least(f"{figure}, of {peer}", least, ratios[figure][peer])


def _servers(result: BenchResult) -> Iterator[Claim]:
    for name, ratio in result.results["ratios"].items():
        if name in BESIDE_SERVERS:
            yield Claim.at_least(f"output tokens a second, of {name}", BESIDE_SERVERS[name], ratio)


def _bits(result: BenchResult) -> int:
    """Return the bits of a weight: of the precision, or of the type in a GGUF file's name."""
    precision: str = result.config["precision"]
    if precision != "gguf":
        return {"bf16": 16, "int8": 8, "int4": 4}[precision]
    named = re.search(r"[.-]I?Q(\d)_", result.config["model"])
    return 16 if named is None else 4 if int(named[1]) <= 4 else 8


def _drill(result: BenchResult) -> Iterator[Claim]:
    found = result.results
    yield Claim.at_most("streams that came out different", 0, found["different_streams"])
    yield Claim.at_most("blocks left", 0, sum(found["blocks_left"].values()))
    yield Claim.at_most("gap of a stream, median ms", MEDIAN_GAP_MS, found["gap_ms"]["p50"])
    pause_ms = found["last_decode_pause_ms"]["p99"]
    yield Claim.at_most("pause at the death of the only decode worker, p99 ms", LAST_WORKER_PAUSE_MS, pause_ms)


def _quality(result: BenchResult) -> Iterator[Claim]:
    for name, row in result.results.items():
        if row.get("most_rise") is not None:
            yield Claim.at_most(f"{name}: rise of perplexity", row["most_rise"], row["perplexity_rise"])


def _start(result: BenchResult) -> Iterator[Claim]:
    for name, row in result.results.items():
        if isinstance(row, Mapping):
            yield Claim.at_most(f"{name}: first token, s", FIRST_TOKEN_S, row["first_token_s"])
            yield Claim.at_most(f"{name}: memory over weights and KV", START_MEMORY, row["memory_ratio"])


def _sweep(result: BenchResult) -> Iterator[Claim]:
    found = result.results
    tpots = [point["tpot_s"] for point in found["tpot_by_context"]]
    fall = max((1 - after / before for before, after in combinations(tpots, 2)), default=0.0)
    yield Claim.at_most("TPOT, largest fall from one context to a longer one", FALL, max(0.0, fall))
    of_one = found["prefill_to_decode"]["of_one_request"]
    yield Claim.at_least("prefill's rate over one request's decode", PREFILL_TO_DECODE, of_one)
    seconds = found["device_seconds_per_1k_tokens"]
    gain = seconds["output_alone"] / seconds["output_in_the_largest_batch"]
    yield Claim.at_least("largest batch's rate over one request's", BATCH_GAIN, gain)


def _clients(result: BenchResult) -> Iterator[Claim]:
    for name, row in result.results.items():
        yield Claim.at_least(f"{name} runs", 1, float(row["holds"]))


_KINDS: Mapping[str, Callable[[BenchResult], Iterator[Claim]]] = {
    "claims": _claims,
    "p95_error": _prediction,
    "handovers": _handovers,
    "gate": _gate,
    "fixed": _drafts,
    "engines": _compare,
    "ttft_p50_s": _servers,
    "last_decode_pause_ms": _drill,
    "base": _quality,
    "torch_alone_bytes": _start,
    "tpot_by_context": _sweep,
    "langchain": _clients,
}
"""Functions that return goals, by a name that only results of one kind contain."""
