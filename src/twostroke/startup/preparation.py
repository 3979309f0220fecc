"""What is found out before a weight is read: what can be refused, and where memory goes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from twostroke.config.cpu_list import show_cpus
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import KVFormat, resolve_kv_format
from twostroke.config.load import DEFAULT_GROUP_SIZE, LoadConfig, QuantizationOnLoad
from twostroke.config.model import ModelConfig
from twostroke.cost.step_cost import ModelShape
from twostroke.errors import DoesNotFit, InvalidParameter, SetupError, shown
from twostroke.grammar.backend import GrammarBackend
from twostroke.grammar.guidance import Guidance
from twostroke.kernels.dispatch import Operators, dtype_for, operators_for
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.sizing import FreeMemory, KVRoom, KVSizing, size_kv_cache
from twostroke.log import get_logger
from twostroke.model.loader import check_weights
from twostroke.model.model_files import find_model, find_model_of, weights_of
from twostroke.model.registry import num_parameters
from twostroke.model.weight_size import weight_bytes
from twostroke.model.weight_source import WeightSource
from twostroke.runner.key_means import key_means_bytes
from twostroke.runner.memory import context_bytes, free_host_bytes, step_bytes
from twostroke.startup.cuda_device import check_cuda, check_dtype, check_gpu_for_each_rank, cuda_facts, device_of
from twostroke.startup.drafting import Drafter, DrafterFacts, Surroundings, find_drafter
from twostroke.startup.split_checks import check_can_split
from twostroke.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)

MOST_THREADS_PER_PROCESSOR = 8
"""Beyond it threads wait for each other: with 500 for each processor a prompt of a token took minutes."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be loaded, and what was read beside it."""

    path: Path
    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype
    kv_format: KVFormat
    device: torch.device
    operators: Operators
    num_threads: int
    cpus: tuple[int, ...]
    """That they are pinned to; none: they are not."""
    tokenizer: Tokenizer
    tokenizer_path: Path
    eos_token_ids: frozenset[int]
    grammars: GrammarBackend
    layout: KVLayout
    drafter: Drafter | None
    num_ranks: int

    @property
    def attention_dtype(self) -> torch.dtype:
        """The type that attention multiplies in."""
        return self.operators.attention_dtype(self.dtype, self.kv_format)

    @property
    def drafter_facts(self) -> DrafterFacts:
        """Of nobody, where nobody drafts."""
        return DrafterFacts() if self.drafter is None else self.drafter.facts


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """Where an engine's memory goes, in bytes, and what the KV blocks hold. Of several ranks, each rank's."""

    weight_bytes: int
    """Of several ranks, of the one that has most."""
    draft_weight_bytes: int
    """Of a draft model's, or of heads that draft."""
    step_bytes: int
    """Peak memory of the largest step."""
    context_bytes: int
    """Memory of tables that grow with the longest request."""
    reserve_bytes: int
    """Memory kept free beside them, and for recorded passes; on a GPU only."""
    memory: KVRoom
    """What is free once all weights are there, and what of it must stay free beside the KV cache."""
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    """What drafts keep beside it included."""
    sizing: KVSizing
    """Blocks, scratch blocks, the longest request, and how many of these fit."""


