"""From bytes to blocks to the longest request: the start-up arithmetic, said aloud and exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twostroke.config.cache import CacheConfig
from twostroke.config.kv_format import kv_format_warning
from twostroke.errors import DoesNotFit
from twostroke.kv_cache.layout import KVLayout

QUARANTINE_SHARE = 128
"""With the self-check on, one block in so many may be taken out of use before the engine has to give up; at least one
in each KV group."""


class KVRoom(Protocol):
    """What there is for KV, and how that came out: of the host (FreeMemory), or of a card (DeviceMemory)."""

    @property
    def usable_bytes(self) -> int:
        """For the KV cache, at most."""
        ...

    @property
    def default_bytes(self) -> int:
        """Of these, what it takes where no size is given."""
        ...

    @property
    def arithmetic(self) -> str:
        """Where `usable_bytes` comes from: what there is, less everything beside KV."""
        ...

    @property
    def account(self) -> str:
        """Where `default_bytes` comes from."""
        ...

    @property
    def remedy(self) -> str:
        """What makes more room; a sentence without its end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """What is free for this process, and what of it must stay free beside the KV cache."""

    free_bytes: int
    """The weights' already taken off."""
    step_bytes: int
    """What the largest step takes (runner.memory.step_bytes)."""
    context_bytes: int
    """What grows with the longest request, counted for the one that is asked for (runner.memory.context_bytes)."""

    @property
    def usable_bytes(self) -> int:
        """For the KV cache, at most."""
        return max(0, self.free_bytes - self.step_bytes - self.context_bytes)

    @property
    def default_bytes(self) -> int:
        """Half of what is free: the host is for others, too."""
        return min(self.free_bytes // 2, self.usable_bytes)

    @property
    def arithmetic(self) -> str:
        """Where `usable_bytes` comes from."""
        return (
            f"{self.free_bytes:,} bytes are free - {self.step_bytes:,} for the activations of the largest step - "
            f"{self.context_bytes:,} for the tables of the longest request"
        )

    @property
    def account(self) -> str:
        """Where `default_bytes` comes from."""
        taken = f"of which KV takes at most {self.default_bytes:,} unless a size is given"
        return f"{self.arithmetic} = {self.usable_bytes:,}, {taken}"

    @property
    def remedy(self) -> str:
        """What makes more room."""
        return "Free some memory, lower --max-model-len, --max-num-batched-tokens or --max-num-seqs"


@dataclass(frozen=True, slots=True)
class KVSizing:
    """What the KV memory holds."""

    num_blocks: int
    max_model_len: int
    kv_bytes: int
    full_length_requests: int
    """Requests of max_model_len tokens that fit at once."""
    num_scratch_blocks: int = 0
    """Behind the pool, for the self-check; `kv_bytes` counts them."""
    remarks: tuple[str, ...] = ()
    """What was decided for the user, to be said aloud."""
    limit: str = ""
    """What the default stops at, where memory would hold more; empty where it does not."""


@dataclass(frozen=True, slots=True)
class KVDemand:
    """How long and how many the requests may be that the KV cache is made for."""

    max_model_len: int | None
    """Tokens of the longest request, as the user wishes; None takes the model's context."""
    model_context: int
    """Tokens of the longest context that the model was made for."""
    max_tokens_per_step: int
    """What one step can add to a request: windows hold that much on top."""
    max_num_seqs: int | None = None
    """Most requests that run at once; None: any number."""


def size_kv_cache(
    layout: KVLayout, config: CacheConfig, demand: KVDemand, memory: KVRoom, bytes_beside_block: int = 0
) -> KVSizing:
    """Decides the number of blocks and the longest request.

    A default always fits: without `max_model_len` the model's context is shortened to what the blocks hold. It is also
    no larger than useful: at most twice what `max_num_seqs` of the longest requests use. An explicit value that cannot
    be had is refused.

    Args:
        layout: the model's KV layout.
        config: explicit sizes, if any.
        demand: of the requests.
        memory: what is free, and what other parts take.
        bytes_beside_block: what a draft model keeps beside each block.

    Raises:
        DoesNotFit: an explicit size is larger than the memory or the context allows, with the arithmetic.
    """
    max_model_len, model_context, max_num_seqs = demand.max_model_len, demand.model_context, demand.max_num_seqs
    num_scratch = len(layout.groups) if config.kv_check_rate else 0
    per_block = layout.bytes_per_block + bytes_beside_block
    scratch_bytes = num_scratch * layout.bytes_per_block  # drafts keep nothing beside these
    if max_model_len is not None and max_model_len > model_context:
        raise DoesNotFit(
            f"max_model_len={max_model_len} exceeds the model's context of {model_context} tokens. "
            f"Lower it, or leave it out."
        )

    def asking_for(num_needed: int) -> str:
        """The flag to give for so many blocks."""
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
    # the longest request is to fit beside blocks that turn out to be bad
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
            arithmetic += f", of which --kv-check-rate may put {num_blocks - num_dependable} out of use"
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
    """Blocks of which so many can be depended on, whatever the self-check puts out of use."""
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
    """Most blocks that the scheduler will ask for on behalf of one request, by its own arithmetic.

    Args:
        layout: the model's KV layout.
        config: paged, or a contiguous reservation.
        num_tokens: of the request; of a contiguous reservation, of the longest there may be.
        max_tokens_per_step: what one step can add to it.
    """
    if config.kv_reservation == "contiguous":
        return layout.run_blocks(num_tokens)
    return layout.peak_blocks(num_tokens, max_tokens_per_step)


def _num_blocks(layout: KVLayout, config: CacheConfig, memory: KVRoom, num_scratch: int, per_block: int) -> int:
    """Of the pool; `num_scratch` more are beside it."""
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
    """Largest n <= at_most that fits; blocks_for grows with n, so bisection finds it."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
