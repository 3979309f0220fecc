"""Resolution of settings against a model's files, with all checks that are possible before a weight is read."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch

from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import KVFormat, resolve_kv_format
from twostroke.config.load import DEFAULT_GROUP_SIZE, LoadConfig, cpu_words
from twostroke.config.model import ModelConfig
from twostroke.errors import InvalidParameter, SetupError, shown
from twostroke.grammar.guidance import Guidance
from twostroke.kernels.dispatch import dtype_for, operators_for
from twostroke.kernels.interface import Operators
from twostroke.kv_cache.layout import KVLayout
from twostroke.log import get_logger
from twostroke.model.loader import check_weights, router_parts
from twostroke.model.model_files import find_model, find_model_of, weights_of
from twostroke.model.registry import architecture
from twostroke.model.weight_source import WeightSource
from twostroke.startup.cuda_device import check_cuda, check_dtype, check_gpu_for_each_rank, cuda_facts, device_of
from twostroke.startup.drafting import find_drafter
from twostroke.startup.prepared import Prepared

log = get_logger(__name__)

MAX_THREADS_PER_PROCESSOR = 8
"""Most threads per processor; more wait for each other: with 500, a prompt of one token took minutes."""


def check_can_split(config: EngineConfig, model: ModelConfig, operators: Operators) -> None:
    """Refuse a number of ranks that is not implemented, or would not give the bits of one rank.

    Raises:
        InvalidParameter: tensor_parallel_size does not go with the model or with another setting.
    """
    size = config.load.tensor_parallel_size
    if size == 1:
        return
    if config.load.enable_expert_parallel:
        _check_can_deal_experts(size, model)

    def refuse(limit: str, remedy: str) -> None:
        raise InvalidParameter("tensor_parallel_size", size, limit, remedy)

    num_heads = math.gcd(*(layer.num_heads for layer in model.kinds))
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    sizes = [n for n in divisors if all(spec.can_split_heads(n) for spec in model.kv_specs)]
    if size not in sizes:
        kv_heads = " or ".join(str(n) for n in sorted({spec.num_kv_heads for spec in model.kv_specs}))
        refuse(
            f"must divide the {num_heads} query heads of the model, and divide its {kv_heads} KV heads or be a "
            "multiple of them",
            f"Take one of {', '.join(map(str, sizes))}.",
        )
    if not architecture(model.architecture).can_split:
        refuse(f"{model.architecture} is not written for a share of its heads", "Leave it out.")
    if operators.name == "reference":
        refuse(
            f"with kernels=reference and {model.dtype}, bits may depend on a matrix's number of rows",
            "Take the native kernels (--kernels auto, --dtype float32 or bfloat16), or leave it out.",
        )
    speculation = config.speculative_config
    if speculation is not None and speculation.method != "ngram":
        refuse(f"the drafts of {speculation.method} come from one rank so far", 'Take "ngram", or leave one out.')
    if config.cache.kv_check_rate:
        refuse(
            f"kv_check_rate={config.cache.kv_check_rate}: a cached block is compared on one rank so far",
            "Leave one of them out.",
        )


def _check_can_deal_experts(num_ranks: int, model: ModelConfig) -> None:
    """Refuse expert parallelism for a model without experts, or with more ranks than experts.

    Raises:
        InvalidParameter: enable_expert_parallel does not go with the model.
    """
    nums = [layer.experts.num_experts for layer in model.kinds if layer.experts is not None]
    if not nums:
        limit = f"deals experts to ranks, and {model.architecture} has none here"
        raise InvalidParameter("enable_expert_parallel", True, limit, "Leave it out.")
    if min(nums) < num_ranks:
        limit = f"deals {min(nums)} experts to tensor_parallel_size={num_ranks} ranks, each of which must have one"
        raise InvalidParameter("enable_expert_parallel", True, limit, "Take fewer ranks, or leave it out.")


def prepare(settings: EngineConfig, rank: int = 0, *, planned: Operators | None = None) -> Prepared:
    """Find everything of a model except its weights.

    Args:
        settings: all settings of the user.
        rank: this rank; its device depends on it.
        planned: operators of a device that is not present; their memory is counted and nothing runs there. None: those
            of the device, which must be present.

    Raises:
        SetupError: any error that can be found before a weight is read.
        InvalidParameter: a setting that does not go with the model.
    """
    load = settings.load
    device = device_of(load, rank)
    facts = cuda_facts(device.index) if device.type == "cuda" and planned is None else None
    if facts is not None:
        check_cuda(facts)
        check_gpu_for_each_rank(facts, load)
        torch.cuda.set_device(device)  # for this thread, which computes
    files = find_model_of(load)
    config = files.config().fixed_for(load.max_model_len)
    weights = weights_of(files, config, load, device)
    dtype_name, kv_format = _types(settings, config, weights, device)
    if facts is not None:
        check_dtype(facts, dtype_name)
    dtype = getattr(torch, dtype_name)
    operators = planned or operators_for(
        device, dtype, load.kernels, load.activation_quantization, batch_invariant=load.batch_invariant
    )
    _check_formats(settings, operators, kv_format)
    check_can_split(settings, config, operators)
    cpus = load.cpus_of(rank)
    num_threads = _num_threads(load, cpus)
    if cpus and operators.pin_threads is not None:
        operators.pin_threads(cpus)
    else:
        operators.set_num_threads(num_threads)
    of_tokenizer = files if load.tokenizer is None else find_model(load.tokenizer, with_weights=False)
    tokenizer = of_tokenizer.tokenizer()
    tokenizer.check_vocab(config.vocab_size)
    eos_token_ids = files.eos_token_ids(tokenizer, config.vocab_size)
    recommended = files.sampling_defaults()
    if recommended:
        log.info("%s: sampling defaults %s are not applied; give them per request", files.path.name, shown(recommended))
    if load.activation_quantization is not None and weights.quantization is None and load.quantization is None:
        raise SetupError(
            f"activation_quantization={load.activation_quantization}: it needs quantized weights, and those of "
            f"{files.path} are not. Leave it out, or quantize them (--quantization int8 or int4)."
        )
    check_weights(weights, config, load.quantization, load.group_size or DEFAULT_GROUP_SIZE)
    return _with_drafter(
        Prepared(
            settings=settings,
            path=files.path,
            config=config,
            weights=weights,
            dtype=dtype,
            kv_format=kv_format,
            device=device,
            operators=operators,
            num_threads=num_threads,
            cpus=cpus,
            tokenizer=tokenizer,
            tokenizer_path=of_tokenizer.path,
            eos_token_ids=eos_token_ids,
            grammars=Guidance(tokenizer, config.vocab_size, eos_token_ids),
            layout=_layout(settings, config, kv_format),
        )
    )


def moved_to(prepared: Prepared, operators: Operators) -> Prepared:
    """Return the same model prepared for another device, with operators whose memory is only counted.

    Raises:
        InvalidParameter: several ranks cannot share the model there.
    """
    settings = prepared.settings
    check_can_split(settings, prepared.config, operators)
    device = device_of(settings.load, 0)
    dtype_name, kv_format = _types(settings, prepared.config, prepared.weights, device)
    return _with_drafter(
        replace(
            prepared,
            device=device,
            operators=operators,
            dtype=getattr(torch, dtype_name),
            kv_format=kv_format,
            layout=_layout(settings, prepared.config, kv_format),
        )
    )


def _with_drafter(prepared: Prepared) -> Prepared:
    wanted = prepared.settings.speculative_config
    return prepared if wanted is None else replace(prepared, drafter=find_drafter(wanted, prepared))


def _check_formats(settings: EngineConfig, operators: Operators, kv_format: KVFormat) -> None:
    """Refuse formats that the operators do not support."""
    remedy = "Take int8, or the kernels of torch (--kernels reference, slower) or of a GPU (--device cuda)."
    if kv_format not in operators.kv_formats:
        limit = f"the {operators.name} kernels do not read it; they read {', '.join(operators.kv_formats)}"
        raise InvalidParameter("kv_cache_dtype", settings.cache.kv_cache_dtype, limit, remedy)
    if settings.load.quantization == "fp8" and "fp8" not in operators.quantizations:
        limit = f"the {operators.name} kernels do not multiply it; they take {', '.join(operators.quantizations)}"
        raise InvalidParameter("quantization", "fp8", limit, remedy)


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
    routers = router_parts(model)
    matrices = [one for name, one in weights.weights.items() if len(one.shape) > 1 and name not in routers]
    are_codes = weights.quantization == "gguf" and all(weight.format is not None for weight in matrices)
    multiplies_codes = are_codes and load.activation_quantization != "none"
    computed = dtype_for(model.dtype, device, load.kernels, multiplies_codes=multiplies_codes)
    return computed, resolve_kv_format(wanted, stored)


def _layout(config: EngineConfig, model: ModelConfig, kv_format: KVFormat) -> KVLayout:
    """Return a rank's KV layout."""
    ranks = config.load.tensor_parallel_size
    return KVLayout.of(
        [spec.for_rank(ranks) for spec in model.kv_specs], block_size=config.cache.block_size, kv_format=kv_format
    )