def prepare(config: EngineConfig, rank: int = 0, *, planned: Operators | None = None) -> Prepared:
    """Finds everything of a model but its weights.

    Args:
        config: everything a user may set.
        rank: which of the ranks this is; its device depends on it.
        planned: operators of a device that is not present; their memory is counted and nothing runs there. None: those
            of the device, which must be present.

    Raises:
        SetupError: whatever can be refused before a weight is read.
        InvalidParameter: a setting that does not go with the model.
    """
    load = config.load
    device = device_of(load, rank)
    facts = cuda_facts(device.index) if device.type == "cuda" and planned is None else None
    if facts is not None:
        check_cuda(facts)
        check_gpu_for_each_rank(facts, load)
        torch.cuda.set_device(device)  # of this thread, which is the one that computes where it is not the first
    files = find_model_of(load)
    model_config = files.config().fixed_for(load.max_model_len)
    weights = weights_of(files, model_config, load, device)
    dtype_name, kv_format = _types(config, model_config, weights, device)
    if facts is not None:
        check_dtype(facts, dtype_name)
    dtype = getattr(torch, dtype_name)
    operators = planned or operators_for(
        device, dtype, load.kernels, load.activation_quantization, batch_invariant=load.batch_invariant
    )
    if kv_format not in operators.kv_formats:
        raise InvalidParameter(
            "kv_cache_dtype",
            config.cache.kv_cache_dtype,
            f"the {operators.name} kernels do not read it; they read {', '.join(operators.kv_formats)}",
            "Take int8, or the kernels of torch (--kernels reference, slower) or of a GPU (--device cuda).",
        )
    if load.quantization == "fp8" and "fp8" not in operators.quantizations:
        raise InvalidParameter(
            "quantization",
            load.quantization,
            f"the {operators.name} kernels do not multiply it; they take {', '.join(operators.quantizations)}",
            "Take int8, or the kernels of torch (--kernels reference, slower) or of a GPU (--device cuda).",
        )
    check_can_split(config, model_config, operators)
    cpus = load.cpus_of(rank)
    num_threads = _num_threads(load, cpus)
    if cpus and operators.pin_threads is not None:
        operators.pin_threads(cpus)
    else:
        operators.set_num_threads(num_threads)
    of_tokenizer = files if load.tokenizer is None else find_model(load.tokenizer, with_weights=False)
    tokenizer = of_tokenizer.tokenizer()
    tokenizer.check_vocab(model_config.vocab_size)
    eos_token_ids = files.eos_token_ids(tokenizer, model_config.vocab_size)
    recommended = files.sampling_defaults()
    if recommended:
        log.info("%s: sampling defaults %s are not applied; give them per request", files.path.name, shown(recommended))
    if load.activation_quantization is not None and weights.quantization is None and load.quantization is None:
        raise SetupError(
            f"activation_quantization={load.activation_quantization}: it is about quantized weights, and those of "
            f"{files.path} are not. Leave it out, or quantize them (--quantization int8 or int4)."
        )
    check_weights(weights, model_config, load.quantization, load.group_size or DEFAULT_GROUP_SIZE)
    prepared = Prepared(
        files.path,
        model_config,
        weights,
        dtype,
        kv_format,
        device,
        operators,
        num_threads,
        cpus,
        tokenizer,
        of_tokenizer.path,
        eos_token_ids,
        Guidance(tokenizer, model_config.vocab_size, eos_token_ids),
        _layout(config, model_config, kv_format),
        None,
        load.tensor_parallel_size,
    )
    return replace(prepared, drafter=_drafter(config, prepared))


def _types(
    config: EngineConfig, model: ModelConfig, weights: WeightSource, device: torch.device
) -> tuple[str, KVFormat]:
    """Return the name of the type to compute in, and the format of K and V.

    A GGUF file of codes names no type; other checkpoints do. K and V do not become wider with its activations.
    """
    load, wanted = config.load, config.cache.kv_cache_dtype
    if load.dtype != "auto":
        return load.dtype, resolve_kv_format(wanted, load.dtype)
    stored = dtype_for(model.dtype, device, load.kernels)
    if stored != model.dtype:
        log.info("%s: computed in %s instead of %s (see --dtype)", weights.path.name, stored, model.dtype)
    matrices = [weight for weight in weights.weights.values() if len(weight.shape) > 1]
    are_codes = weights.quantization == "gguf" and all(weight.format is not None for weight in matrices)
    multiplies_codes = are_codes and load.activation_quantization != "none"
    computed = dtype_for(model.dtype, device, load.kernels, multiplies_codes=multiplies_codes)
    return computed, resolve_kv_format(wanted, stored)


