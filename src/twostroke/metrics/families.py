"""Definitions of all metrics, used for the exposition and for docs/metrics.md.

Names, units and labels are those of vLLM (0.33) where it has the metric, with our own prefix. A dashboard made for
vLLM needs one substitution, or none with `--metrics-compat vllm`. Bucket bounds are also vLLM's, with finer ones
below for models that answer in milliseconds.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

OTHER_LABEL = "(others)"
"""Label value shared by all without a series of their own; no tenant can have this name."""


class Kind(StrEnum):
    """Prometheus metric type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CountedBy(StrEnum):
    """The part of a server that counts a metric."""

    ENGINE = "engine"
    """Each engine, from its events."""
    GATEWAY = "gateway"
    """The gateway of pools."""
    SERVER = "server"
    """The HTTP side, with all engines in view."""


@dataclass(frozen=True, slots=True)
class Family:
    """Definition of a metric; its name has no prefix and, for a counter, no `_total`."""

    kind: Kind
    name: str
    help: str
    _: KW_ONLY
    labels: tuple[str, ...] = ()
    """Labels besides model_name and engine."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; +Inf follows implicitly."""
    in_vllm: bool = True
    """Whether vLLM has the metric under this name."""
    sglang: str | None = None
    """Name of the metric in SGLang (0.5.23)."""
    counted_by: CountedBy = CountedBy.ENGINE


_counter = partial(Family, Kind.COUNTER)
_gauge = partial(Family, Kind.GAUGE)


def _histogram(name: str, bounds: tuple[float, ...], help: str, **more: Any) -> Family:
    return Family(Kind.HISTOGRAM, name, help, bounds=bounds, **more)


