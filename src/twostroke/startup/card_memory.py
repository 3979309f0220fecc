"""The memory account of a GPU: one function for the engine, which measures its parts, and plans, which predict them."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.engine import EngineConfig
from twostroke.config.speculation import MAX_AUTO_DRAFTS, SpeculativeConfig
from twostroke.kv_cache.device_memory import DeviceMemory, reserve_bytes
from twostroke.layers.elementwise import Rotary
from twostroke.runner.decode_graphs import largest_pass
from twostroke.runner.largest_steps import LargestStep
from twostroke.runner.memory import card_step_bytes, recorded_bytes, step_bytes
from twostroke.startup.drafting import DrafterFacts
from twostroke.startup.preparation import (
    MemoryAccount,
    Prepared,
    loaded_weight_bytes,
    longest_request,
    size_for,
    step_tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """The memory of a GPU and its use apart from the KV cache; in bytes, measured or predicted."""

    total_bytes: int
    others_bytes: int
    """Memory of other processes, and of this one outside of its tensors."""
    held_bytes: int
    """Memory of all tensors that stay: weights and tables."""
    step_bytes: int
    """Peak memory of the largest step beyond `held_bytes`."""


def card_memory(config: EngineConfig, prepared: Prepared, use: CardUse) -> DeviceMemory:
    """Return the account that decides how many KV blocks a card holds.

    Args:
        config: all settings of the engine.
        prepared: the model.
        use: the card's memory, measured by the engine or predicted by a plan.
    """
    return DeviceMemory(
        total_bytes=use.total_bytes,
        utilization=config.cache.utilization,
        others_bytes=use.others_bytes,
        weight_bytes=use.held_bytes,
        draft_bytes=_draft_bytes(config, prepared),
        step_bytes=use.step_bytes,
        recorded_bytes=_recorded_bytes(config, prepared),
        reserve_bytes=reserve_bytes(use.step_bytes),
    )


def account_for_card(
    config: EngineConfig, prepared: Prepared, *, total_bytes: int, others_bytes: int = 0
) -> MemoryAccount:
    """Return the account of a card with nothing loaded, with a predicted step.

    Args:
        config: all settings of the engine.
        prepared: the model, with the operators of a GPU.
        total_bytes: memory of one card.
        others_bytes: memory that other processes use.

    Raises:
        DoesNotFit: no room for KV is left, or an explicit size is too large, with the arithmetic.
    """
    num_weight_bytes = loaded_weight_bytes(config, prepared, config.load.tensor_parallel_size)
    longest, itemsize = longest_request(config, prepared), prepared.dtype.itemsize
    tables = sum(Rotary.bytes_for(head_dim, longest, itemsize) for _, head_dim in prepared.config.ropes)
    predict = step_bytes if prepared.operators.name == "reference" else card_step_bytes
    step = predict(
        prepared.config,
        max_tokens=step_tokens(config, prepared),
        max_num_seqs=largest_step(config, prepared).max_rows,
        bytes_per_element=prepared.dtype.itemsize,
    )
    use = CardUse(
        total_bytes=total_bytes, others_bytes=others_bytes, held_bytes=num_weight_bytes + tables, step_bytes=step
    )
    memory, drafts = card_memory(config, prepared, use), prepared.drafter_facts
    return MemoryAccount(
        weight_bytes=num_weight_bytes,
        draft_weight_bytes=drafts.num_weight_bytes,
        step_bytes=step,
        context_bytes=tables,
        reserve_bytes=memory.reserve_bytes + memory.recorded_bytes,
        memory=memory,
        kv_bytes_per_token=prepared.layout.bytes_per_token,
        kv_bytes_per_block=prepared.layout.bytes_per_block + drafts.kv_bytes_per_block,
        sizing=size_for(config, prepared, memory),
    )


def largest_step(config: EngineConfig, prepared: Prepared) -> LargestStep:
    """Return the size of the largest step that the settings allow."""
    return LargestStep(
        max_tokens=step_tokens(config, prepared),
        max_rows=config.scheduler.max_num_seqs * (1 + most_drafts(config.speculative_config, prepared.drafter_facts)),
        longest=longest_request(config, prepared),
        max_logprobs=config.load.max_logprobs,
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


def _draft_bytes(config: EngineConfig, prepared: Prepared) -> int:
    """Return the bytes of drafters, which are built after the KV cache."""
    drafts = prepared.drafter_facts
    kept = drafts.bytes_per_token * step_tokens(config, prepared)
    kept += drafts.bytes_per_request * config.scheduler.max_num_seqs
    return drafts.num_weight_bytes + kept + drafts.num_branch_blocks * prepared.layout.bytes_per_block


def _recorded_bytes(config: EngineConfig, prepared: Prepared) -> int:
    if config.load.device != "cuda" or config.load.enforce_eager:
        return 0
    most = largest_pass(config.scheduler.max_num_seqs, step_tokens(config, prepared))
    return recorded_bytes(prepared.config, max_tokens=most, bytes_per_element=prepared.dtype.itemsize)