def _layout(config: EngineConfig, model: ModelConfig, kv_format: KVFormat) -> KVLayout:
    """Return how a rank keeps KV."""
    ranks = config.load.tensor_parallel_size
    return KVLayout.of(
        [spec.of_rank(ranks) for spec in model.kv_specs], block_size=config.cache.block_size, kv_format=kv_format
    )


def moved_to(config: EngineConfig, prepared: Prepared, operators: Operators) -> Prepared:
    """Return the same model planned for the device of `config`, with operators whose memory is counted.

    Raises:
        InvalidParameter: several ranks cannot share the model there.
    """
    check_can_split(config, prepared.config, operators)
    device = device_of(config.load, 0)
    dtype_name, kv_format = _types(config, prepared.config, prepared.weights, device)
    moved = replace(
        prepared,
        device=device,
        operators=operators,
        dtype=getattr(torch, dtype_name),
        kv_format=kv_format,
        layout=_layout(config, prepared.config, kv_format),
    )
    return replace(moved, drafter=_drafter(config, moved))


def _drafter(config: EngineConfig, prepared: Prepared) -> Drafter | None:
    if config.speculative_config is None:
        return None
    around = Surroundings(
        prepared.path,
        prepared.config,
        prepared.tokenizer,
        prepared.dtype,
        prepared.device,
        prepared.operators,
        prepared.kv_format,
        prepared.layout,
        longest_request(config, prepared),
    )
    return find_drafter(config.speculative_config, around)


def account_for_memory(
    config: EngineConfig, prepared: Prepared, *, free_bytes: int | None = None, share: float = 1.0
) -> MemoryAccount:
    """What the weights take, and how the rest is cut up.

    Args:
        config: everything a user may set.
        prepared: what it comes to.
        free_bytes: of the device; None: as much as is free now.
        share: of them that is this engine's.

    Raises:
        DoesNotFit: the weights are larger than that, or an explicit size is, with the arithmetic.
    """
    num_weight_bytes = loaded_weight_bytes(config, prepared, config.load.tensor_parallel_size)
    memory = free_memory(config, prepared, num_weight_bytes, share, free_bytes)
    drafts = prepared.drafter_facts
    return MemoryAccount(
        weight_bytes=num_weight_bytes,
        draft_weight_bytes=drafts.num_weight_bytes,
        step_bytes=memory.step_bytes,
        context_bytes=memory.context_bytes,
        reserve_bytes=0,
        memory=memory,
        kv_bytes_per_token=prepared.layout.bytes_per_token,
        kv_bytes_per_block=prepared.layout.bytes_per_block + drafts.kv_bytes_per_block,
        sizing=size_for(config, prepared, memory),
    )


def size_for(config: EngineConfig, prepared: Prepared, memory: KVRoom) -> KVSizing:
    """How the room for KV is cut up.

    Raises:
        DoesNotFit: an explicit size is larger than the room, with the arithmetic.
    """
    return size_kv_cache(
        prepared.layout,
        config.cache,
        max_model_len=config.load.max_model_len,
        model_context=prepared.config.max_context,
        max_tokens_per_step=max_tokens_per_step(config, prepared.config),
        max_num_seqs=config.scheduler.max_num_seqs,
        memory=memory,
        bytes_beside_block=prepared.drafter_facts.kv_bytes_per_block,
    )


def loaded_weight_bytes(config: EngineConfig, prepared: Prepared, num_ranks: int = 1) -> int:
    """Return the bytes of the weights, of the rank that has most. With quantized KV, means of keys count."""
    means = key_means_bytes(prepared.config, prepared.kv_format, prepared.dtype.itemsize)
    return means + weight_bytes(
        prepared.weights,
        prepared.config,
        prepared.dtype,
        prepared.operators,
        config.load.quantization,
        config.load.group_size or DEFAULT_GROUP_SIZE,
        num_ranks,
    )


