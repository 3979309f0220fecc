"""The memory account of a GPU: one function for the engine, which measures its parts, and plans, which predict them."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.speculation import MAX_AUTO_DRAFTS, SpeculativeConfig
from twostroke.kv_cache.device_memory import DeviceMemory, reserve_bytes
from twostroke.layers.elementwise import Rotary
from twostroke.runner.decode_graphs import largest_pass
from twostroke.runner.largest_steps import LargestStep
from twostroke.runner.memory import card_step_bytes, recorded_bytes, step_bytes
from twostroke.startup.drafter import DrafterFacts
from twostroke.startup.memory import MemoryAccount, size_for
from twostroke.startup.prepared import Prepared


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


def card_memory(prepared: Prepared, use: CardUse) -> DeviceMemory:
    """Return the account that decides how many KV blocks a card holds.

    Args:
        prepared: the model and its settings.
        use: the card's memory, measured by the engine or predicted by a plan.
    """
    return DeviceMemory(
        total_bytes=use.total_bytes,
        utilization=prepared.settings.cache.utilization,
        others_bytes=use.others_bytes,
        weight_bytes=use.held_bytes,
        # drafters are built after the KV cache
        draft_bytes=prepared.drafter_facts.num_weight_bytes + prepared.drafter_step_bytes,
        step_bytes=use.step_bytes,
        recorded_bytes=_recorded_bytes(prepared),
        reserve_bytes=reserve_bytes(use.step_bytes),
    )


def account_for_card(prepared: Prepared, *, total_bytes: int, others_bytes: int = 0) -> MemoryAccount:
    """Return the account of a card with nothing loaded, with a predicted step.

    Args:
        prepared: the model and its settings, with the operators of a GPU.
        total_bytes: memory of one card.
        others_bytes: memory that other processes use.

    Raises:
        DoesNotFit: no room for KV is left, or an explicit size is too large, with the arithmetic.
    """
    num_weight_bytes, itemsize = prepared.rank_weight_bytes, prepared.dtype.itemsize
    longest = prepared.longest_request
    tables = sum(Rotary.bytes_for(head_dim, longest, itemsize) for _, head_dim in prepared.config.ropes)
    predict = step_bytes if prepared.operators.name == "reference" else card_step_bytes
    step = predict(
        prepared.config,
        max_tokens=prepared.step_tokens,
        max_num_seqs=largest_step(prepared).max_rows,
        bytes_per_element=itemsize,
    )
    use = CardUse(
        total_bytes=total_bytes, others_bytes=others_bytes, held_bytes=num_weight_bytes + tables, step_bytes=step
    )
    memory, drafts = card_memory(prepared, use), prepared.drafter_facts
    return MemoryAccount(
        weight_bytes=num_weight_bytes,
        draft_weight_bytes=drafts.num_weight_bytes,
        step_bytes=step,
        context_bytes=tables,
        reserve_bytes=memory.reserve_bytes + memory.recorded_bytes,
        memory=memory,
        kv_bytes_per_token=prepared.layout.bytes_per_token,
        kv_bytes_per_block=prepared.layout.bytes_per_block + drafts.kv_bytes_per_block,
        sizing=size_for(prepared, memory),
    )


def largest_step(prepared: Prepared) -> LargestStep:
    """Return the size of the largest step that the settings allow."""
    settings = prepared.settings
    num_tokens = 1 + most_drafts(settings.speculative_config, prepared.drafter_facts)
    return LargestStep(
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
