"""The rows of the tables. A new row is a line here and a JSON under benchmarks/results."""

from __future__ import annotations

from benchmarks.measured.values import Row, at, claim, predicted, tokens_per_s

_WALL = "wall time, exponential, {} slots: static / continuous"
_STEPS = "slot-steps, exponential, {} slots: static / continuous"
_TTFT = "{}: mean TTFT without / with the cache, within 5 points"
_SLOTS = (4, 8, 16, 32)


def _offline(name: str, what: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{what}, batch {batch}: tokens/s", f"{name}-batch{batch}", (tokens_per_s(),)) for batch in (1, 8, 32)
    )


ROWS: tuple[Row, ...] = (
    Row(
        "batch 1, beside `transformers.generate`",
        "vs-transformers",
        (claim("throughput, batch 1: ours / theirs", "{:.2f}x"),),
    ),
    Row(
        "exponential output lengths, beside its static batches of 16: with our default of 64 slots, with 16",
        "vs-transformers",
        (
            claim("throughput, exponential: ours / theirs", "{:.2f}x"),
            claim("throughput, exponential, ours with 16 slots: ours / theirs", "{:.2f}x"),
        ),
    ),
    Row(
        "the engine's own time in a step, 1 and 64 requests",
        "engine-time",
        tuple(claim(f"engine's own time a step, {n} requests, median ms", "{:.2f} ms") for n in (1, 64)),
    ),
    Row(
        "continuous against static batching, exponential lengths, 4 / 8 / 16 / 32 slots, in slot-steps",
        "r1",
        tuple(claim(_STEPS.format(n)) for n in _SLOTS),
        tuple(predicted(_STEPS.format(n)) for n in _SLOTS),
        is_counted=True,
    ),
    Row(
        "the same in wall time, from measured t(live rows)",
        "r1",
        tuple(claim(_WALL.format(n)) for n in _SLOTS),
        tuple(predicted(_WALL.format(n)) for n in _SLOTS),
    ),
    Row(
        "one long request and nine short ones: useful slot-steps of a static batch",
        "r2",
        (claim("useful slot-steps, static", "{:.1%}"),),
        (predicted("useful slot-steps, static", "{:.1%}"),),
        is_counted=True,
    ),
    Row(
        "KV slots that hold nothing: paged, contiguous",
        "r3",
        (
            claim("trace: paged, predicted to the slot", "{:.2%}"),
            claim("trace: contiguous", "{:.1%}"),
        ),
        (
            predicted("trace: paged, predicted to the slot", "{:.2%}"),
            predicted("trace: contiguous", "{:.1%}"),
        ),
        is_counted=True,
    ),
    Row(
        "requests at once in equal KV memory, paged against contiguous",
        "r4",
        (claim("trace: running at once, paged / contiguous", "{:.1f}x"),),
        (predicted("trace: running at once, paged / contiguous", "{:.1f}x"),),
        is_counted=True,
    ),
    Row(
        "prefix caching where nothing is shared: time lost",
        "r11",
        (claim("time lost to caching, share", "{:.1%}"),),
        (predicted("time lost to caching, share", "{:.0%}"),),
    ),
    Row(
        "prefix caching on a real trace, mean time to the first token: conversation, synthetic",
        "r10",
        tuple(claim(_TTFT.format(name), "{:.2f}x") for name in ("conversation", "synthetic")),
        tuple(predicted(_TTFT.format(name), "{:.2f}x") for name in ("conversation", "synthetic")),
    ),
    Row(
        "token-passes of 500 + 200 tokens without and with a KV cache",
        "r14",
        (claim("token-passes: without / with", "{:.1f}x"),),
        (predicted("token-passes: without / with", "{:.1f}x"),),
        is_counted=True,
    ),
    Row(
        "a prompt of 131,072 tokens beside eight short requests: steps in which one of these waits",
        "long-prompt",
        (claim("of these, steps in which a short request got no token, on the model", "{:.0f}"),),
        (predicted("of these, steps in which a short request got no token, on the model", "{:.0f}"),),
        is_counted=True,
    ),
    Row(
        "the same: time to the long prompt's first token, largest memory beyond its KV and one chunk",
        "long-prompt",
        (
            claim("TTFT of the long prompt, s", "{:.0f} s"),
            claim("peak memory beyond KV and what a single chunk took, MiB", "{:.0f} MiB"),
        ),
    ),
    Row(
        "the server beside the offline API, 64 streams, one model thread",
        "server-throughput",
        (claim("throughput, one model thread: server / offline", "{:.2f}x"),),
    ),
    Row(
        "from a token's sample to its event at the client, 64 streams, p99",
        "server-throughput",
        (claim("event at the client after its sample, p99 ms", "{:.1f} ms"),),
    ),
    *_offline("qwen3-0.6b-bf16", "Qwen3-0.6B's shape (random weights), bf16"),
    *_offline("qwen3-0.6b-int8", "the same, 8-bit weights"),
    *_offline("qwen3-0.6b-int4", "the same, 4-bit weights"),
)
"""Rows of the first table."""

COMPARED: tuple[tuple[str, str], ...] = (
    ("SmolLM2-135M-Instruct, Q4_1", "compare-SmolLM2-135M-Instruct.Q4_1"),
    ("Qwen2.5-Coder-1.5B, Q4_K_M", "compare-Qwen2.5-Coder-1.5B.Q4_K_M"),
    ("the same on a processor with AVX2 alone", "compare-avx2-Qwen2.5-Coder-1.5B.Q4_K_M"),
    ("Gemma 3 270M, Q4_K_M", "compare-gemma-3-270m.Q4_K_M"),
    ("Qwen3-0.6B's shape, bf16", "compare-qwen3-bf16"),
    ("the same, 8 bits", "compare-qwen3-int8"),
    ("the same, 4 bits", "compare-qwen3-int4"),
    ("the same, `--activation-quantization none`", "compare-qwen3-int4-activations-none"),
    ("Llama-3.2-1B's shape, 8 bits", "compare-llama1b-int8"),
)
"""Rows of the second table: models, and the results of `benchmarks compare`."""

PEERS = ("llama.cpp", "ik_llama.cpp", "openvino", "vllm")
"""Columns of the second table."""

QUALITY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("SmolLM2-135M-Instruct, Q4_1", ("quality-smollm2", "quality-kv-smollm2")),
    ("Qwen2.5-Coder-1.5B, Q4_K_M", ("quality-qwen-coder", "quality-kv-qwen-coder")),
    ("Gemma 3 270M, Q4_K_M", ("quality-gemma3-270m", "quality-kv-gemma3-270m")),
)
"""Rows of the third table: models, and results of `bench quality`; what a later one measured again is taken from it."""

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
