"""Memory plan of a model that is not loaded, made by the engine's own account (startup/memory.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import resolve_kv_format
from twostroke.config.layer_spec import KVSpec
from twostroke.config.load import DEFAULT_GROUP_SIZE, QuantizationOnLoad
from twostroke.config.model import ModelConfig
from twostroke.errors import DoesNotFit, InvalidParameter
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.sizing import blocks_of_request
from twostroke.model.loader import check_quantization, check_weights
from twostroke.model.random_weights import RandomWeights
from twostroke.model.registry import num_active_parameters, num_parameters
from twostroke.startup.memory import MemoryAccount, account_for_card, account_for_memory
from twostroke.startup.preparation import check_can_split
from twostroke.startup.prepared import Prepared

SMALLER: tuple[QuantizationOnLoad, ...] = ("int8", "int4")
"""Formats to quantize to while loading, the larger first."""


@dataclass(frozen=True, slots=True)
class KVKind:
    """Layers with the same attention window."""

    window: int | None
    """Tokens that a query sees, itself included; None sees all."""
    num_layers: int
    bytes_per_token: int
    """K and V in all of these layers."""


@dataclass(frozen=True, slots=True)
class ExpertsKind:
    """Layers with the same number of experts."""

    num_experts: int
    num_chosen: int
    """Experts that compute a token."""
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory use of one engine; with several ranks, of each rank."""

    model: str
    architecture: str
    num_parameters: int
    num_active_parameters: int
    """Parameters that are read for a token: of experts the chosen ones, of tables one row."""
    experts: tuple[ExpertsKind, ...]
    bytes_per_expert_weight: float | None
    """Bytes of an expert's weight in memory, with its share of scales and padding; None: there are no experts."""
    dtype: str
    quantization: str | None
    num_ranks: int
    splits_by_expert: bool
    """Whether each rank has whole experts."""
    memory_bytes: int
    """Memory for this rank, free or given; all memory of a card."""
    others_bytes: int
    """Memory of a card that other processes use."""
    utilization: float | None
    """Share of a card's memory that may be in use; None: not a card, or a given size of KV memory decides."""
    weight_bytes: int
    draft_weight_bytes: int
    step_bytes: int
    context_bytes: int
    reserve_bytes: int
    """Memory of a card kept free, and for recorded passes."""
    kv_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    """Bytes of a block, including what drafts store per block."""
    kinds: tuple[KVKind, ...]
    num_blocks: int
    num_scratch_blocks: int
    max_model_len: int
    max_num_seqs: int
    remarks: tuple[str, ...]
    kv_limit: str = ""
    """Limit that stops the default size of the KV cache; see KVSizing.limit."""
    layout: KVLayout
    cache: CacheConfig
    max_tokens_per_step: int

    @property
    def max_concurrent_requests(self) -> int:
        """Number of requests of max_model_len tokens whose blocks fit at once."""
        return self.concurrent_requests(self.max_model_len)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens in all blocks, without counting windows."""
        return self.layout.capacity_tokens(self.num_blocks)

    def concurrent_requests(self, num_tokens: int) -> int:
        """Return how many requests of this length, prompt and output, have blocks at once; 0 beyond max_model_len."""
        if num_tokens > self.max_model_len:
            return 0
        if self.cache.kv_reservation == "contiguous":  # every request reserves blocks for the longest
            num_tokens = self.max_model_len
        return self.num_blocks // self.blocks_for(num_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens`, prompt and output, can need."""
        return blocks_of_request(self.layout, self.cache, num_tokens, self.max_tokens_per_step)