def model_shape(config: EngineConfig, prepared: Prepared) -> ModelShape:
    """The numbers that operations and bytes are counted from, for all ranks together."""
    model = prepared.config
    return ModelShape(
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        layers=model.layers,
        bytes_per_weight=loaded_weight_bytes(config, prepared) / num_parameters(model),
        kv_format=prepared.layout.kv_format,
    )


def free_memory(
    config: EngineConfig,
    prepared: Prepared,
    num_weight_bytes: int,
    share: float = 1.0,
    free_bytes: int | None = None,
) -> FreeMemory:
    """What there is for KV, of the share of the free memory that is this engine's.

    Args:
        config: everything a user may set.
        prepared: what it comes to.
        num_weight_bytes: of each rank's share of the model, drafts left out.
        share: of the free memory.
        free_bytes: of the device; None: as much as is free now.

    Raises:
        DoesNotFit: it does not hold the weights.
    """
    tables = context_bytes(
        prepared.config,
        prepared.layout,
        max_model_len=longest_request(config, prepared),
        max_num_seqs=config.scheduler.max_num_seqs,
        bytes_per_element=prepared.dtype.itemsize,
    )
    if free_bytes is None:
        free_bytes = free_bytes_of(prepared.device)
    free = int(share * free_bytes) // config.load.num_local_ranks
    if prepared.device.type == "cpu":  # both are cut from the same memory
        free -= _checked_offloading(config, prepared, free)
    return FreeMemory(
        free_bytes=free - _checked_weight_bytes(config, prepared, num_weight_bytes, free),
        step_bytes=_step_bytes(config, prepared),
        context_bytes=tables,
    )


