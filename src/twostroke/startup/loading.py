"""Loading of a rank: reads its weights and builds its runner."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from twostroke.config.load import DEFAULT_GROUP_SIZE
from twostroke.errors import InvalidParameter
from twostroke.kv_cache.host_tier import host_slots
from twostroke.kv_cache.sizing import KVSizing
from twostroke.layers.row_split import RowSplit
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model
from twostroke.model.packed_cache import PackedCache, default_folder
from twostroke.runner.async_runner import AsyncModelRunner
from twostroke.runner.decode_graphs import CudaGraphs, DecodeGraphs, Recorder, recordable
from twostroke.runner.drafting import SpeculativeModelRunner
from twostroke.runner.key_means import center_keys
from twostroke.runner.kv_moves import KVMover
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.memory_probe import MemoryProbe
from twostroke.runner.model_runner import ModelRunner, RunnerParts
from twostroke.sampling.sampler import Sampler
from twostroke.startup.measured_memory import KVSize, measure_and_size
from twostroke.startup.prepared import LoadedTarget, Prepared


def load_rank(
    prepared: Prepared,
    kv_size: KVSizing | MemoryProbe,
    split: RowSplit,
    descriptor: int | None = None,
    *,
    finds_key_means: bool,
) -> tuple[ModelRunner, KVSize]:
    """Read the weights of a rank and build its runner, with its KV cache in shared memory if that is given.

    Quantized KV stores keys less their means; a process that converts KV from or to a quantized format needs them too.

    Returns:
        The runner, and the size of its KV cache.
    """
    settings = prepared.settings
    is_known = isinstance(kv_size, KVSizing)
    model = load_model(
        prepared.weights,
        prepared.config,
        Placement(
            prepared.operators,
            prepared.dtype,
            prepared.device,
            kv_size.max_model_len if is_known else prepared.longest_request,
            split,
        ),
        quantization=settings.load.quantization,
        group_size=settings.load.group_size or DEFAULT_GROUP_SIZE,
        cache=_packed_cache(prepared),
    )
    if finds_key_means:
        center_keys(model, prepared.tokenizer.encode, prepared.dtype, prepared.device, split)
    sampler = Sampler(
        prepared.config.vocab_size,
        prepared.eos_token_ids,
        prepared.device,
        prepared.operators.gumbel_argmax,
        prepared.operators.filtered_argmax,
        prepared.operators.argmax,
    )
    sized = KVSize(kv_size) if is_known else measure_and_size(prepared, model, sampler, kv_size, split)
    sizing = sized.sizing
    kv = KVStorage(
        prepared.layout,
        sizing.num_blocks,
        prepared.device,
        sizing.num_scratch_blocks,
        prepared.drafter_facts.num_branch_blocks,
        descriptor,
    )
    target = LoadedTarget(
        model=model,
        kv=kv,
        sampler=sampler,
        max_model_len=sizing.max_model_len,
        max_tokens=prepared.step_tokens,
        max_num_seqs=settings.scheduler.max_num_seqs,
    )
    proposer = None if prepared.drafter is None else prepared.drafter.build(target)
    assert not (settings.schedules_ahead and proposer), "drafting needs the tokens of the previous step"
    parts = RunnerParts(
        graphs=_graphs(prepared, target),
        mover=KVMover(kv, num_slots) if (num_slots := host_slots(settings.cache, prepared.layout)) else None,
        # torch's threads stay on the CPUs of the thread that runs the model
        cpus=prepared.cpus if prepared.operators.pin_threads is None else prepared.cpus[:1],
    )
    kind = AsyncModelRunner if settings.schedules_ahead else ModelRunner
    if proposer is not None:
        kind = partial(SpeculativeModelRunner, proposer)
    runner = kind(model, kv, sampler, max_model_len=sizing.max_model_len, grammars=prepared.grammars, parts=parts)
    return runner, sized


def _packed_cache(prepared: Prepared) -> PackedCache | None:
    """Return the cache for packed weights; None if `packed_cache` is not set.

    Raises:
        InvalidParameter: the operators keep none.
        SetupError: its folder cannot be created.
        CorruptCheckpoint: a hash differs from the stored one.
    """
    load = prepared.settings.load
    if load.packed_cache is None:
        return None
    if not prepared.operators.name.startswith("native "):
        limit = f"keeps what native kernels pack; this model runs on {prepared.operators.name}"
        raise InvalidParameter("packed_cache", load.packed_cache, limit, "Leave it out.")
    folder = default_folder() if load.packed_cache == "default" else Path(load.packed_cache).expanduser()
    form = {
        "dtype": str(prepared.dtype),
        "quantization": load.quantization or prepared.weights.quantization,
        "group_size": load.group_size or DEFAULT_GROUP_SIZE,
        "kernels": prepared.operators.name,
    }
    return PackedCache(folder, prepared.weights.path, form, verify=load.verify)


def _graphs(prepared: Prepared, target: LoadedTarget) -> DecodeGraphs | None:
    """Return the recorded passes; None if passes cannot be recorded.

    They cannot with several ranks, which gather in between, or with experts whose rows are counted on the host.
    """
    is_alike = prepared.num_ranks == 1 and not target.model.syncs_expert_counts
    recorder = _recorder(prepared.device.type) if is_alike else None
    layout = target.kv.attention_layout(target.model.num_heads)
    is_eager = prepared.settings.load.enforce_eager
    if recorder is None or is_eager or recordable(target.model.attention, layout) is None:
        return None
    return DecodeGraphs(
        target.model,
        target.kv,
        max_model_len=target.max_model_len,
        max_num_seqs=target.max_num_seqs,
        max_num_tokens=target.max_tokens,
        device=prepared.device,
        recorder=recorder,
    )


def _recorder(device_type: str) -> Recorder | None:
    return CudaGraphs() if device_type == "cuda" else None