def _check_cpus(load: LoadConfig) -> None:
    """Refuse CPUs that this process may not use, including those of other ranks on this host."""
    name, given = "cpu_affinity", load.cpu_affinity
    if not hasattr(os, "sched_setaffinity"):
        limit = f"{platform.system()} has no sched_setaffinity, by which threads are pinned"
        raise InvalidParameter(name, given, limit, "Leave it out.")
    usable = sorted(os.sched_getaffinity(0))
    foreign = [cpu for rank in range(load.num_local_ranks) for cpu in load.cpus_of(rank) if cpu not in usable]
    if foreign:
        limit = f"this process may not use {cpu_words(foreign)}; it may use {cpu_words(usable)}"
        remedy = "Name some of these, or start it with a larger set (taskset, the container's cpuset)."
        raise InvalidParameter(name, given, limit, remedy)


def _num_threads(load: LoadConfig, cpus: Sequence[int]) -> int:
    """Return the number of threads of the operators.

    Raises:
        InvalidParameter: so many per processor that they would only wait for each other, or CPUs that this process may
            not use.
    """
    if cpus:
        _check_cpus(load)
        return len(cpus)
    processors = usable_processors()
    if load.threads is None:
        return max(1, processors // load.num_local_ranks)
    if load.threads > MAX_THREADS_PER_PROCESSOR * processors:
        limit = f"must be at most {MAX_THREADS_PER_PROCESSOR} for each of the {processors} processors here"
        raise InvalidParameter("threads", load.threads, limit, "Leave it out: one for each is the fastest.")
    return load.threads


def usable_processors() -> int:
    """Return the number of processors that this process may use; all where that is unknown (macOS, Windows)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