def check_weights_fit(config: EngineConfig, prepared: Prepared) -> None:
    """Before a weight is read onto a card; how much else fits is measured when they are there.

    Raises:
        DoesNotFit: they are larger than what is free there.
    """
    num_weight_bytes = loaded_weight_bytes(config, prepared, config.load.tensor_parallel_size)
    _checked_weight_bytes(config, prepared, num_weight_bytes, free_bytes_of(prepared.device))
    _checked_offloading(config, prepared, free_host_bytes() // config.load.num_local_ranks)


def _checked_offloading(config: EngineConfig, prepared: Prepared, free: int) -> int:
    """Bytes of host memory for what the pool evicts.

    Raises:
        DoesNotFit: more than is free there, or less than a block.
    """
    asked, per_block = config.cache.kv_offloading_size or 0, prepared.layout.bytes_per_block
    if asked > free:
        raise DoesNotFit(f"kv_offloading_size={asked:,} bytes; {free:,} are free in host memory. Lower it.")
    if 0 < asked < per_block:
        raise DoesNotFit(f"kv_offloading_size={asked:,} bytes; one KV block takes {per_block:,}. Give more.")
    return asked


def _checked_weight_bytes(config: EngineConfig, prepared: Prepared, num_weight_bytes: int, free: int) -> int:
    """With those of drafts.

    Raises:
        DoesNotFit: they are more than is free.
    """
    num_weight_bytes += prepared.drafter_facts.num_weight_bytes
    if num_weight_bytes > free:
        raise DoesNotFit(
            f"the weights of {prepared.path.name} take {num_weight_bytes:,} bytes; {free:,} are free on "
            f"{prepared.device.type}. {_what_would_fit(config, prepared, free)}"
        )
    return num_weight_bytes


def _what_would_fit(config: EngineConfig, prepared: Prepared, free: int) -> str:
    """The least quantization that makes the weights small enough, where one does."""
    floats = config.load.quantization is None and prepared.weights.quantization is None
    choices: list[QuantizationOnLoad] = ["int8", "int4"] if floats and prepared.operators.keeps_quantized else []
    for quantization in choices:
        quantized = replace(config, load=replace(config.load, quantization=quantization))
        num_bytes = loaded_weight_bytes(quantized, prepared, config.load.tensor_parallel_size)
        if num_bytes < free:
            return f"With --quantization {quantization} they take {num_bytes:,}; or free some memory."
    return "Free some memory, or take a smaller model."


def int8_operators(config: EngineConfig, prepared: Prepared) -> Operators | None:
    """Return the operators that multiply this model's weights in 8 bits; None where products are of floats."""
    is_quantized = config.load.quantization is not None or prepared.weights.quantization is not None
    multiplies_codes = prepared.device.type == "cpu" and prepared.operators.keeps_quantized
    if not is_quantized or not multiplies_codes or config.load.activation_quantization == "none":
        return None
    return prepared.operators


def max_tokens_per_step(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens that one step can add to one request."""
    if config.scheduler.enable_chunked_prefill:
        return config.scheduler.max_num_batched_tokens
    return model.max_context


def step_tokens(config: EngineConfig, prepared: Prepared) -> int:
    """Of the largest step; no step has more tokens than all its requests together."""
    longest, scheduler = longest_request(config, prepared), config.scheduler
    most = scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill:
        most = max(most, longest + scheduler.max_num_seqs)
    if config.cache.kv_check_rate:  # a pass over one block is a step, too
        most = max(most, config.cache.block_size)
    return min(most, longest * scheduler.max_num_seqs)


def _step_bytes(config: EngineConfig, prepared: Prepared) -> int:
    """What the largest step takes, and what drafts keep of steps."""
    max_tokens, max_num_seqs = step_tokens(config, prepared), config.scheduler.max_num_seqs
    drafts = prepared.drafter_facts
    kept = drafts.bytes_per_token * max_tokens + drafts.bytes_per_request * max_num_seqs
    return (
        kept
        + drafts.num_branch_blocks * prepared.layout.bytes_per_block
        + step_bytes(
            prepared.config,
            max_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
            bytes_per_element=prepared.dtype.itemsize,
        )
    )


def longest_request(config: EngineConfig, prepared: Prepared) -> int:
    """What is asked for; whether the KV memory holds it comes out later."""
    return config.load.max_model_len or prepared.config.max_context


def _check_cpus(load: LoadConfig) -> None:
    """Refuse CPUs that this process may not use, those of other ranks here included."""
    name, given = "cpu_affinity", load.cpu_affinity
    if not hasattr(os, "sched_setaffinity"):
        limit = f"{platform.system()} has no sched_setaffinity, by which threads are pinned"
        raise InvalidParameter(name, given, limit, "Leave it out.")
    usable = sorted(os.sched_getaffinity(0))
    foreign = [cpu for rank in range(load.num_local_ranks) for cpu in load.cpus_of(rank) if cpu not in usable]
    if foreign:
        limit = f"this process may not use {show_cpus(foreign)}; it may use {show_cpus(usable)}"
        remedy = "Name some of these, or start it with a larger set (taskset, the container's cpuset)."
        raise InvalidParameter(name, given, limit, remedy)


def _num_threads(load: LoadConfig, cpus: Sequence[int]) -> int:
    """Return the threads of the operators.

    Raises:
        InvalidParameter: so many for each processor that they would only wait for each other, or CPUs that this
            process may not use.
    """
    if cpus:
        _check_cpus(load)
        return len(cpus)
    processors = usable_processors()
    if load.threads is None:
        return max(1, processors // load.num_local_ranks)
    if load.threads > MOST_THREADS_PER_PROCESSOR * processors:
        limit = f"must be at most {MOST_THREADS_PER_PROCESSOR} for each of the {processors} processors here"
        raise InvalidParameter("threads", load.threads, limit, "Leave it out: one for each is the fastest.")
    return load.threads


def usable_processors() -> int:
    """Those this process may run on; where the system does not say (macOS, Windows), all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes_of(device: torch.device) -> int:
    """What can be taken of it now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()
