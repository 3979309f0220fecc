"""Start-up arithmetic: from bytes of KV memory to blocks, to the longest request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twostroke.config.cache import CacheConfig
from twostroke.config.kv_format import kv_format_warning
from twostroke.errors import DoesNotFit
from twostroke.kv_cache.layout import KVLayout

QUARANTINE_SHARE = 128
"""Blocks per block that the self-check may take out of use before the engine has to stop; at least one
in each KV group."""


class KVMemoryLimit(Protocol):
    """Memory available for KV and its derivation: of the host (FreeMemory), or of a card (DeviceMemory)."""

    @property
    def usable_bytes(self) -> int:
        """Most bytes for the KV cache."""
        ...

    @property
    def default_bytes(self) -> int:
        """Bytes for the KV cache if no size is given."""
        ...

    @property
    def arithmetic(self) -> str:
        """Derivation of `usable_bytes`: available memory, less everything except KV."""
        ...

    @property
    def account(self) -> str:
        """Derivation of `default_bytes`, as a log line."""
        ...

    @property
    def remedy(self) -> str:
        """Advice that frees memory; a sentence without its full stop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Free memory of the host, and the part that must stay free after the KV cache is allocated."""

    free_bytes: int
    """Free bytes after the weights are loaded."""
    step_bytes: int
    """Bytes of the largest step (runner.memory.step_bytes)."""
    context_bytes: int
    """Bytes that grow with the longest request, for the requested length (runner.memory.context_bytes)."""

    @property
    def usable_bytes(self) -> int:
        return max(0, self.free_bytes - self.step_bytes - self.context_bytes)

    @property
    def default_bytes(self) -> int:
        """Half of the free bytes, because other processes share the host."""
        return min(self.free_bytes // 2, self.usable_bytes)

    @property
    def arithmetic(self) -> str:
        return (
            f"{self.free_bytes:,} bytes are free - {self.step_bytes:,} for the activations of the largest step - "
            f"{self.context_bytes:,} for the tables of the longest request"
        )

    @property
    def account(self) -> str:
        taken = f"of which KV takes at most {self.default_bytes:,} unless a size is given"
        return f"{self.arithmetic} = {self.usable_bytes:,}, {taken}"

    @property
    def remedy(self) -> str:
        return "Free some memory, lower --max-model-len, --max-num-batched-tokens or --max-num-seqs"


@dataclass(frozen=True, slots=True)
class KVSizing:
    """Size of the KV cache, and what it holds."""

    num_blocks: int
    max_model_len: int
    kv_bytes: int
    full_length_requests: int
    """Requests of max_model_len tokens that fit at once."""
    num_scratch_blocks: int = 0
    """Blocks outside the pool, for the self-check; `kv_bytes` includes them."""
    remarks: tuple[str, ...] = ()
    """Log lines about defaults that were reduced."""
    limit: str = ""
    """Limit of the default, if memory would hold more; otherwise empty."""


@dataclass(frozen=True, slots=True)
class KVDemand:
    """Length and number of the requests that the KV cache is sized for."""

    max_model_len: int | None
    """Requested tokens of the longest request; None takes the model's context."""
    model_context: int
    """Tokens of the longest context that the model supports."""
    max_tokens_per_step: int
    """Most tokens that one step adds to a request; groups with a window hold them in addition."""
    max_num_seqs: int | None = None
    """Most running requests; None: any number."""


