"""Division of an engine's memory: weights, largest step and tables, and the remainder for KV.

For a GPU one account serves the engine, which measures the parts, and plans, which predict them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from twostroke.config.load import QuantizationOnLoad
from twostroke.config.speculation import MAX_AUTO_DRAFTS, SpeculativeConfig
from twostroke.errors import DoesNotFit
from twostroke.kv_cache.device_memory import DeviceMemory, reserve_bytes
from twostroke.kv_cache.sizing import FreeMemory, KVDemand, KVMemoryLimit, KVSizing, size_kv_cache
from twostroke.layers.elementwise import Rotary
from twostroke.runner.decode_graphs import largest_pass
from twostroke.runner.largest_steps import StepLimits
from twostroke.runner.memory import context_bytes, free_host_bytes, gpu_step_bytes, recorded_bytes, step_bytes
from twostroke.runner.memory_probe import MemoryReading
from twostroke.startup.prepared import DrafterFacts, Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """Bytes of each part of an engine's memory, and the size of the KV cache. With several ranks, of each rank."""

    weight_bytes: int
    """Weight bytes of the rank that has most."""
    draft_weight_bytes: int
    """Weight bytes of a draft model or of draft heads."""
    step_bytes: int
    """Peak bytes of the largest step."""
    context_bytes: int
    """Bytes of tables that grow with the longest request."""
    reserve_bytes: int
    """Bytes kept free in addition, and for recorded passes; on a GPU only."""
    memory: KVMemoryLimit
    """Free memory once all weights are loaded, and the part of it that must stay free beside the KV cache."""
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    """Bytes of a KV block, including the drafter's share."""
    sizing: KVSizing
    """Blocks, scratch blocks, the longest request, and how many of these fit."""


def account_for_memory(prepared: Prepared, *, free_bytes: int | None = None, share: float = 1.0) -> MemoryAccount:
    """Return the memory of the weights, and the division of the rest.

    Args:
        prepared: the model and its settings.
        free_bytes: of the device; None: as much as is free now.
        share: this engine's share of them.

    Raises:
        DoesNotFit: the weights or an explicit size are too large; the message has the arithmetic.
    """
    memory = free_memory(prepared, free_bytes=free_bytes, share=share)
    return _account(prepared, memory, memory.step_bytes, memory.context_bytes, reserve_bytes=0)


def _account(
    prepared: Prepared, memory: KVMemoryLimit, step_bytes: int, context_bytes: int, *, reserve_bytes: int
) -> MemoryAccount:
    """Return the account of a device, with the rest of its memory divided."""
    drafts = prepared.drafter_facts
    return MemoryAccount(
        weight_bytes=prepared.rank_weight_bytes,
        draft_weight_bytes=drafts.num_weight_bytes,
        step_bytes=step_bytes,
        context_bytes=context_bytes,
        reserve_bytes=reserve_bytes,
        memory=memory,
        kv_bytes_per_token=prepared.layout.bytes_per_token,
        kv_bytes_per_block=prepared.layout.bytes_per_block + drafts.kv_bytes_per_block,
        sizing=size_for(prepared, memory),
    )


def size_for(prepared: Prepared, memory: KVMemoryLimit) -> KVSizing:
    """Divide the memory for KV.

    Raises:
        DoesNotFit: an explicit size is too large; the message has the arithmetic.
    """
    settings = prepared.settings
    return size_kv_cache(
        prepared.layout,
        settings.cache,
        KVDemand(
            max_model_len=settings.load.max_model_len,
            model_context=prepared.config.max_context,
            max_tokens_per_step=prepared.max_tokens_per_step,
            max_num_seqs=settings.scheduler.max_num_seqs,
        ),
        memory,
        prepared.drafter_facts.kv_bytes_per_block,
    )


def free_memory(prepared: Prepared, *, free_bytes: int | None = None, share: float = 1.0) -> FreeMemory:
    """Return the memory that is free for KV; the arguments are those of `account_for_memory`.

    Raises:
        DoesNotFit: it does not hold the weights.
    """
    settings = prepared.settings
    tables = context_bytes(
        prepared.config,
        prepared.layout,
        max_model_len=prepared.longest_request,
        max_num_seqs=settings.scheduler.max_num_seqs,
        bytes_per_element=prepared.dtype.itemsize,
    )
    if free_bytes is None:
        free_bytes = free_bytes_of(prepared.device)
    free = int(share * free_bytes) // settings.load.num_local_ranks
    if prepared.device.type == "cpu":  # both use the same memory
        free -= _checked_offloading(prepared, free)
    return FreeMemory(
        free_bytes=free - _checked_weight_bytes(prepared, free),
        step_bytes=_step_bytes(prepared),
        context_bytes=tables,
    )


