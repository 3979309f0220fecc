"""The lines that a start prints."""

from __future__ import annotations

from collections import Counter

from twostroke.config.load import cpu_words
from twostroke.config.model import ModelConfig
from twostroke.kernels.reference.row_tiles import proofs
from twostroke.model.random_weights import RandomWeights
from twostroke.model.registry import num_active_parameters, num_parameters
from twostroke.startup.calibrated import LatencyModel
from twostroke.startup.measured_memory import KVSize
from twostroke.startup.prepared import Prepared


def start_lines(prepared: Prepared, sized: KVSize, pace: LatencyModel, load_s: float) -> tuple[str, ...]:
    """Return the lines that a start prints: the model and its device, the KV cache, and notes.

    Args:
        prepared: the model and its settings.
        sized: its KV cache.
        pace: step times by which limits are kept.
        load_s: seconds of the start.
    """
    sizing, layout = sized.sizing, prepared.layout
    config = prepared.config
    ending = "" if prepared.num_threads == 1 else "s"
    pinned = f" on {cpu_words(prepared.cpus)}" if prepared.cpus else ""
    threads = f", {prepared.num_threads} thread{ending}{pinned}" if prepared.device.type == "cpu" else ""
    num_ranks = prepared.num_ranks
    dealt = " with whole experts" if prepared.split.splits_by_expert else ""
    of_ranks = "" if num_ranks == 1 else f", {num_ranks} ranks{dealt} (threads, weights and kv cache are each rank's)"
    where = f"{prepared.device.type}{threads}{of_ranks}, {prepared.operators.name} kernels{deviation_words(prepared)}"
    model = f"{config.architecture}, {_parameters(config)}, {prepared.dtype_name}, {where}"
    weights = f"{prepared.rank_weight_bytes:,} bytes of weights, loaded in {load_s:.2f} s"
    per_token = f"{layout.kv_format}, {layout.bytes_per_token:,} bytes per token"
    beside = f" and {sizing.num_scratch_blocks} for checks" if sizing.num_scratch_blocks else ""
    blocks = f"{sizing.num_blocks:,} blocks of {layout.block_description}{beside} = {sizing.kv_bytes:,} bytes"
    capacity = layout.capacity_tokens(sizing.num_blocks)
    limit = f" ({sizing.limit})" if sizing.limit else ""
    return (
        f"model    {model}; {weights}",
        f"kv cache {per_token}; {blocks}, room for {capacity:,} tokens{limit}",
        f"requests {sizing.full_length_requests:,} of {sizing.max_model_len:,} tokens fit at once",
        *(() if prepared.drafter is None else (f"drafts   {prepared.drafter.words}",)),
        *_proof_lines(),
        *(f"note     {remark}" for remark in (*sizing.remarks, *_rope_remarks(config), *_invariance_remarks(prepared))),
        *(() if sized.memory is None else (f"memory   {sized.memory.account}",)),
        *pace.lines,
    )


def _parameters(config: ModelConfig) -> str:
    words = f"{num_parameters(config) / 1e6:,.1f} M parameters"
    if all(layer.experts is None for layer in config.layers):
        return words
    return f"{words} ({num_active_parameters(config) / 1e6:,.1f} M for a token)"


def _rope_remarks(config: ModelConfig) -> list[str]:
    found: list[str] = []
    for rope, _ in config.ropes:
        original, longest = rope.original_max_position_embeddings or 0, rope.longest_request or 0
        if rope.rope_type in ("dynamic", "longrope") and longest > original:
            name = "dynamic rope scaling is" if rope.rope_type == "dynamic" else "the long factors of longrope are"
            fixed = f"{name} fixed for {longest} tokens: another --max-model-len changes outputs"
            found.append(f"{fixed}; up to {original} tokens nothing is scaled")
    return found


def deviation_words(prepared: Prepared) -> str:
    """Return, in words, how answers differ from what the model normally gives."""
    is_random = isinstance(prepared.weights, RandomWeights)
    is_free = not prepared.operators.is_batch_invariant
    return (", random weights" if is_random else "") + (", not batch-invariant" if is_free else "")


def _invariance_remarks(prepared: Prepared) -> list[str]:
    if prepared.operators.is_batch_invariant:
        return []
    return ["not batch-invariant: tokens may change with the batch, and so with drafts, preemption, ranks, pools"]


def _proof_lines() -> list[str]:
    """Return a line about the row counts that were proved batch-invariant in this process, and the time it took."""
    found = proofs()
    if not found:
        return []
    counts = Counter(proof.heights for proof in found)
    admitted = ", ".join(f"{' '.join(map(str, heights))} rows for {count}" for heights, count in counts.items())
    seconds = sum(proof.time_s for proof in found)
    return [f"products {len(found)} kinds proved independent of their batch in {seconds:.2f} s: {admitted}"]
