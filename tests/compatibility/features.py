"""The features that are combined, each as what it changes: settings of the engine, the model, or the requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from itertools import combinations
from typing import Any, NamedTuple

Settings = Mapping[str, Any]


class Sign(StrEnum):
    """Sign of a feature that must be seen in a run: a feature that is silently omitted changes no token, either."""

    CHUNKS = auto()
    WHOLE_PROMPTS = auto()
    STATIC = auto()
    PREFILL_FIRST = auto()
    PRIORITY = auto()
    FAIR = auto()
    LIMIT = auto()
    AHEAD = auto()
    GIVES_WAY = auto()
    CACHE_HITS = auto()
    PREEMPTIONS = auto()
    CONTIGUOUS = auto()
    RECOMPUTED = auto()
    CHECKS = auto()
    BROUGHT_BACK = auto()
    KV_FORMAT = auto()
    DRAFTS = auto()
    SEVERAL_ANSWERS = auto()
    PROMPT_SCORES = auto()
    HIDDEN_STATES = auto()
    RESUMED = auto()
    HANDED_OVER = auto()
    CONVERTED = auto()
    SHARES = auto()
    OTHER_NUMBERS = auto()
    """The answers are not those of the engine without it."""


TIGHT_POOL = "tight"
"""Of `num_kv_blocks`: what holds the longest request, and no second one."""


@dataclass(frozen=True, eq=False)
class Feature:
    """Feature with a row and a column of the table; two features are equal only if they are the same object."""

    name: str
    how: str
    """What switches it on."""
    sign: Sign
    settings: Settings = field(default_factory=dict[str, Any])
    """Of the engine: what the feature is. Two that set one of these differently exclude each other."""
    needs: Settings = field(default_factory=dict[str, Any])
    """Further settings that it is tried with; those of the other feature go before."""
    asks: Settings = field(default_factory=dict[str, Any])
    """SamplingParams of every second request."""
    changes_answers: bool = False
    """The engine to compare with has it, too."""
    may_drift: bool = False
    """Whether several numerics make the answers: none are compared with those of one engine."""

    def excludes(self, other: Feature) -> bool:
        """Return whether the features are two values of one setting."""
        return any(other.settings.get(name, value) != value for name, value in self.settings.items())


def drafts(method: str, num_drafts: int, **given: Any) -> Settings:
    """Return a drafting method with a fixed number of drafts: the gate would draft nothing in so short a run."""
    return {"speculative_config": {"method": method, "num_speculative_tokens": num_drafts, **given}}


_WITHOUT_CACHE = {"enable_prefix_caching": False}
SCHEDULE = (
    Feature(
        "chunked prefill",
        "--max-num-batched-tokens",
        Sign.CHUNKS,
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 7},
    ),
    Feature(
        "whole prompts",
        "--no-enable-chunked-prefill",
        Sign.WHOLE_PROMPTS,
        {"enable_chunked_prefill": False},
        {"max_num_batched_tokens": 16},
    ),
    Feature("static batching", "--batching static", Sign.STATIC, {"batching": "static"}, {"max_num_seqs": 3}),
    Feature("prefill first", "--mixing prefill_first", Sign.PREFILL_FIRST, {"mixing": "prefill_first"}),
    Feature("priority", "--policy priority", Sign.PRIORITY, {"policy": "priority"}, {"max_num_seqs": 2}),
    Feature("fair queue", "--policy fair", Sign.FAIR, {"policy": "fair"}, {"max_num_seqs": 2}),
    Feature("limit of time", "--itl-slo", Sign.LIMIT, {"itl_slo": "1ms"}),
    Feature("steps ahead", "--async-scheduling", Sign.AHEAD, {"async_scheduling": True}),
)
MEMORY = (
    Feature("prefix caching", "--enable-prefix-caching", Sign.CACHE_HITS, {"enable_prefix_caching": True}),
    Feature("preemption", "--num-kv-blocks", Sign.PREEMPTIONS, {"num_kv_blocks": TIGHT_POOL}, {"max_num_seqs": 4}),
    Feature(
        "contiguous KV",
        "--kv-reservation contiguous",
        Sign.CONTIGUOUS,
        {"kv_reservation": "contiguous"},
        _WITHOUT_CACHE,
    ),
    Feature(
        "no KV cache",
        "--no-enable-kv-cache",
        Sign.RECOMPUTED,
        {"enable_kv_cache": False},
        {**_WITHOUT_CACHE, "enable_chunked_prefill": False},
    ),
    Feature("KV checks", "--kv-check-rate", Sign.CHECKS, {"kv_check_rate": 1.0}),
    Feature(
        "KV in host memory",
        "--kv-offloading-size",
        Sign.BROUGHT_BACK,
        {"kv_offloading_size": 1 << 22},
        {"num_kv_blocks": TIGHT_POOL},
    ),
    *(
        Feature(f"KV in {kv}", f"--kv-cache-dtype {kv}", Sign.KV_FORMAT, {"kv_cache_dtype": kv}, changes_answers=True)
        for kv in ("bf16", "int8", "int4")
    ),
    Feature(
        "KV in fp8",
        "--kv-cache-dtype fp8, not on the native kernels",
        Sign.KV_FORMAT,
        {"kv_cache_dtype": "fp8", "kernels": "reference"},
        changes_answers=True,
    ),
)
WEIGHTS = (
    Feature("bfloat16", "--dtype bfloat16", Sign.OTHER_NUMBERS, {"dtype": "bfloat16"}, changes_answers=True),
    *(
        Feature(
            f"{bits} weights",
            f"--quantization {bits}",
            Sign.OTHER_NUMBERS,
            {"quantization": bits},
            changes_answers=True,
        )
        for bits in ("int8", "int4")
    ),
    Feature(
        "fp8 weights",
        "--quantization fp8, not on the native kernels",
        Sign.OTHER_NUMBERS,
        {"quantization": "fp8", "kernels": "reference"},
        changes_answers=True,
    ),
    Feature(
        "quantized checkpoint",
        "one of compressed-tensors; AWQ and GPTQ take the same form",
        Sign.OTHER_NUMBERS,
        {"model": "tiny-llama-int4"},
        changes_answers=True,
    ),
    Feature("GGUF", "a GGUF file, Q8_0", Sign.OTHER_NUMBERS, {"model": "tiny-llama.gguf"}, changes_answers=True),
    Feature(
        "torch's operators", "--kernels reference", Sign.OTHER_NUMBERS, {"kernels": "reference"}, changes_answers=True
    ),
)
DRAFTS = (
    Feature("drafts: ngram", "--speculative-config", Sign.DRAFTS, drafts("ngram", 3, prompt_lookup_min=1)),
    Feature(
        "drafts: draft model",
        "--speculative-config",
        Sign.DRAFTS,
        drafts("draft_model", 3, model="itself"),
    ),
    Feature("drafts: early exit", "--speculative-config", Sign.DRAFTS, drafts("early_exit", 3, exit_layer=2)),
    Feature("drafts: Medusa", "--speculative-config", Sign.DRAFTS, drafts("medusa", 3, model="medusa")),
    Feature("drafts: Medusa's branches", "--speculative-config", Sign.DRAFTS, drafts("medusa", 10, model="medusa")),
    Feature("drafts: EAGLE", "--speculative-config", Sign.DRAFTS, drafts("eagle", 3, model="eagle")),
)
MODELS = (
    Feature("Mistral", "windows in all layers", Sign.OTHER_NUMBERS, {"model": "tiny-mistral"}, changes_answers=True),
    Feature("Qwen2", "windows in some layers", Sign.OTHER_NUMBERS, {"model": "tiny-qwen2"}, changes_answers=True),
    Feature("Qwen3", "norms of queries and keys", Sign.OTHER_NUMBERS, {"model": "tiny-qwen3"}, changes_answers=True),
)
EMBEDDING = Feature("embeddings", "`/v1/embeddings`", Sign.HIDDEN_STATES, changes_answers=True)
RESUMPTION = Feature("resumption", "a worker dies, or a stream goes on elsewhere", Sign.RESUMED)
BACKGROUND = Feature("background work", '`"service_tier": "flex"`', Sign.GIVES_WAY, needs={"max_num_seqs": 2})
REQUESTS = (
    Feature(
        "structured outputs",
        "`structured_outputs`",
        Sign.OTHER_NUMBERS,
        asks={"structured_outputs": {"regex": "[a-f]{5,30}[0-9]+x"}},
        changes_answers=True,
    ),
    Feature("several answers", "`n`", Sign.SEVERAL_ANSWERS, asks={"n": 3}, changes_answers=True),
    Feature(
        "prompt log-probabilities",
        "`prompt_logprobs`",
        Sign.PROMPT_SCORES,
        asks={"prompt_logprobs": 1},
        changes_answers=True,
    ),
    EMBEDDING,
    RESUMPTION,
    BACKGROUND,
)
POOLS = Feature("two pools", "--prefill 1 --decode 1", Sign.HANDED_OVER)
POOLS_OF_FORMATS = Feature(
    "pools of two KV formats",
    """--prefill-config '{"kv_cache_dtype": "int8"}' --allow-numeric-drift""",
    Sign.CONVERTED,
    may_drift=True,
)
PROCESSES = (
    Feature("tensor parallelism", "--tensor-parallel-size 2", Sign.SHARES, {"tensor_parallel_size": 2}),
    POOLS,
    POOLS_OF_FORMATS,
)

GROUPS: Mapping[str, tuple[Feature, ...]] = {
    "steps": SCHEDULE,
    "memory": MEMORY,
    "weights": WEIGHTS,
    "drafts": DRAFTS,
    "models": MODELS,
    "requests": REQUESTS,
    "processes": PROCESSES,
}
FEATURES = tuple(feature for group in GROUPS.values() for feature in group)


class Pair(NamedTuple):
    """Two features, in the order of the table."""

    one: Feature
    other: Feature

    @property
    def names(self) -> frozenset[str]:
        """Return the names of both features, unordered."""
        return frozenset((self.one.name, self.other.name))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of both features. A feature's own settings precede those that the other needs."""
        return {**self.one.needs, **self.other.needs, **self.one.settings, **self.other.settings}


PAIRS = tuple(Pair(*pair) for pair in combinations(FEATURES, 2) if not pair[0].excludes(pair[1]))
"""All of them but those that are two values of one setting."""
