"""From bytes to blocks to the longest request: the start-up arithmetic, said aloud and exact."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.cache import CacheConfig
from twostroke.errors import DoesNotFit
from twostroke.kv_cache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class KVSizing:
    """What the KV memory holds."""

    num_blocks: int
    max_model_len: int
    kv_bytes: int
    full_length_requests: int
    """Requests of max_model_len tokens that fit at once."""
    remarks: tuple[str, ...] = ()
    """What was decided for the user, to be said aloud."""


def size_kv_cache(
    layout: KVLayout,
    config: CacheConfig,
    *,
    max_model_len: int | None,
    model_context: int,
    max_tokens_per_step: int,
    free_bytes: int,
) -> KVSizing:
    """Decides the number of blocks and the longest request.

    A default always fits: without `max_model_len` the model's context is shortened to what the blocks hold. An
    explicit value that cannot be had is refused.

    Args:
        layout: the model's KV layout.
        config: explicit sizes, if any.
        max_model_len: the user's wish; None takes the model's context.
        model_context: the longest context that the model was made for.
        max_tokens_per_step: what one step can add to a request (windows hold that much on top).
        free_bytes: memory that is free for this process.

    Raises:
        DoesNotFit: an explicit size is larger than the memory or the context allows, with the arithmetic.
    """
    num_blocks, remarks = _num_blocks(layout, config, free_bytes), list[str]()
    if max_model_len is not None and max_model_len > model_context:
        raise DoesNotFit(
            f"max_model_len={max_model_len} exceeds the model's context of {model_context} tokens. "
            f"Lower it, or leave it out."
        )
    wanted = max_model_len or model_context
    fits = _longest_request(layout, num_blocks, max_tokens_per_step, wanted)
    if fits < wanted:
        needed = layout.peak_blocks(wanted, max_tokens_per_step)
        arithmetic = (
            f"a request of {wanted} tokens needs {needed} blocks x {layout.bytes_per_block:,} bytes = "
            f"{needed * layout.bytes_per_block:,} bytes; the KV memory holds {num_blocks} blocks = "
            f"{num_blocks * layout.bytes_per_block:,} bytes"
        )
        if max_model_len is not None or fits < 2:
            raise DoesNotFit(
                f"max_model_len={wanted}: {arithmetic}. Use --max-model-len {fits} or less, or give more with "
                f"--kv-cache-memory {needed * layout.bytes_per_block}."
            )
        remarks.append(f"max_model_len: {model_context} -> {fits} ({arithmetic})")
    full = num_blocks // layout.peak_blocks(fits, max_tokens_per_step)
    return KVSizing(num_blocks, fits, num_blocks * layout.bytes_per_block, full, tuple(remarks))


def _num_blocks(layout: KVLayout, config: CacheConfig, free_bytes: int) -> int:
    per_block = layout.bytes_per_block
    asked = config.kv_cache_memory
    if config.num_kv_blocks is not None:
        asked = config.num_kv_blocks * per_block
    if asked is None:
        if free_bytes // 2 < per_block:
            raise DoesNotFit(
                f"half of the free memory is {free_bytes // 2:,} bytes; one KV block takes {per_block:,}. "
                f"Free some memory, or lower --block-size (now {layout.block_size})."
            )
        return free_bytes // 2 // per_block
    if asked > free_bytes:
        raise DoesNotFit(
            f"KV memory of {asked:,} bytes was asked for; {free_bytes:,} bytes are free. "
            f"Use --kv-cache-memory {free_bytes // 2} (half of it), or leave it out."
        )
    if asked < per_block:
        raise DoesNotFit(
            f"KV memory of {asked:,} bytes holds no block: one takes {per_block:,} bytes "
            f"({layout.layers_per_block} layers x {layout.block_size} tokens x {layout.bytes_per_token_and_layer:,})."
        )
    return asked // per_block


def _longest_request(layout: KVLayout, num_blocks: int, max_tokens_per_step: int, at_most: int) -> int:
    """Largest n <= at_most whose peak fits; peak_blocks grows with n, so bisection finds it."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        if layout.peak_blocks(middle, max_tokens_per_step) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