def plan_memory(prepared: Prepared, memory_bytes: int, *, others_bytes: int = 0) -> MemoryPlan:
    """Return how the engine would use its memory.

    Args:
        prepared: the model and its settings.
        memory_bytes: free bytes of the machine; or all bytes of all ranks' cards.
        others_bytes: bytes of each card that other processes use.

    Raises:
        DoesNotFit: the weights or a requested size do not fit; the message says what is missing and what would fit.
    """
    config = prepared.settings
    own_bytes = memory_bytes // config.load.num_local_ranks
    is_card = config.load.device == "cuda"
    _check_weights_fit(prepared, own_bytes, others_bytes)
    account = _account(prepared, own_bytes, others_bytes)
    model, layout, sizing = prepared.config, prepared.layout, account.sizing
    return MemoryPlan(
        model=prepared.path.name,
        architecture=model.architecture,
        num_parameters=num_parameters(model),
        num_active_parameters=num_active_parameters(model),
        experts=experts_of(model),
        bytes_per_expert_weight=prepared.shape.bytes_per_expert_weight,
        dtype=prepared.dtype_name,
        quantization=config.load.quantization or prepared.weights.quantization,
        num_ranks=prepared.num_ranks,
        splits_by_expert=prepared.split.splits_by_expert,
        memory_bytes=own_bytes,
        others_bytes=others_bytes,
        utilization=config.cache.utilization if is_card and not has_size(config.cache) else None,
        weight_bytes=account.weight_bytes,
        draft_weight_bytes=account.draft_weight_bytes,
        step_bytes=account.step_bytes,
        context_bytes=account.context_bytes,
        reserve_bytes=account.reserve_bytes,
        kv_bytes=sizing.kv_bytes,
        kv_bytes_per_token=account.kv_bytes_per_token,
        kv_bytes_per_block=account.kv_bytes_per_block,
        kinds=kinds_of(layout),
        num_blocks=sizing.num_blocks,
        num_scratch_blocks=sizing.num_scratch_blocks,
        max_model_len=sizing.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        remarks=(*_shape_remarks(prepared), *sizing.remarks),
        kv_limit=sizing.limit,
        layout=layout,
        cache=config.cache,
        max_tokens_per_step=prepared.max_tokens_per_step,
    )


def _account(prepared: Prepared, own_bytes: int, others_bytes: int) -> MemoryAccount:
    """Return the engine's account for a rank with `own_bytes`; raise DoesNotFit as the engine does."""
    load = prepared.settings.load
    if load.device == "cuda":
        return account_for_card(prepared, total_bytes=own_bytes, others_bytes=others_bytes)
    return account_for_memory(prepared, free_bytes=own_bytes * load.num_local_ranks)


def has_size(cache: CacheConfig) -> bool:
    """Return whether a size of KV memory is given, so that no share of a card decides it.

    >>> has_size(CacheConfig()), has_size(CacheConfig(num_kv_blocks=9)), has_size(CacheConfig(kv_cache_memory=1 << 20))
    (False, True, True)
    """
    return cache.num_kv_blocks is not None or cache.kv_cache_memory is not None


def kinds_of(layout: KVLayout) -> tuple[KVKind, ...]:
    """Return the kinds of layers, in order of first appearance."""
    counts: Counter[KVSpec] = Counter()
    for group in layout.groups:
        counts[group.spec] += len(group.layer_ids)
    return tuple(KVKind(spec.window, num, num * spec.bytes_per_token(layout.kv_format)) for spec, num in counts.items())


def _shape_remarks(prepared: Prepared) -> tuple[str, ...]:
    """Return a remark if the model's folder has no weights to plan with."""
    if not isinstance(prepared.weights, RandomWeights):
        return ()
    return (f"sizes are those of config.json in {prepared.path}; no weights were looked at",)


def experts_of(model: ModelConfig) -> tuple[ExpertsKind, ...]:
    """Return the kinds of layers with experts; empty for a dense model."""
    specs = (layer.experts for layer in model.layers)
    counts = Counter((spec.num_experts, spec.num_chosen) for spec in specs if spec is not None)
    return tuple(ExpertsKind(*numbers, num_layers) for numbers, num_layers in counts.items())


def with_kv_format(prepared: Prepared, kv_cache_dtype: str) -> Prepared:
    """Return the same model with another KV format, without reading its files; a drafter's figures do not change."""
    settings = prepared.settings
    cache = replace(settings.cache, kv_cache_dtype=kv_cache_dtype)
    kv_format = resolve_kv_format(cache.kv_cache_dtype, prepared.dtype_name)
    layout = replace(prepared.layout, kv_format=kv_format)
    return replace(prepared, settings=replace(settings, cache=cache), kv_format=kv_format, layout=layout)