def check_weights_fit(prepared: Prepared) -> None:
    """Refuse weights that a card cannot hold, before any is read; what else fits is measured after loading.

    Raises:
        DoesNotFit: they are larger than the free memory.
    """
    _checked_weight_bytes(prepared, free_bytes_of(prepared.device))
    _checked_offloading(prepared, free_host_bytes() // prepared.settings.load.num_local_ranks)


def free_bytes_of(device: torch.device) -> int:
    """Return the bytes of a device's memory that are free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def _checked_offloading(prepared: Prepared, free: int) -> int:
    """Return the bytes of host memory for evicted blocks.

    Raises:
        DoesNotFit: more than is free, or less than a block.
    """
    asked, per_block = prepared.settings.cache.kv_offloading_size or 0, prepared.layout.bytes_per_block
    if asked > free:
        raise DoesNotFit(f"kv_offloading_size={asked:,} bytes; {free:,} are free in host memory. Lower it.")
    if 0 < asked < per_block:
        raise DoesNotFit(f"kv_offloading_size={asked:,} bytes; one KV block takes {per_block:,}. Give more.")
    return asked


def _checked_weight_bytes(prepared: Prepared, free: int) -> int:
    """Return the bytes of the weights, including the drafter's.

    Raises:
        DoesNotFit: they are larger than the free memory.
    """
    num_bytes = prepared.rank_weight_bytes + prepared.drafter_facts.num_weight_bytes
    if num_bytes > free:
        raise DoesNotFit(
            f"the weights of {prepared.path.name} take {num_bytes:,} bytes; {free:,} are free on "
            f"{prepared.device.type}. {_what_would_fit(prepared, free)}"
        )
    return num_bytes


def integer_quantizations(prepared: Prepared) -> tuple[QuantizationOnLoad, ...]:
    """Return the integer types to which float weights can be quantized while loading, the larger first."""
    floats = prepared.settings.load.quantization is None and prepared.weights.quantization is None
    return ("int8", "int4") if floats and prepared.operators.keeps_quantized else ()


def with_quantization(prepared: Prepared, quantization: QuantizationOnLoad) -> Prepared:
    """Return the same model with its weights quantized while loading."""
    settings = prepared.settings
    return replace(prepared, settings=replace(settings, load=replace(settings.load, quantization=quantization)))


def _what_would_fit(prepared: Prepared, free: int) -> str:
    """Return advice: the mildest quantization with which the weights fit, if there is one."""
    for quantization in integer_quantizations(prepared):
        num_bytes = with_quantization(prepared, quantization).rank_weight_bytes
        if num_bytes < free:
            return f"With --quantization {quantization} they take {num_bytes:,}; or free some memory."
    return "Free some memory, or take a smaller model."


def _step_bytes(prepared: Prepared) -> int:
    """Return the bytes of the largest step, and of the state that the drafter keeps."""
    return prepared.drafter_step_bytes + step_bytes(
        prepared.config,
        max_tokens=prepared.step_tokens,
        max_num_seqs=prepared.settings.scheduler.max_num_seqs,
        bytes_per_element=prepared.dtype.itemsize,
    )


def card_memory(prepared: Prepared, reading: MemoryReading) -> DeviceMemory:
    """Return the account that decides how many KV blocks a card holds.

    Args:
        prepared: the model and its settings.
        reading: the card's memory apart from the KV cache, at rest and in the largest step.
    """
    return DeviceMemory(
        total_bytes=reading.total_bytes,
        utilization=prepared.settings.cache.utilization,
        others_bytes=reading.others_bytes,
        weight_bytes=reading.held_bytes,
        # drafters are built after the KV cache
        draft_bytes=prepared.drafter_facts.num_weight_bytes + prepared.drafter_step_bytes,
        step_bytes=reading.peak_bytes,
        recorded_bytes=_recorded_bytes(prepared),
        reserve_bytes=reserve_bytes(reading.peak_bytes),
    )


def account_for_card(prepared: Prepared, *, total_bytes: int, others_bytes: int = 0) -> MemoryAccount:
    """Return the account of a card with nothing loaded, with a predicted step.

    Args:
        prepared: the model and its settings, with the operators of a GPU.
        total_bytes: memory of one card.
        others_bytes: memory that other processes use.

    Raises:
        DoesNotFit: no room for KV is left, or an explicit size is too large; the message has the arithmetic.
    """
    longest, itemsize = prepared.longest_request, prepared.dtype.itemsize
    tables = sum(Rotary.bytes_for(head_dim, longest, itemsize) for _, head_dim in prepared.config.ropes)
    predict = step_bytes if prepared.operators.name == "reference" else gpu_step_bytes
    step = predict(
        prepared.config,
        max_tokens=prepared.step_tokens,
        max_num_seqs=largest_step(prepared).max_rows,
        bytes_per_element=itemsize,
    )
    reading = MemoryReading(
        total_bytes=total_bytes,
        others_bytes=others_bytes,
        held_bytes=prepared.rank_weight_bytes + tables,
        peak_bytes=step,
    )
    memory = card_memory(prepared, reading)
    return _account(
        prepared, memory, memory.step_bytes, tables, reserve_bytes=memory.reserve_bytes + memory.recorded_bytes
    )


def largest_step(prepared: Prepared) -> StepLimits:
    """Return the size of the largest step that the settings allow."""
    settings = prepared.settings
    num_tokens = 1 + most_drafts(settings.speculative_config, prepared.drafter_facts)
    return StepLimits(
        max_tokens=prepared.step_tokens,
        max_rows=settings.scheduler.max_num_seqs * num_tokens,
        longest=prepared.longest_request,
        max_logprobs=settings.load.max_logprobs,
    )


def most_drafts(config: SpeculativeConfig | None, facts: DrafterFacts) -> int:
    """Return the most draft tokens of one request in a step; each of them is sampled for.

    >>> most_drafts(None, DrafterFacts()), most_drafts(SpeculativeConfig(method="ngram"), DrafterFacts())
    (0, 8)
    """
    if config is None:
        return 0
    most = MAX_AUTO_DRAFTS if config.num_speculative_tokens == "auto" else config.num_speculative_tokens
    if facts.max_drafts is None or facts.num_branch_blocks:  # branches hold more drafts than one row
        return most
    return min(most, facts.max_drafts)


def _recorded_bytes(prepared: Prepared) -> int:
    load = prepared.settings.load
    if load.device != "cuda" or load.enforce_eager:
        return 0
    most = largest_pass(prepared.settings.scheduler.max_num_seqs, prepared.step_tokens)
    return recorded_bytes(prepared.config, max_tokens=most, bytes_per_element=prepared.dtype.itemsize)
