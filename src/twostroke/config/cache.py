"""Settings of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from twostroke.config.checks import check_bool, check_choice, check_int, check_number
from twostroke.config.kv_format import KVCacheDType
from twostroke.config.sizes import read_sizes
from twostroke.errors import InvalidParameter

KVReservation = Literal["paged", "contiguous"]

MAX_BLOCK_SIZE = 128
"""Most tokens per block. It is also the partition length of attention; a block never spans two partitions."""

DEFAULT_UTILIZATION = 0.9
"""Default share of a GPU's memory that may be in use; the rest is for other processes on the card."""


def check_block_size(name: str, size: int) -> None:
    """Check the number of tokens per block.

    Raises:
        InvalidParameter: it is no power of two from 1 to MAX_BLOCK_SIZE.
    """
    limit = f"a power of two from 1 to {MAX_BLOCK_SIZE}"
    check_int(name, size, 1, MAX_BLOCK_SIZE, limit=limit)
    if size & (size - 1):
        raise InvalidParameter(name, size, f"must be {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Layout, size and sharing of KV memory."""

    block_size: int = 16
    """Tokens per KV block: a power of two, at most 128. In a model with several kinds of layers (full and sliding
    window) this is the most tokens in one page, which kernels read at once; a block of each kind has as many pages as
    fit."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Format in which K and V are stored: 'auto' is the model's type; 'bf16' and 'f32' are plain floats; 'fp8' (e4m3)
    rounds, up to 448; 'int8' and 'int4' quantize with a scale and a zero per token and head. 'int4' costs small models
    quality: on the first 2,048 tokens of our LICENSE it raised the perplexity of Gemma 3 270M by 8.1% (int8: 0.4%), of
    SmolLM2-135M-Instruct by 4.3% (int8: -0.3%) and of Qwen2.5-Coder-1.5B by 3.4% (int8: -0.1%)."""
    kv_cache_memory: int | None = None
    """Bytes for KV blocks, such as 4GiB. Default on a CPU: half of the free memory, within the control group's limit;
    on a GPU: the memory that gpu_memory_utilization leaves. The default is at most twice what max_num_seqs requests of
    max_model_len tokens can use; the second half holds cached prefixes."""
    num_kv_blocks: int | None = None
    """Exact number of KV blocks instead of a size in bytes."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory, above 0 and up to 1, that may be in use once the KV cache is allocated, including other
    processes; default: 0.9. The memory that weights and the largest step need is measured at start."""
    kv_offloading_size: int | None = None
    """Bytes of host memory, such as 4GiB, for cached KV blocks that the pool evicts. On a hit they are copied back
    instead of recomputed. For a GPU; on a CPU, give the same bytes to kv_cache_memory instead."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished requests and reuse it for prompts with the same prefix."""
    kv_reservation: KVReservation = "paged"
    """Baseline switch: 'contiguous' reserves max_model_len tokens for each request in one run of blocks."""
    enable_kv_cache: bool = True
    """Baseline switch, for debugging: False recomputes every token in every step."""
    kv_check_rate: float = 0.0
    """Share of prefix cache hits, 0 to 1, for which one block is recomputed and compared with the stored one. A corrupt
    block is taken out of use."""

    def __post_init__(self) -> None:
        """Check ranges. Checks that depend on memory run when the engine is sized."""
        read_sizes(self, "kv_cache_memory", "kv_offloading_size")
        check_block_size("block_size", self.block_size)
        for name, value in (("kv_cache_memory", self.kv_cache_memory), ("num_kv_blocks", self.num_kv_blocks)):
            if value is not None:
                check_int(name, value, 1)
        for name in ("enable_prefix_caching", "enable_kv_cache"):
            check_bool(name, getattr(self, name))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        check_choice("kv_reservation", self.kv_reservation, get_args(KVReservation))
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise InvalidParameter("num_kv_blocks", self.num_kv_blocks, "cannot be given beside kv_cache_memory")
        self._check_utilization()
        self._check_offloading()
        self._check_prefix_caching()
        check_number("kv_check_rate", self.kv_check_rate, 0, 1, "from 0 (never) to 1 (every hit)")
        if self.kv_check_rate and not self.enable_prefix_caching:
            remedy = "Leave it out, or leave the prefix cache on."
            raise InvalidParameter("kv_check_rate", self.kv_check_rate, "checks hits of the prefix cache", remedy)

    @property
    def utilization(self) -> float:
        """Share of a GPU's memory that may be in use."""
        return DEFAULT_UTILIZATION if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    def _check_prefix_caching(self) -> None:
        if not self.enable_prefix_caching:
            return
        remedy = "Switch it off as well (--no-enable-prefix-caching)."
        if not self.enable_kv_cache:
            raise InvalidParameter("enable_prefix_caching", True, "needs the KV cache", remedy)
        if self.kv_reservation == "contiguous":
            raise InvalidParameter("enable_prefix_caching", True, "needs kv_reservation paged", remedy)

    def _check_offloading(self) -> None:
        given = self.kv_offloading_size
        if given is None:
            return
        check_int("kv_offloading_size", given, 1)
        if not self.enable_prefix_caching:
            remedy = "Leave it out, or leave the prefix cache on."
            raise InvalidParameter("kv_offloading_size", given, "extends the prefix cache", remedy)

    def _check_utilization(self) -> None:
        given = self.gpu_memory_utilization
        if given is None:
            return
        check_number("gpu_memory_utilization", given, 0, 1, "more than 0 and at most 1 (a share)", low_open=True)
        for name in ("kv_cache_memory", "num_kv_blocks"):
            if getattr(self, name) is not None:
                raise InvalidParameter("gpu_memory_utilization", given, f"changes nothing beside {name}")