def with_quantization(prepared: Prepared, quantization: QuantizationOnLoad) -> Prepared:
    """Return the same model quantized while it is loaded.

    Raises:
        InvalidParameter: its matrices do not divide into groups.
        SetupError: it is quantized already.
    """
    check_quantization(prepared.weights, quantization)
    settings = prepared.settings
    group_size = settings.load.group_size or DEFAULT_GROUP_SIZE
    check_weights(prepared.weights, prepared.config, quantization, group_size)
    load = replace(settings.load, quantization=quantization, group_size=None)
    return replace(prepared, settings=replace(settings, load=load))


def weights_fit(prepared: Prepared, memory_bytes: int, *, others_bytes: int = 0) -> bool:
    """Return whether the weights fit; the arguments are those of `plan_memory`.

    It does not search for settings that would fit, which takes long.
    """
    own_bytes = memory_bytes // prepared.settings.load.num_local_ranks
    return _weight_bytes(prepared) <= _room_for_weights(prepared.settings, own_bytes, others_bytes)


def _check_weights_fit(prepared: Prepared, own_bytes: int, others_bytes: int) -> None:
    config = prepared.settings
    needed, room, words = _weight_bytes(prepared), _room_for_weights(config, own_bytes, others_bytes), ""
    if needed <= room:
        return
    if config.load.device == "cuda":
        words = f"{config.cache.utilization:g} x {own_bytes:,}"
        words += f" - {others_bytes:,} that others hold = " if others_bytes else " = "
    missing = f"the weights of {prepared.path.name} take {needed:,} bytes of {words}{room:,}: {needed - room:,} more"
    what_would = what_would_fit(prepared, own_bytes, others_bytes)
    raise DoesNotFit(f"{missing} than there are. {what_would}")


def _weight_bytes(prepared: Prepared) -> int:
    """Return the bytes of a rank's weights, those of its drafter included."""
    return prepared.rank_weight_bytes + prepared.drafter_facts.num_weight_bytes


def _room_for_weights(config: EngineConfig, own_bytes: int, others_bytes: int) -> int:
    return int(config.cache.utilization * own_bytes) - others_bytes if config.load.device == "cuda" else own_bytes


def what_would_fit(prepared: Prepared, own_bytes: int, others_bytes: int) -> str:
    """Return settings with which the whole engine fits, not only its weights."""

    def fits(changed: Prepared) -> bool:
        try:
            _account(changed, own_bytes, others_bytes)
        except (DoesNotFit, InvalidParameter):
            return False
        return True

    words = [f"--tensor-parallel-size {size}" for size in _sizes_that_fit(prepared, fits)]
    sizes: dict[str, int] = {}
    is_quantized = prepared.settings.load.quantization is not None or prepared.weights.quantization is not None
    for quantization in () if is_quantized else SMALLER:
        try:
            smaller = with_quantization(prepared, quantization)
        except InvalidParameter:
            continue
        sizes[quantization] = smaller.rank_weight_bytes
        if fits(smaller):
            words.append(f"--quantization {quantization} ({sizes[quantization]:,} bytes)")
    if words:
        return f"What would fit: {' or '.join(words)}."
    if is_quantized:
        return "They are quantized already; take more memory, or a smaller model."
    found = ", ".join(f"{name} takes {size:,}" for name, size in sizes.items())
    beside = ", beside the largest step and one KV block" if found else ""
    return f"Quantized weights would not fit either ({found}{beside}); take more memory, or a smaller model."


def _sizes_that_fit(prepared: Prepared, fits: Callable[[Prepared], bool]) -> list[int]:
    """Return the least number of cards, each with a share of the model, on which it fits; none where no number does."""
    config = prepared.settings
    if config.load.device != "cuda":
        return []
    now = config.load.tensor_parallel_size
    most = max(layer.num_heads for layer in prepared.config.kinds)
    for size in range(now + 1, most + 1):
        split = replace(config, load=replace(config.load, tensor_parallel_size=size))
        try:
            check_can_split(split, prepared.config, prepared.operators)
        except InvalidParameter:
            continue
        specs = [spec.for_rank(size) for spec in prepared.config.kv_specs]
        layout = KVLayout.of(specs, block_size=config.cache.block_size, kv_format=prepared.layout.kv_format)
        if fits(replace(prepared, settings=split, layout=layout)):
            return [size]
    return []