def _one_two_five(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, … up to `most`."""
    bounds = [factor * 10.0**power for power in range(len(str(most))) for factor in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= most)


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(bound) for bound in text.split())


_TTFT = _bounds(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
_TOKEN = _bounds(".001 .002 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
_REQUEST = _bounds(".01 .02 .05 .1 .2 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_STEP_TOKENS = (1.0, *(2.0**power for power in range(3, 15)))
_NUM_TOKENS = _one_two_five(1_000_000)

# ---------------------------------------------------------------------- now

NUM_REQUESTS_RUNNING = _gauge(
    "num_requests_running", "Sequences that are admitted and hold KV blocks.", sglang="num_running_reqs"
)
NUM_REQUESTS_WAITING = _gauge(
    "num_requests_waiting", "Sequences in the queue, including preempted ones.", sglang="num_queue_reqs"
)
NUM_REQUESTS_WAITING_BY_REASON = _gauge(
    "num_requests_waiting_by_reason",
    "Waiting sequences by the resource that the head of the queue waits for: 'slots' (max_num_seqs), 'tokens' "
    "(max_num_batched_tokens) or 'kv' (blocks). 'step' counts those that arrived since the last step was decided.",
    labels=("reason",),
)
KV_CACHE_USAGE = _gauge(
    "kv_cache_usage_perc",
    "Share of the KV blocks held by running requests, 0 to 1, when the last step was decided; 0 without requests. "
    "Cached blocks that no request holds count as free; blocks out of use are excluded.",
    sglang="token_usage",
)
CACHE_CONFIG_INFO = _gauge(
    "cache_config_info",
    "Always 1; its labels describe the KV cache. num_gpu_blocks is the number of blocks on any device.",
    labels=("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
)

KV_QUARANTINED_BLOCKS = _gauge(
    "kv_quarantined_blocks", "KV blocks out of use because a check found them corrupt.", in_vllm=False
)
KV_LARGEST_NUMERIC_DIFFERENCE = _gauge(
    "kv_largest_numeric_difference",
    "Largest difference that a check found and attributed to numerics, relative to the largest value of its vector (a "
    "token's K or V in one head). Expected: 0.",
    in_vllm=False,
)

# ---------------------------------------------------------------------- since the start

PROMPT_TOKENS = _counter(
    "prompt_tokens",
    "Prompt tokens of sequences that have their first token, including cached ones.",
    sglang="prompt_tokens",
)
PROMPT_TOKENS_CACHED = _counter(
    "prompt_tokens_cached", "Part of prompt_tokens whose KV came from the prefix cache.", sglang="cached_tokens"
)
GENERATION_TOKENS = _counter(
    "generation_tokens",
    "Tokens generated, including those after a stop string and those of aborted requests.",
    sglang="generation_tokens",
)
REQUEST_SUCCESS = _counter(
    "request_success",
    "Sequences that ended: 'stop', 'length', 'abort' (by the caller) or 'error' (in the server). A sequence whose last "
    "allowed token completes a stop string counts as 'length', since the engine sees no text.",
    labels=("finished_reason",),
)
SLO_REQUESTS = _counter(
    "slo_requests",
    "Ended sequences with at least one token, by limit: 'ttft' (--ttft-slo), 'itl' (--itl-slo, kept by 99 of 100 "
    "gaps) and 'all' of these. The rate with limit 'all' and kept 'true' is the goodput.",
    labels=("limit", "kept"),
    in_vllm=False,
)
NUM_PREEMPTIONS = _counter(
    "num_preemptions",
    "Preemptions: a sequence released its KV blocks and recomputes its tokens later.",
    sglang="num_retracted_requests",
)
SPEC_DECODE_NUM_DRAFTS = _counter("spec_decode_num_drafts", "Passes that verified draft tokens, counted per sequence.")
SPEC_DECODE_NUM_DRAFT_TOKENS = _counter(
    "spec_decode_num_draft_tokens", "Draft tokens that were verified; for tree drafts, those of the longest path."
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS = _counter(
    "spec_decode_num_accepted_tokens",
    "Draft tokens that the target accepted; they are part of the output.",
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS = _counter(
    "spec_decode_num_accepted_tokens_per_pos",
    "Accepted draft tokens by their position in the draft, from 0.",
    labels=("position",),
)
SPEC_DECODE_DECISIONS = _counter(
    "spec_decode_decisions",
    "Steps by the decision whether to draft (num_speculative_tokens 'auto'): 'pays' (more tokens per second than "
    "without drafts), 'does not pay', 'probe' (one request drafts, though drafts recently did not pay), 'owes' (no "
    "drafts until the time that earlier drafts lost is made up) or 'unknown' (steps of this size are first timed "
    "without drafts).",
    labels=("reason",),
    in_vllm=False,
)
PREFIX_CACHE_QUERIES = _counter(
    "prefix_cache_queries",
    "Tokens looked up in the prefix cache, when sequences were first admitted.",
)
PREFIX_CACHE_HITS = _counter("prefix_cache_hits", "Part of prefix_cache_queries that was found.")
KV_OFFLOADED_BLOCKS = _counter(
    "kv_offloaded_blocks",
    "KV blocks moved to or from host memory (--kv-offloading-size): 'stored' when their device memory was needed, "
    "'loaded' with the step that reads them, 'prefetched' while other requests' steps run.",
    labels=("move",),
    in_vllm=False,
)
KV_CHECKS = _counter(
    "kv_checks",
    "Cached blocks that were recomputed and compared (--kv-check-rate): 'exact' (every byte is equal), 'numerics' "
    "(the difference can come from rounding) or 'corruption' (it is larger).",
    labels=("verdict",),
    in_vllm=False,
)
KV_CHECK_SECONDS = _counter("kv_check_seconds", "Seconds spent on KV checks, between the steps.", in_vllm=False)
ENGINE_STEPS = _counter("engine_steps", "Steps whose results were committed.", in_vllm=False)
ENGINE_STARTS = _counter(
    "engine_starts",
    "Starts of the engine; more than 1 means that it was restarted.",
    in_vllm=False,
)

# ---------------------------------------------------------------------- latencies

_WITH_TOKEN = "For sequences with at least one token; observed when they end."

TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    _TTFT,
    "TTFT: from the arrival (the server has read the whole request) to the result of the step that generated the "
    "first token. Observed at that token.",
    sglang="time_to_first_token_seconds",
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds",
    _TOKEN,
    "ITL: a step that gives a sequence m tokens, a gap after its previous tokens, adds m observations of gap/m. "
    "The first step with tokens adds none.",
    sglang="inter_token_latency_seconds",
)
OUTPUT_GAP = _histogram(
    "output_gap_seconds",
    _TOKEN,
    "Gap between the tokens of two steps, observed once per step: the time without output in the stream. Equal to ITL "
    "unless steps give several tokens.",
    in_vllm=False,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "request_time_per_output_token_seconds",
    _TOKEN,
    f"TPOT: (E2E - TTFT) / (tokens - 1); not observed for a single token. {_WITH_TOKEN}",
    sglang="time_per_output_token_seconds",
)
E2E_LATENCY = _histogram(
    "e2e_request_latency_seconds",
    _REQUEST,
    f"E2E: from the arrival to the last output token, or to the abort. {_WITH_TOKEN}",
    sglang="e2e_request_latency_seconds",
)
QUEUE_TIME = _histogram(
    "request_queue_time_seconds",
    _REQUEST,
    f"From the arrival to the first scheduling: preparation and waiting. {_WITH_TOKEN}",
    sglang="queue_time_seconds",
)
PREFILL_TIME = _histogram(
    "request_prefill_time_seconds", _REQUEST, f"From the first scheduling to the first token. {_WITH_TOKEN}"
)
DECODE_TIME = _histogram(
    "request_decode_time_seconds", _REQUEST, f"From the first token to the end, including preemptions. {_WITH_TOKEN}"
)
INFERENCE_TIME = _histogram(
    "request_inference_time_seconds",
    _REQUEST,
    f"From the first scheduling to the end: prefill and decode. {_WITH_TOKEN}",
)

# ---------------------------------------------------------------------- sizes

REQUEST_PROMPT_TOKENS = _histogram(
    "request_prompt_tokens",
    _NUM_TOKENS,
    "Prompt tokens of each sequence; observed when it ends.",
    sglang="prompt_tokens_histogram",
)
REQUEST_GENERATION_TOKENS = _histogram(
    "request_generation_tokens",
    _NUM_TOKENS,
    "Output tokens of each sequence, without those after its end; observed when it ends.",
    sglang="generation_tokens_histogram",
)
REQUEST_MAX_NUM_GENERATION_TOKENS = _histogram(
    "request_max_num_generation_tokens",
    _NUM_TOKENS,
    "Output tokens of the longest of a request's n sequences; observed when the last of them ends.",
)
REQUEST_PARAMS_N = _histogram(
    "request_params_n", (1.0, 2.0, 5.0, 10.0, 20.0), "n of each request; observed when the last of its sequences ends."
)
REQUEST_PARAMS_MAX_TOKENS = _histogram(
    "request_params_max_tokens",
    _NUM_TOKENS,
    "max_tokens of each request, limited to the remaining context; observed when the last of its sequences ends.",
)
ITERATION_TOKENS = _histogram(
    "iteration_tokens_total", _STEP_TOKENS, "Query tokens of each step: prefill chunks, decodes and drafts."
)

# ---------------------------------------------------------------------- between processes

KV_FETCHED_BYTES = _counter(
    "kv_fetched_bytes",
    "Bytes of KV received from other processes, including those of failed hand-overs.",
    in_vllm=False,
)
KV_HANDOVERS = _counter(
    "kv_handovers",
    "KV hand-overs from prefill processes: 'complete' or 'failed' (the prompt is then recomputed). Reasons: 'no room', "
    "'not wanted' (the request has ended), 'silent' (the other side did not answer in time), 'lease' (its request "
    "ended or was preempted), 'refused' (different numerics) or 'broken'.",
    labels=("outcome", "reason"),
    in_vllm=False,
)
KV_FETCH_SECONDS = _histogram(
    "kv_fetch_seconds",
    _TTFT,
    "From the first to the last byte of a prefix; for part of this time the rest is still being computed.",
    in_vllm=False,
)
SEQUENCES_RESUMED = _counter(
    "sequences_resumed",
    "Sequences that continued in another process because theirs had died; only with pools, where the label `engine` "
    "is 'gateway'.",
    in_vllm=False,
    counted_by=CountedBy.GATEWAY,
)
UPDATES_FENCED = _counter(
    "updates_fenced",
    "Late results of a step that were dropped, because the sequence had continued in another process; only with "
    "pools, where the label `engine` is 'gateway'.",
    in_vllm=False,
    counted_by=CountedBy.GATEWAY,
)

# ---------------------------------------------------------------------- HTTP side

KV_CACHE_USAGE_BY_TENANT = _gauge(
    "kv_cache_usage_perc_by_tenant",
    "Share of the KV blocks held by the running requests of each tenant, 0 to 1. A block shared by several requests "
    "of a tenant counts once. The label is the NAME of --api-key NAME:SECRET, a digest for a key without a name, and "
    "empty without keys. A tenant sees its own name and '(others)'; the admin key sees up to 100 names.",
    labels=("tenant",),
    in_vllm=False,
    counted_by=CountedBy.SERVER,
)
HTTP_RESPONSES = _counter(
    "http_responses",
    "HTTP responses started, by route and status, including rejections before routing (401, 413, 429). The route of "
    "an unknown path is 'other'. It has no label `engine`.",
    labels=("route", "status"),
    in_vllm=False,
    counted_by=CountedBy.SERVER,
)
IGNORED_PARAMS = _counter(
    "ignored_params",
    "Unknown request fields by name; '(others)' from the 101st name on. It has no label `engine`.",
    labels=("field",),
    in_vllm=False,
    counted_by=CountedBy.SERVER,
)

# ---------------------------------------------------------------------- only for SGLang's dashboards

GEN_THROUGHPUT = _gauge(
    "gen_throughput",
    "Tokens generated per second, over the last second of steps; 0 without requests.",
    in_vllm=False,
    sglang="gen_throughput",
)
CACHE_HIT_RATE = _gauge(
    "cache_hit_rate",
    "prefix_cache_hits / prefix_cache_queries of the last 100 admitted sequences.",
    in_vllm=False,
    sglang="cache_hit_rate",
)

FAMILIES: tuple[Family, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Family))
"""All metrics in the order above."""
