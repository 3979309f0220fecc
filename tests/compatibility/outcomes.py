"""Outcomes of pairs that do not simply work: refused pairs, and pairs in which one feature has nothing to do.

All other pairs start with both features and give the tokens and log-probabilities of the reference engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compatibility.features import DRAFTS, Pair

_POOLS = ("two pools", "pools of two KV formats")
_DRAFTS = tuple(feature.name for feature in DRAFTS)


@dataclass(frozen=True)
class Refusal:
    """Message of an engine that refuses to start with both features."""

    text: str
    pairs: tuple[tuple[str, str], ...]


def _split_drafts() -> Iterator[Refusal]:
    by_method = {str(f.settings["speculative_config"]["method"]): list[str]() for f in DRAFTS}
    for feature in DRAFTS:
        by_method[feature.settings["speculative_config"]["method"]].append(feature.name)
    for method, names in by_method.items():
        no_cache = "Leave it out, or leave the KV cache on."
        yield Refusal(
            f"speculative_config.method={method!r}: needs the KV cache. {no_cache}",
            tuple(("no KV cache", name) for name in names),
        )
        if method != "ngram":
            yield Refusal(
                f"tensor_parallel_size=2: the drafts of {method} come from one rank so far. "
                'Take "ngram", or leave one out.',
                tuple((name, "tensor parallelism") for name in names),
            )


REFUSALS = (
    Refusal(
        "async_scheduling=true: drafting needs the tokens of the previous step. Leave one of them out.",
        tuple(("steps ahead", name) for name in _DRAFTS),
    ),
    Refusal(
        "async_scheduling=true: tensor_parallel_size=2: ranks compute one step after the other. Leave one of them out.",
        (("steps ahead", "tensor parallelism"),),
    ),
    Refusal(
        "enable_chunked_prefill=true: needs the KV cache. Switch it off as well (--no-enable-chunked-prefill).",
        (("chunked prefill", "no KV cache"),),
    ),
    Refusal(
        "enable_prefix_caching=true: needs the KV cache. Switch it off as well (--no-enable-prefix-caching).",
        (("prefix caching", "no KV cache"),),
    ),
    Refusal(
        "enable_prefix_caching=true: needs kv_reservation paged. Switch it off as well (--no-enable-prefix-caching).",
        (("prefix caching", "contiguous KV"),),
    ),
    Refusal(
        "itl_slo='1ms': needs chunked prefill, mixed with decodes. Leave it out, or leave these on.",
        (("whole prompts", "limit of time"), ("prefill first", "limit of time"), ("limit of time", "no KV cache")),
    ),
    Refusal(
        "service_tier='flex': needs chunked prefill and continuous batches that mix prefill and decode; "
        "this engine has them off. Leave it out.",
        tuple(
            (name, "background work") for name in ("whole prompts", "static batching", "prefill first", "no KV cache")
        ),
    ),
    Refusal(
        "kv_check_rate=1.0: checks hits of the prefix cache. Leave it out, or leave the prefix cache on.",
        (("contiguous KV", "KV checks"), ("no KV cache", "KV checks")),
    ),
    *(
        Refusal(
            f"quantization={bits}: {model} is quantized already ({method}). Leave it out.",
            ((f"{bits} weights", name),),
        )
        for bits in ("int8", "int4", "fp8")
        for name, model, method in (
            ("quantized checkpoint", "tiny-llama-int4", "compressed-tensors"),
            ("GGUF", "tiny-llama.gguf", "gguf"),
        )
    ),
    *_split_drafts(),
    Refusal(
        "tensor_parallel_size=2: kv_check_rate=1.0: a cached block is compared on one rank so far. "
        "Leave one of them out.",
        (("KV checks", "tensor parallelism"),),
    ),
    Refusal(
        "tensor_parallel_size=2: with kernels=reference and float32, bits may depend on a matrix's number of rows. "
        "Take the native kernels (--kernels auto, --dtype float32 or bfloat16), or leave it out.",
        tuple((name, "tensor parallelism") for name in ("KV in fp8", "fp8 weights", "torch's operators")),
    ),
    Refusal(
        "kv_offloading_size=4194304: extends the prefix cache. Leave it out, or leave the prefix cache on.",
        (("contiguous KV", "KV in host memory"), ("no KV cache", "KV in host memory")),
    ),
    Refusal(
        "kv_offloading_size=4194304: does not go with prefill processes. Leave it out, or serve with one process.",
        tuple(("KV in host memory", pools) for pools in _POOLS),
    ),
    Refusal(
        "enable_prefix_caching=false: KV is handed over through the prefix cache. "
        "Leave the prefix cache on, or leave --prefill out.",
        tuple((name, pools) for name in ("contiguous KV", "no KV cache") for pools in _POOLS),
    ),
    Refusal(
        "kv_check_rate=1.0: does not go with prefill processes. Leave --kv-check-rate or --prefill out.",
        tuple(("KV checks", pools) for pools in _POOLS),
    ),
)


@dataclass(frozen=True)
class Idle:
    """Feature of a pair that has nothing to do beside the other."""

    name: str
    beside: str
    why: str
    seldom: bool = False
    """Whether the feature sometimes has an effect, depending on times that no test controls: of a KV transfer, or of a
    step that bounds background work."""


IDLE = (
    Idle(
        "KV in host memory",
        "embeddings",
        "In this test prompts end after one step, so the prefix that two requests share is not evicted.",
    ),
    Idle(
        "KV in host memory",
        "background work",
        "In this test one of two requests with a common prefix may wait; it then finds the other one's blocks.",
        seldom=True,
    ),
    Idle("preemption", "contiguous KV", "An admitted request has all the blocks that it will ever need."),
    *(
        Idle(
            "preemption",
            pools,
            "KV is fetched only if the longest request still fits beside it, so few requests are seldom preempted.",
            seldom=True,
        )
        for pools in _POOLS
    ),
    Idle("pools of two KV formats", "KV in int8", "In this test both pools have int8."),
    *(
        Idle("torch's operators", name, "On a CPU, torch's operators serve fp8 in any case.")
        for name in ("KV in fp8", "fp8 weights")
    ),
)

_REFUSED: Mapping[frozenset[str], str] = {
    frozenset(pair): refusal.text for refusal in REFUSALS for pair in refusal.pairs
}
_IDLE: Mapping[frozenset[str], Idle] = {frozenset((idle.name, idle.beside)): idle for idle in IDLE}


def refusal_of(pair: Pair) -> str | None:
    """Return the refusal at start; None if both features start."""
    return _REFUSED.get(pair.names)


def idle_of(pair: Pair) -> Idle | None:
    """Return the feature that has nothing to do; None if both have to be seen."""
    return _IDLE.get(pair.names)


def named_pairs() -> list[frozenset[str]]:
    """Return all pairs of the table, with duplicates."""
    return [frozenset(pair) for refusal in REFUSALS for pair in refusal.pairs] + [
        frozenset((idle.name, idle.beside)) for idle in IDLE
    ]
