"""Things that tests need, with sensible defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.batch import Commit, ScheduledBatch
from twostroke.client.engine_client import EngineClient
from twostroke.client.input_processor import PromptInput
from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.config.cache import CacheConfig
from twostroke.config.kv_format import KVFormat
from twostroke.config.layer_spec import KVSpec, LayerSpec
from twostroke.config.rope import DEFAULT_ROPE_THETA, RopeConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.cost.step_cost import ModelShape
from twostroke.engine.facts import EngineFacts
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.request import Arrival, FinishReason
from twostroke.scheduler.scheduler import Scheduler


def uniform_layout(
    windows: Sequence[int | None], *, block_size: int, num_kv_heads: int, head_dim: int, kv_format: KVFormat
) -> KVLayout:
    """Return a layout of layers that differ at most in their window, one for each of `windows`."""
    specs = [KVSpec(num_kv_heads=num_kv_heads, head_dim=head_dim, window=window) for window in windows]
    return KVLayout.of(specs, block_size=block_size, kv_format=kv_format)


def unlike_layout(specs: Sequence[tuple[int, int, int | None]], *, block_size: int, kv_format: KVFormat) -> KVLayout:
    """Return a layout of layers with (KV heads, head_dim, window) each."""
    kinds = [KVSpec(num_kv_heads=heads, head_dim=head_dim, window=window) for heads, head_dim, window in specs]
    return KVLayout.of(kinds, block_size=block_size, kv_format=kv_format)


def uniform_shape(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    windows: Sequence[int | None] = (None,),
    bytes_per_weight: float = 2,
    kv_format: KVFormat = "bf16",
) -> ModelShape:
    """Return the shape of a model with layers that differ at most in their window."""
    layers = tuple(
        LayerSpec(
            num_heads=num_heads,
            kv=KVSpec(num_kv_heads=num_kv_heads, head_dim=head_dim, window=window),
            rope=RopeConfig(DEFAULT_ROPE_THETA),
            intermediate_size=intermediate_size,
        )
        for window in windows
    )
    return ModelShape(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layers=layers,
        bytes_per_weight=bytes_per_weight,
        kv_format=kv_format,
    )


LLAMA_3_8B = uniform_shape(
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    windows=(None,) * 32,
    bytes_per_weight=2,
)
"""In bfloat16."""


def make_layout(windows: Sequence[int | None] = (None,), block_size: int = 4) -> KVLayout:
    """Return a layout with tiny heads and one KV group per kind of layer, unless the counts differ."""
    return uniform_layout(windows, block_size=block_size, num_kv_heads=1, head_dim=2, kv_format="f32")


def make_kv(
    num_blocks: int = 16,
    *,
    windows: Sequence[int | None] = (None,),
    block_size: int = 4,
    max_model_len: int = 32,
    **cache: object,
) -> KVCacheManager:
    """Return a manager; further keywords are fields of CacheConfig."""
    config = CacheConfig(block_size=block_size, **cache)
    return KVCacheManager(make_layout(windows, block_size), num_blocks, config, max_model_len)


def make_scheduler(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    max_model_len: int = 32,
    kv: KVCacheManager | None = None,
    num_drafts: int = 0,
    **given: object,
) -> Scheduler:
    """Return a scheduler; further keywords are fields of SchedulerConfig."""
    kv = kv or make_kv(num_blocks, block_size=block_size, max_model_len=max_model_len)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts) if num_drafts else None
    return Scheduler(SchedulerConfig(**given), kv, max_model_len=max_model_len, speculation=drafts)


def make_arrival(request_id: str = "a", num_prompt_tokens: int = 4, max_tokens: int = 4, **given: object) -> Arrival:
    """Return an arrival at time 0; further keywords are its fields."""
    return Arrival(
        request_id, **{"arrival_time_s": 0.0} | given, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens
    )


def one_token_each(batch: ScheduledBatch, *, finish: Sequence[str] = ()) -> list[Commit]:
    """Return commits in which every sampling request gets one token, and some end with it."""
    return [
        Commit(
            r.request_id, int(r.samples_token), finish_reason=FinishReason.LENGTH if r.request_id in finish else None
        )
        for r in batch.requests
    ]


def scheduled_tokens(batch: ScheduledBatch) -> dict[str, int]:
    """Return the number of query tokens of each request, by id."""
    return {r.request_id: r.num_scheduled_tokens for r in batch.requests}


def make_facts(num_blocks: int = 100) -> EngineFacts:
    """Return the facts of a pool's engine, with small sizes."""
    return EngineFacts(
        model="m",
        tokenizer_path="",
        max_model_len=4096,
        max_logprobs=20,
        vocab_size=100,
        hidden_size=8,
        eos_token_ids=(),
        max_num_seqs=64,
        num_blocks=num_blocks,
        block_size=16,
        prefix_tokens=16,
        uses_priority=False,
        serves_background=True,
        is_fair=False,
        dtype="float32",
        kv_cache_dtype="f32",
        kernels="reference",
        num_threads=1,
        kv_bytes_per_token=1000,
        num_layers=4,
        architecture="LlamaForCausalLM",
        num_parameters=1000,
        quantization=None,
        weight_bytes=4000,
        startup_lines=(),
    )


def submitted(engine: EngineClient, prompt: PromptInput, request_id: str, **more: Any) -> Submission:
    """Return a submission of a prompt that arrived just now, with deltas as outputs, as for a stream."""
    given = {"kind": OutputKind.DELTA, **more}
    if "arrival_time_s" not in given:
        given["arrival_time_s"] = engine.now_s()
    return Submission(prompt=prompt, request_id=request_id, **given)