def size_kv_cache(
    layout: KVLayout, config: CacheConfig, demand: KVDemand, memory: KVMemoryLimit, bytes_beside_block: int = 0
) -> KVSizing:
    """Decide the number of blocks and the longest request.

    A default always fits: without `max_model_len` the model's context is shortened to what the blocks hold. It is also
    no larger than useful: at most twice what `max_num_seqs` of the longest requests use. An explicit value that does
    not fit is refused.

    Args:
        layout: the model's KV layout.
        config: explicit sizes, if any.
        demand: of the requests.
        memory: available memory, and what other parts take.
        bytes_beside_block: bytes that a draft model keeps per block.

    Raises:
        DoesNotFit: an explicit size is larger than the memory or the context allows; the message has the arithmetic.
    """
    max_model_len, model_context, max_num_seqs = demand.max_model_len, demand.model_context, demand.max_num_seqs
    num_scratch = len(layout.groups) if config.kv_check_rate else 0
    per_block = layout.bytes_per_block + bytes_beside_block
    scratch_bytes = num_scratch * layout.bytes_per_block  # drafters keep nothing for these
    if max_model_len is not None and max_model_len > model_context:
        raise DoesNotFit(
            f"max_model_len={max_model_len} exceeds the model's context of {model_context} tokens. "
            f"Lower it, or leave it out."
        )

    def asking_for(num_needed: int) -> str:
        """Return the flag to give for so many blocks."""
        num_blocks = _with_spare(num_needed, num_scratch)
        return _asking(config, num_blocks, num_blocks * per_block + scratch_bytes)

    def blocks_for(num_tokens: int) -> int:
        return blocks_of_request(layout, config, num_tokens, demand.max_tokens_per_step)

    wanted = max_model_len or model_context
    num_blocks, remarks = _num_blocks(layout, config, memory, num_scratch, per_block), list[str]()
    limit = ""
    if max_num_seqs is not None and config.kv_cache_memory is None and config.num_kv_blocks is None:
        shares = 2 if config.enable_prefix_caching else 1
        most = _with_spare(shares * max_num_seqs * blocks_for(wanted), num_scratch)
        num_blocks, limit = min(num_blocks, most), _limit_words(shares, max_num_seqs, wanted, most < num_blocks)
    # the longest request has to fit even if some blocks turn out to be corrupt
    num_dependable = num_blocks - (max(num_scratch, num_blocks // QUARANTINE_SHARE) if num_scratch else 0)
    fits = _longest_request(blocks_for, num_dependable, wanted)
    if fits < wanted:
        needed, smallest = blocks_for(wanted), blocks_for(2)
        arithmetic = (
            f"a request of {wanted} tokens needs {needed} blocks x {per_block:,} bytes = "
            f"{needed * per_block:,} bytes; the KV memory holds {num_blocks} blocks = "
            f"{num_blocks * per_block:,} bytes"
        )
        if num_scratch:
            arithmetic += f", of which --kv-check-rate may take {num_blocks - num_dependable} out of use"
        if fits < 2:
            raise DoesNotFit(
                f"max_model_len={wanted}: {arithmetic}. Not even 2 tokens fit (one in, one out), which need {smallest} "
                f"blocks. Give {asking_for(needed)}, or at least {asking_for(smallest)} with --max-model-len 2."
            )
        if max_model_len is not None:
            raise DoesNotFit(
                f"max_model_len={wanted}: {arithmetic}. Use --max-model-len {fits} or less, or give more with "
                f"{asking_for(needed)}."
            )
        remarks.append(f"max_model_len: {model_context} -> {fits} ({arithmetic})")
    remarks += filter(None, [kv_format_warning(layout.kv_format)])
    full = num_blocks // blocks_for(fits)
    kv_bytes = num_blocks * per_block + scratch_bytes
    return KVSizing(num_blocks, fits, kv_bytes, full, num_scratch, tuple(remarks), limit)


def _with_spare(num_needed: int, num_scratch: int) -> int:
    """Return the blocks to allocate so that `num_needed` remain after the self-check's quarantine."""
    return num_needed + (max(num_scratch, num_needed // (QUARANTINE_SHARE - 1) + 1) if num_scratch else 0)


def _asking(config: CacheConfig, num_blocks: int, num_bytes: int) -> str:
    """Return the flag that asks for KV memory: the one that was given, or else that of bytes."""
    return f"--kv-cache-memory {num_bytes}" if config.num_kv_blocks is None else f"--num-kv-blocks {num_blocks}"


def _limit_words(shares: int, max_num_seqs: int, num_tokens: int, is_limit: bool) -> str:
    if not is_limit:
        return ""
    requests = "1 request" if max_num_seqs == 1 else f"{max_num_seqs:,} requests"
    used = f"what {requests} of {num_tokens:,} tokens can use"
    return used if shares == 1 else f"twice {used}; the second half holds cached prefixes"


def blocks_of_request(layout: KVLayout, config: CacheConfig, num_tokens: int, max_tokens_per_step: int) -> int:
    """Return the most blocks that the scheduler asks for on behalf of one request, by the scheduler's arithmetic.

    Args:
        layout: the model's KV layout.
        config: paged, or a contiguous reservation.
        num_tokens: of the request; for a contiguous reservation, of the longest possible one.
        max_tokens_per_step: most tokens that one step adds to it.
    """
    if config.kv_reservation == "contiguous":
        return layout.run_blocks(num_tokens)
    return layout.peak_blocks(num_tokens, max_tokens_per_step)


def _num_blocks(layout: KVLayout, config: CacheConfig, memory: KVMemoryLimit, num_scratch: int, per_block: int) -> int:
    """Return the blocks of the pool, not counting `num_scratch` blocks outside it."""
    usable, default = memory.usable_bytes, memory.default_bytes
    scratch_bytes = num_scratch * layout.bytes_per_block
    least = per_block + scratch_bytes
    asked = config.kv_cache_memory
    if config.num_kv_blocks is not None:
        asked = config.num_kv_blocks * per_block + scratch_bytes
    if asked is None:
        if default < least:
            raise DoesNotFit(
                f"{memory.account}; one KV block takes {per_block:,}. {memory.remedy}, or lower --block-size "
                f"(now {layout.block_size})."
            )
        return (default - scratch_bytes) // per_block
    if asked > usable:
        most = _asking(config, max(1, (default - scratch_bytes) // per_block), default)
        raise DoesNotFit(
            f"KV memory of {asked:,} bytes was asked for; {memory.arithmetic} = {usable:,}. Use {most}, "
            "or leave it out; a lower --max-num-batched-tokens makes steps smaller, a lower "
            "--max-model-len the tables."
        )
    if asked < least:
        for_drafts, group = per_block - layout.bytes_per_block, layout.filling_group
        num_layers = len(group.layer_ids) * group.pages_per_block
        raise DoesNotFit(
            f"KV memory of {asked:,} bytes holds no block: one takes {per_block:,} bytes "
            f"({num_layers} layers x {layout.block_size} tokens x {group.spec.bytes_per_token(layout.kv_format):,}"
            f"{f', and {for_drafts:,} for drafts' if for_drafts else ''})"
            f"{f', and --kv-check-rate takes {num_scratch} beside the pool' if num_scratch else ''}."
        )
    return (asked - scratch_bytes) // per_block


def _longest_request(blocks_for: Callable[[int], int], num_blocks: int, at_most: int) -> int:
    """Return the largest n <= at_most that fits; blocks_for grows with n, so bisection finds it."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
