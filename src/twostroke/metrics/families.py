"""Every metric of the engine and what it means: one definition of each, for the exposition and docs/metrics.md.

Names, units and labels are vLLM's (0.33) where it has the metric, with a prefix of our own, so that a dashboard made
for vLLM needs one substitution, or none with `--metrics-compat vllm`. Bounds are vLLM's, too, with finer ones below
for models that answer in milliseconds.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

OTHERS = "(others)"
"""Label of all that have no series of their own; no tenant can be called so."""


class Kind(StrEnum):
    """As Prometheus has them."""

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
    """A metric: its name without prefix (and, of a counter, without `_total`), and what it says."""

    kind: Kind
    name: str
    help: str
    _: KW_ONLY
    labels: tuple[str, ...] = ()
    """Labels besides model_name and engine."""
    bounds: tuple[float, ...] = ()
    """Upper ends of a histogram's buckets; the last one, +Inf, is understood."""
    is_vllms: bool = True
    """Whether vLLM has it by this name."""
    sglang: str | None = None
    """What SGLang (0.5.23) calls it."""
    counted_by: CountedBy = CountedBy.ENGINE


_counter = partial(Family, Kind.COUNTER)
_gauge = partial(Family, Kind.GAUGE)


def _histogram(name: str, bounds: tuple[float, ...], help: str, **more: Any) -> Family:
    return Family(Kind.HISTOGRAM, name, help, bounds=bounds, **more)


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to `most`."""
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
    "num_requests_running", "Sequences that hold KV blocks and are computed step by step.", sglang="num_running_reqs"
)
NUM_REQUESTS_WAITING = _gauge(
    "num_requests_waiting", "Sequences in the queue, those that were preempted included.", sglang="num_queue_reqs"
)
NUM_REQUESTS_WAITING_BY_REASON = _gauge(
    "num_requests_waiting_by_reason",
    "The same by what the head of the queue waits for, and with it everybody behind: 'slots' (max_num_seqs), "
    "'tokens' (max_num_batched_tokens), 'kv' (blocks); 'step' are those that came since the last step was decided.",
    labels=("reason",),
)
KV_CACHE_USAGE = _gauge(
    "kv_cache_usage_perc",
    "Share of the KV blocks that running requests hold, 0 to 1, when the last step was decided; 0 when nobody is "
    "there. Cached blocks that nobody holds count as free, those out of use not at all.",
    sglang="token_usage",
)
CACHE_CONFIG_INFO = _gauge(
    "cache_config_info",
    "Always 1; its labels describe the KV cache. Blocks are in this machine's memory, whatever the label's name.",
    labels=("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
)

KV_QUARANTINED_BLOCKS = _gauge(
    "kv_quarantined_blocks", "KV blocks out of use, because a check found that they had gone bad.", is_vllms=False
)
KV_LARGEST_NUMERIC_DIFFERENCE = _gauge(
    "kv_largest_numeric_difference",
    "The largest difference that a check found and put down to numerics, by the largest number of its vector (a "
    "token's K or V in one head). 0 is what there should be.",
    is_vllms=False,
)

# ---------------------------------------------------------------------- since the start

PROMPT_TOKENS = _counter(
    "prompt_tokens",
    "Prompt tokens, cached ones included, of sequences that have their first token.",
    sglang="prompt_tokens",
)
PROMPT_TOKENS_CACHED = _counter(
    "prompt_tokens_cached", "Of prompt_tokens: those whose KV came from the prefix cache.", sglang="cached_tokens"
)
GENERATION_TOKENS = _counter(
    "generation_tokens",
    "Tokens generated, those behind a stop string and those of aborted requests included.",
    sglang="generation_tokens",
)
REQUEST_SUCCESS = _counter(
    "request_success",
    "Sequences that ended: 'stop', 'length', 'abort' (by the caller) or 'error' (ours). One whose last allowed"
    " token completes a stop string is 'length' here: the engine sees no text.",
    labels=("finished_reason",),
)
SLO_REQUESTS = _counter(
    "slo_requests",
    "Sequences that got a token and ended, by the limits that the server was given: 'ttft' (--ttft-slo), 'itl' "
    "(--itl-slo, for 99 of 100 of its tokens) and 'all' of these; the rate of limit 'all', kept 'true' is the goodput.",
    labels=("limit", "kept"),
    is_vllms=False,
)
NUM_PREEMPTIONS = _counter(
    "num_preemptions",
    "Times that a sequence had to give its KV blocks back and compute its tokens again later.",
    sglang="num_retracted_requests",
)
SPEC_DECODE_NUM_DRAFTS = _counter("spec_decode_num_drafts", "Passes that verified drafts of a sequence.")
SPEC_DECODE_NUM_DRAFT_TOKENS = _counter(
    "spec_decode_num_draft_tokens", "Drafts in a row that were verified; of branches, the longest path."
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS = _counter(
    "spec_decode_num_accepted_tokens",
    "Of these, those that stood: the target took the same token, and it is part of the output.",
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS = _counter(
    "spec_decode_num_accepted_tokens_per_pos",
    "The same by their position among the drafts of a pass, from 0.",
    labels=("position",),
)
SPEC_DECODE_DECISIONS = _counter(
    "spec_decode_decisions",
    "Steps for which the gate (num_speculative_tokens 'auto') decided whether to draft: 'pays' (more tokens per "
    "second than without), 'does not pay', 'probe' (one request tries a draft, though they did not pay a while ago), "
    "'owes' (drafts have cost more time than they saved, which is to be made up first), 'unknown' (steps of this size "
    "are timed without drafts first).",
    labels=("reason",),
    is_vllms=False,
)
PREFIX_CACHE_QUERIES = _counter(
    "prefix_cache_queries",
    "Tokens that the prefix cache was asked for, when sequences were admitted for the first time.",
)
PREFIX_CACHE_HITS = _counter("prefix_cache_hits", "Of prefix_cache_queries: tokens that were found.")
KV_OFFLOADED_BLOCKS = _counter(
    "kv_offloaded_blocks",
    "KV blocks that went to host memory or came back (--kv-offloading-size): 'stored' when their memory was "
    "needed, 'loaded' with the step that reads them, 'prefetched' beside a step of others.",
    labels=("move",),
    is_vllms=False,
)
KV_CHECKS = _counter(
    "kv_checks",
    "Cached blocks that were computed again and compared (--kv-check-rate): 'exact' (every byte is the same), "
    "'numerics' (within what roundings do) or 'corruption' (beyond it).",
    labels=("verdict",),
    is_vllms=False,
)
KV_CHECK_SECONDS = _counter("kv_check_seconds", "Time that these took, between the steps.", is_vllms=False)
ENGINE_STEPS = _counter("engine_steps", "Steps whose results were taken in.", is_vllms=False)
ENGINE_STARTS = _counter(
    "engine_starts",
    "Times that the engine was started; more than 1 means that it had to be started again.",
    is_vllms=False,
)

# ---------------------------------------------------------------------- latencies

_OF_SERVED = "Of sequences that got a token; observed when they end."

TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    _TTFT,
    "TTFT: from the arrival (the request is fully read by the first process of ours) until the step that made the "
    "first token gave its result. Observed at that token.",
    sglang="time_to_first_token_seconds",
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds",
    _TOKEN,
    "ITL: a step that gives a sequence m tokens, a gap after the step that gave it tokens before, counts m times "
    "with gap/m. The tokens of the first step count none.",
    sglang="inter_token_latency_seconds",
)
OUTPUT_GAP = _histogram(
    "output_gap_seconds",
    _TOKEN,
    "The gap itself, once a step: how long a reader of the stream saw nothing. Equal to ITL unless steps give "
    "several tokens.",
    is_vllms=False,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "request_time_per_output_token_seconds",
    _TOKEN,
    f"TPOT: (e2e - TTFT) / (tokens - 1); none for a single token. {_OF_SERVED}",
    sglang="time_per_output_token_seconds",
)
E2E_LATENCY = _histogram(
    "e2e_request_latency_seconds",
    _REQUEST,
    "E2E: from the arrival until the last token that counts, or until the abort. Of sequences that got a token; "
    "observed when they end.",
    sglang="e2e_request_latency_seconds",
)
QUEUE_TIME = _histogram(
    "request_queue_time_seconds",
    _REQUEST,
    f"From the arrival until first scheduled: preparing and waiting. {_OF_SERVED}",
    sglang="queue_time_seconds",
)
PREFILL_TIME = _histogram(
    "request_prefill_time_seconds", _REQUEST, f"From first scheduled until the first token. {_OF_SERVED}"
)
DECODE_TIME = _histogram(
    "request_decode_time_seconds", _REQUEST, f"From the first token until the end; preemptions are in it. {_OF_SERVED}"
)
INFERENCE_TIME = _histogram(
    "request_inference_time_seconds", _REQUEST, f"From first scheduled until the end: prefill and decode. {_OF_SERVED}"
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
    "Output tokens that count, of each sequence; observed when it ends.",
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
    "max_tokens of each request, cut to what the context leaves; observed when the last of its sequences ends.",
)
ITERATION_TOKENS = _histogram(
    "iteration_tokens_total", _STEP_TOKENS, "Query tokens of each step: chunks of prompts, decodes, drafts."
)

# ---------------------------------------------------------------------- between processes

KV_FETCHED_BYTES = _counter(
    "kv_fetched_bytes",
    "Bytes of KV that came from other processes, those of hand-overs that failed included.",
    is_vllms=False,
)
KV_HANDOVERS = _counter(
    "kv_handovers",
    "Prefixes that were to be fetched from a process that computes prompts: 'complete', or 'failed', and then the "
    "prompt is computed again; the reason is 'no room', 'not wanted' (the request has ended), 'silent' (the other side "
    "said nothing for too long), 'lease' (its request was ended, or made way), 'refused' (other numerics) or 'broken'.",
    labels=("outcome", "reason"),
    is_vllms=False,
)
KV_FETCH_SECONDS = _histogram(
    "kv_fetch_seconds",
    _TTFT,
    "From the first byte of a prefix until all of it was there; much of it passes while the rest is computed.",
    is_vllms=False,
)
SEQUENCES_RESUMED = _counter(
    "sequences_resumed",
    "Times that a sequence went on elsewhere because a process had died; only where the engine is pools, and its "
    "`engine` is 'gateway'.",
    is_vllms=False,
    counted_by=CountedBy.GATEWAY,
)
UPDATES_FENCED = _counter(
    "updates_fenced",
    "Tokens of a step for a sequence that goes on elsewhere: they came too late and were dropped. As above.",
    is_vllms=False,
    counted_by=CountedBy.GATEWAY,
)

# ---------------------------------------------------------------------- the server's own

KV_CACHE_USAGE_BY_TENANT = _gauge(
    "kv_cache_usage_perc_by_tenant",
    "Share of the KV blocks that the running requests of each tenant hold, 0 to 1. A block that several requests "
    "of a tenant share counts once. The label is the NAME of --api-key NAME:SECRET, a digest for a key without a name, "
    "empty without keys. A tenant that scrapes sees its own name and '(others)'; the admin key sees up to 100 names.",
    labels=("tenant",),
    is_vllms=False,
    counted_by=CountedBy.SERVER,
)
HTTP_RESPONSES = _counter(
    "http_responses",
    "HTTP answers begun, by route and status, refusals before a route (401, 413, 429) included; 'other' is the "
    "route of an unknown path. It has no label `engine`.",
    labels=("route", "status"),
    is_vllms=False,
    counted_by=CountedBy.SERVER,
)
IGNORED_PARAMS = _counter(
    "ignored_params",
    "Unknown fields of requests, by name; from the 101st name on '(others)'. It has no label `engine`.",
    labels=("field",),
    is_vllms=False,
    counted_by=CountedBy.SERVER,
)

# ---------------------------------------------------------------------- SGLang's alone

GEN_THROUGHPUT = _gauge(
    "gen_throughput",
    "Tokens generated per second, over the last second of steps; 0 when nobody is there.",
    is_vllms=False,
    sglang="gen_throughput",
)
CACHE_HIT_RATE = _gauge(
    "cache_hit_rate",
    "prefix_cache_hits / prefix_cache_queries of the last 100 sequences that were admitted.",
    is_vllms=False,
    sglang="cache_hit_rate",
)

FAMILIES: tuple[Family, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Family))
"""All of them, in the order above."""
