"""Rows of the tables. A new row needs a line here and a JSON under benchmarks/results.

A figure of a saved result is its place in the JSON and its format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.errors import InvalidParameter
from twostroke.measure.report import BenchResult

Figure = Callable[[BenchResult], str]
"""Function that reads a result and returns one of its figures as text."""


def claim(what: str, form: str = "{:.2f}", part: str = "measured") -> Figure:
    """Return a figure of a reproduction's claim.

    Args:
        what: the words of the claim.
        form: format of the number.
        part: "measured" or "predicted".
    """

    def figure(result: BenchResult) -> str:
        claims = {found["what"]: found for found in result.results["claims"]}
        if what not in claims:
            known = ", ".join(map(repr, claims))
            raise InvalidParameter("result", result.bench, f"has no claim {what!r}; it has {known}")
        return form.format(claims[what][part])

    return figure


def predicted(what: str, form: str = "{:.2f}") -> Figure:
    """Return what was predicted for a claim."""
    return claim(what, form, "predicted")


def at(*path: str, form: str = "{:.2f}") -> Figure:
    """Return the figure under a path of names in `results`."""

    def figure(result: BenchResult) -> str:
        found: Any = result.results
        for name in path:
            if not isinstance(found, Mapping) or name not in found:
                raise InvalidParameter("result", result.bench, f"has no {' / '.join(path)}")
            found = found[name]
        return form.format(found)

    return figure


def tokens_per_s(result: BenchResult) -> str:
    """Return the number of concurrent requests divided by their median TPOT, for `bench offline`."""
    batch: int = result.config["scheduler"]["max_num_seqs"]
    return f"{batch / result.results['latency']['tpot_s']['p50']:.0f}"


@dataclass(frozen=True, slots=True)
class TableRow:
    """A line of a table: a description, a result, and some of its figures."""

    what: str
    result: str
    """Name of the JSON, without suffix."""
    measured: tuple[Figure, ...]
    predicted: tuple[Figure, ...] = ()
    is_counted: bool = False
    """Whether the figures are counts, which no kernel and no machine changes."""


def claims_row(what: str, result: str, *claims: str, form: str = "{:.2f}", is_counted: bool = False) -> TableRow:
    """Return a row of claims, each as predicted and as measured."""
    parts = (tuple(claim(one, form, part) for one in claims) for part in ("measured", "predicted"))
    return TableRow(what, result, *parts, is_counted=is_counted)


OPERATORS_SINCE = "2026-11-27T19:55:06+00:00"
"""Date of the last change of a processor's default operators in speed, for models that are not GGUF files: a layer is
one native call. It was committed in the night after, with other work (commit db94eeab); results of that evening have
the change and name it 3f2f095f. Each such change updates the date."""
GGUF_SINCE = "2026-11-29T11:59:01+00:00"
"""Date of the last change of GGUF files' operators in speed: K types are unpacked once for many rows on AVX-512
(commit 8b88288e). It also marks results in formats or on processors that the change does not touch."""


def operators_of(result: BenchResult) -> str:
    """Return the operators that a result was measured with, and the level of the native ones if it is recorded.

    Reproductions record them since `benchmarks table` exists. Loads have the setting `kernels` since native kernels
    exist: a load without it used torch's operators. Benchmarks that start an engine often save its startup lines.
    """
    config = result.config
    if "kernels" in config:
        return str(config["kernels"])
    said = re.search(r"(native \w+|torch) kernels", _said_at_start(result))
    if said:
        return said[1]
    load = config.get("load")
    if not isinstance(load, Mapping):
        return "not recorded"
    if "kernels" not in load:
        return "torch"
    kernels = str(load["kernels"])
    return {"auto": "native", "reference": "torch"}.get(kernels, kernels)


def is_old(result: BenchResult) -> bool:
    """Return whether a result is older than the default operators of today for its model."""
    since = GGUF_SINCE if _model_of(result).endswith(".gguf") else OPERATORS_SINCE
    return result.date < since or operators_of(result) == "torch"


def _model_of(result: BenchResult) -> str:
    """Return the model that a result was measured with; empty if it is not recorded."""
    load: Any = result.config.get("load", {})
    return str(result.config.get("model") or load.get("model") or "")


def _said_at_start(result: BenchResult) -> str:
    """Return the startup lines of our engine."""
    lines: Any = result.results.get("startup", ())
    engines: Mapping[str, Any] = result.results.get("engines", {})
    about = engines.get("twostroke", {}).get("about", {})
    return "\n".join([*lines, about.get("startup", "")])


_WALL = "wall time, exponential, {} slots: static / continuous"
_STEPS = "slot-steps, exponential, {} slots: static / continuous"
_TTFT = "{}: mean TTFT without / with the cache, within 5 points"
_SLOTS = (4, 8, 16, 32)
_WASTE = (("trace: paged, predicted to the slot", "{:.2%}"), ("trace: contiguous", "{:.1%}"))


def _offline(name: str, what: str) -> tuple[TableRow, ...]:
    return tuple(
        TableRow(f"{what}, batch {batch}: tokens/s", f"{name}-batch{batch}", (tokens_per_s,)) for batch in (1, 8, 32)
    )


ROWS: tuple[TableRow, ...] = (
    TableRow(
        "batch 1, beside `transformers.generate`",
        "vs-transformers",
        (claim("throughput, batch 1: ours / theirs", "{:.2f}x"),),
    ),
    TableRow(
        "exponential output lengths, beside its static batches of 16: with our default of 64 slots, with 16",
        "vs-transformers",
        (
            claim("throughput, exponential: ours / theirs", "{:.2f}x"),
            claim("throughput, exponential, ours with 16 slots: ours / theirs", "{:.2f}x"),
        ),
    ),
    TableRow(
        "the engine's own time in a step, 1 and 64 requests",
        "engine-time",
        tuple(claim(f"engine's own time a step, {n} requests, median ms", "{:.2f} ms") for n in (1, 64)),
    ),
    claims_row(
        "continuous against static batching, exponential lengths, 4 / 8 / 16 / 32 slots, in slot-steps",
        "r1",
        *(_STEPS.format(n) for n in _SLOTS),
        is_counted=True,
    ),
    claims_row("the same in wall time, from measured t(live rows)", "r1", *(_WALL.format(n) for n in _SLOTS)),
    claims_row(
        "one long request and nine short ones: useful slot-steps of a static batch",
        "r2",
        "useful slot-steps, static",
        form="{:.1%}",
        is_counted=True,
    ),
    TableRow(
        "KV slots that hold nothing: paged, contiguous",
        "r3",
        tuple(claim(what, form) for what, form in _WASTE),
        tuple(predicted(what, form) for what, form in _WASTE),
        is_counted=True,
    ),
    claims_row(
        "requests at once in equal KV memory, paged against contiguous",
        "r4",
        "trace: running at once, paged / contiguous",
        form="{:.1f}x",
        is_counted=True,
    ),
    TableRow(
        "prefix caching where nothing is shared: time lost",
        "r11",
        (claim("time lost to caching, share", "{:.1%}"),),
        (predicted("time lost to caching, share", "{:.0%}"),),
    ),
    claims_row(
        "prefix caching on a real trace, mean time to the first token: conversation, synthetic",
        "r10",
        *(_TTFT.format(name) for name in ("conversation", "synthetic")),
        form="{:.2f}x",
    ),
    claims_row(
        "token-passes of 500 + 200 tokens without and with a KV cache",
        "r14",
        "token-passes: without / with",
        form="{:.1f}x",
        is_counted=True,
    ),
    claims_row(
        "a prompt of 131,072 tokens beside eight short requests: steps in which one of these waits",
        "long-prompt",
        "of these, steps in which a short request got no token, on the model",
        form="{:.0f}",
        is_counted=True,
    ),
    TableRow(
        "the same: time to the long prompt's first token, largest memory beyond its KV and one chunk",
        "long-prompt",
        (
            claim("TTFT of the long prompt, s", "{:.0f} s"),
            claim("peak memory beyond KV and what a single chunk took, MiB", "{:.0f} MiB"),
        ),
    ),
    TableRow(
        "the server beside the offline API, 64 streams, one model thread",
        "server-throughput",
        (claim("throughput, one model thread: server / offline", "{:.2f}x"),),
    ),
    TableRow(
        "from a token's sample to its event at the client, 64 streams, p99",
        "server-throughput",
        (claim("event at the client after its sample, p99 ms", "{:.1f} ms"),),
    ),
    TableRow(
        "SmolLM2-135M-Instruct Q4_1, `serve` beside llama-server, 32 streams: output tokens/s, ours / theirs",
        "servers-SmolLM2-135M-Instruct.Q4_1.gguf",
        (at("ratios", "llama-server", form="{:.2f}x"),),
    ),
    *_offline("qwen3-0.6b-bf16", "Qwen3-0.6B's shape (random weights), bf16"),
    *_offline("qwen3-0.6b-int8", "the same, 8-bit weights"),
    *_offline("qwen3-0.6b-int4", "the same, 4-bit weights"),
)
"""Rows of the first table."""

COMPARED: tuple[tuple[str, str], ...] = (
    ("SmolLM2-135M-Instruct, Q4_1", "compare-SmolLM2-135M-Instruct.Q4_1"),
    ("the same, with AVX-512", "compare-avx512-SmolLM2-135M-Instruct.Q4_1"),
    ("Qwen2.5-Coder-1.5B, Q4_K_M", "compare-Qwen2.5-Coder-1.5B.Q4_K_M"),
    ("the same, with AVX-512", "compare-avx512-Qwen2.5-Coder-1.5B.Q4_K_M"),
    ("the same on a processor with AVX2 alone", "compare-avx2-Qwen2.5-Coder-1.5B.Q4_K_M"),
    ("Gemma 3 270M, Q4_K_M", "compare-gemma-3-270m.Q4_K_M"),
    ("the same, with AVX-512", "compare-avx512-gemma-3-270m.Q4_K_M"),
    ("Qwen3-0.6B's shape, bf16", "compare-qwen3-bf16"),
    ("the same, with AVX-512", "compare-avx512-qwen3-bf16"),
    ("Qwen3-0.6B's shape, 8 bits", "compare-qwen3-int8"),
    ("the same, with AVX-512", "compare-avx512-qwen3-int8"),
    ("Qwen3-0.6B's shape, 4 bits", "compare-qwen3-int4"),
    ("the same, with AVX-512", "compare-avx512-qwen3-int4"),
    ("Qwen3-0.6B's shape, Q4_K, with AVX-512", "compare-avx512-qwen3-0.6b.Q4_K"),
    ("Qwen3-0.6B's shape, 4 bits, `--activation-quantization none`", "compare-qwen3-int4-activations-none"),
    ("Llama-3.2-1B's shape, 8 bits", "compare-llama1b-int8"),
    ("A cut of Qwen3-30B-A3B (3 B weights, 0.6 B a token), Q4_K", "compare-qwen3-3b-a0.6b.Q4_K"),
    ("gpt-oss-20b's shape with 4 of its layers, MXFP4", "compare-gpt-oss-4l.MXFP4"),
)
"""Rows of the second table: models, and the results of `benchmarks compare`."""

PEERS = ("llama.cpp", "ik_llama.cpp", "openvino", "vllm")
"""Columns of the second table."""

QUALITY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("SmolLM2-135M-Instruct, Q4_1", ("quality-smollm2", "quality-kv-smollm2")),
    ("Qwen2.5-Coder-1.5B, Q4_K_M", ("quality-qwen-coder",)),
    ("Gemma 3 270M, Q4_K_M", ("quality-gemma3-270m", "quality-kv-gemma3-270m")),
)
"""Rows of the third table: models, and results of `bench quality`; if two results have a figure, the later one
counts."""

QUALITY_ROWS: tuple[tuple[str, str], ...] = (
    ("base", "ours"),
    ("activation_quantization=none", "ours, `--activation-quantization none`"),
    ("llama.cpp", "llama.cpp"),
    ("kv_cache_dtype=int8", "ours, KV in int8"),
    ("llama.cpp, KV q8_0", "llama.cpp, KV in q8_0"),
    ("kv_cache_dtype=int4", "ours, KV in int4"),
    ("llama.cpp, KV q4_0", "llama.cpp, KV in q4_0"),
)

QUALITY_FIGURES = (
    at("mean_kl", form="{:.4f}"),
    at("max_kl", form="{:.2f}"),
    at("top1_agreement", form="{:.1%}"),
    at("perplexity", form="{:,.3f}"),
    at("float32_perplexity", form="{:.3f}"),
)
