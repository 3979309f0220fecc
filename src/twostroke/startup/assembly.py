"""Puts an engine together: the one place where model, memory, scheduler and text meet."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from twostroke.communicator.interface import Communicator
from twostroke.config.cpu_list import show_cpus
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import is_quantized
from twostroke.config.load import DEFAULT_GROUP_SIZE
from twostroke.config.model import ModelConfig
from twostroke.cost.step_cost import Layers, MachineLimits, ModelShape
from twostroke.cost.step_model import StepTimeModel
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.engine.facts import NOTE, EngineFacts
from twostroke.engine.handover_port import LenderFacts
from twostroke.engine.journal import Journal, engine_started
from twostroke.engine.kv_self_check import KVSelfCheck
from twostroke.engine.pool_engine import PoolEngine
from twostroke.errors import DoesNotFit, InvalidParameter, RankLost, SetupError
from twostroke.event_codec import plain
from twostroke.events import EventLog
from twostroke.grammar.backend import GrammarBackend
from twostroke.kernels.large_pages import return_unused
from twostroke.kernels.reference.row_tiles import proofs
from twostroke.kv_cache.host_tier import host_slots
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.sizing import KVSizing
from twostroke.kv_check import tolerance
from twostroke.kv_transfer.geometry import KVGeometry, layout_facts
from twostroke.kv_transfer.memory import SharedMemory
from twostroke.layers.row_split import RowSplit
from twostroke.log import get_logger
from twostroke.model.decoder import DecoderModel
from twostroke.model.loader import load_model
from twostroke.model.packed_cache import PackedCache, default_folder
from twostroke.model.random_weights import RandomWeights
from twostroke.model.registry import num_parameters
from twostroke.process_memory import own_anonymous_bytes
from twostroke.runner.decode_graphs import CudaGraphs, DecodeGraphs, Recorder, recordable
from twostroke.runner.drafting import DraftingRunner
from twostroke.runner.executor import Executor, InProcessExecutor
from twostroke.runner.key_means import TEXT as KEY_MEANS_TEXT
from twostroke.runner.key_means import center_keys
from twostroke.runner.kv_moves import KVMover
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.machine_limits import measure_machine_limits
from twostroke.runner.memory_probe import MemoryProbe, probe_of
from twostroke.runner.model_runner import ModelRunner, RunnerParts
from twostroke.runner.running_ahead import RunnerAhead
from twostroke.runner.tensor_parallel import TensorParallelExecutor, follow
from twostroke.sampling.sampler import Sampler
from twostroke.scheduler.scheduler import Scheduler
from twostroke.startup.drafting import Drafter, Target
from twostroke.startup.handover_ends import HandoverEnds, open_ends, shared_memory_for
from twostroke.startup.identity import identity_facts, numerics_facts
from twostroke.startup.measured_memory import Sized, measure_and_size
from twostroke.startup.pace import Pace, pace_of
from twostroke.startup.preparation import (
    Prepared,
    account_for_memory,
    check_weights_fit,
    free_memory,
    int8_operators,
    loaded_weight_bytes,
    longest_request,
    model_shape,
    prepare,
    step_tokens,
)
from twostroke.startup.ranks import KVDecision, Ranks, RankStart
from twostroke.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)

_Costs = tuple[ModelShape, MachineLimits, Pace]
"""What the costs and the times of steps are worked out from."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and what the side that speaks text has to know of it."""

    engine: Engine
    facts: EngineFacts
    tokenizer: Tokenizer
    grammars: GrammarBackend
    lender: LenderFacts | None = None
    """Where its KV can be fetched; None: nowhere."""
    geometry: KVGeometry | None = None
    """What it computes and by what, in a pool."""
    machine: MachineLimits | None = None
    """What the machine can do."""


def build_engine(
    config: EngineConfig,
    around_executor: Callable[[Executor], Executor] | None = None,
    listeners: Sequence[EventLog] = (),
    around_drafter: Callable[[Drafter], Drafter] | None = None,
    handover: HandoverEnds | None = None,
    machine: MachineLimits | None = None,
    step_times: StepTimeModel | None = None,
) -> BuiltEngine:
    """Loads a model and builds the engine that runs sequences of its token ids.

    Args:
        config: everything a user may set.
        around_executor: puts another executor around the one that computes, to watch it (benchmarks do).
        listeners: hear every event, beside the file and the ring of the engine's own.
        around_drafter: puts another drafter around the one that the settings name, or in its place (benchmarks do).
        handover: where KV goes and comes from, in an engine that is one of a pool.
        machine: what the machine can do; None: that is measured.
        step_times: what limits of time are kept by; None: a calibration, if there is one.

    Raises:
        SetupError: no such model, files that contradict each other, sizes that do not fit.
        InvalidParameter: the event log cannot be written.
    """
    begin_s = time.perf_counter()
    loaded = prepare(config)
    if around_drafter is not None and loaded.drafter is not None:
        loaded = replace(loaded, drafter=around_drafter(loaded.drafter))
    return_unused()  # reading a large tokenizer takes twice what it keeps
    layout = loaded.layout
    shape = model_shape(config, loaded)

    @cache
    def costs() -> _Costs:
        num_threads = loaded.num_threads * config.load.num_local_ranks
        limits = machine or measure_machine_limits(
            loaded.attention_dtype, loaded.device, num_threads, int8_operators(config, loaded)
        )
        return shape, limits, pace_of(config, loaded.path, shape, limits, step_times)

    if loaded.device.type != "cpu" or loaded.num_ranks > 1:
        costs()  # while there is memory on the card, and no rank waits
    # on a CPU it is measured behind the weights, when the server's process has ended its own preparations
    kv_size = _kv_size(config, loaded, handover, probe_of(loaded.device))
    with ExitStack() as if_it_fails:
        # opened before a weight is read, which may take minutes: a path that cannot be written is refused at once
        path = config.load.event_log
        event_log = None if path is None else if_it_fails.enter_context(JsonlEventLog(path))
        engine, lender, geometry, sized = _build_engine(
            config, loaded, layout, kv_size, costs, event_log, listeners, around_executor, handover
        )
        if_it_fails.pop_all()  # the engine's from here on
    sizing = sized.sizing
    _, limits, pace = costs()
    num_weight_bytes = loaded_weight_bytes(config, loaded, config.load.tensor_parallel_size)
    lines = _startup_lines(loaded, num_weight_bytes, layout, sizing, time.perf_counter() - begin_s)
    lines += () if sized.memory is None else (f"memory   {sized.memory.account}",)
    lines += pace.lines
    for line in lines:
        log.log(logging.WARNING if line.startswith(NOTE) else logging.INFO, line)
    facts = EngineFacts(
        model=loaded.path.name,
        tokenizer_path=str(loaded.tokenizer_path),
        max_model_len=sizing.max_model_len,
        max_logprobs=config.load.max_logprobs,
        vocab_size=loaded.config.vocab_size,
        hidden_size=loaded.config.hidden_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        max_num_seqs=config.scheduler.max_num_seqs,
        num_blocks=sizing.num_blocks,
        block_size=layout.block_size,
        prefix_tokens=layout.prefix_tokens,
        uses_priority=config.scheduler.policy == "priority",
        serves_background=config.scheduler.serves_background,
        is_fair=config.scheduler.policy == "fair",
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_cache_dtype=layout.kv_format,
        kernels=loaded.operators.name,
        num_threads=loaded.num_threads,
        kv_bytes_per_token=layout.bytes_per_token * loaded.num_ranks,
        num_layers=loaded.config.num_layers,
        startup_lines=lines,
    )
    return BuiltEngine(engine, facts, loaded.tokenizer, loaded.grammars, lender, geometry, limits)


def _build_engine(  # noqa: PLR0913 (everything that was found out before)
    config: EngineConfig,
    loaded: Prepared,
    layout: KVLayout,
    kv_size: KVSizing | MemoryProbe,
    costs: Callable[[], _Costs],
    event_log: JsonlEventLog | None,
    listeners: Sequence[EventLog],
    around_executor: Callable[[Executor], Executor] | None,
    handover: HandoverEnds | None,
) -> tuple[Engine, LenderFacts | None, KVGeometry | None, Sized]:
    """Reads the weights and builds what runs them."""
    shared: SharedMemory | None = None
    if handover is not None:
        assert isinstance(kv_size, KVSizing), "memory that is shared is made before a weight is read"
        num_kv_blocks = kv_size.num_blocks + kv_size.num_scratch_blocks + loaded.drafter_facts.num_branch_blocks
        shared = shared_memory_for(handover.port, loaded.num_ranks, num_kv_blocks * layout.bytes_per_block)
    converts_kv = handover is not None and handover.port.fetches and handover.port.allows_drift
    executor, runner, sized = _executor(
        config, loaded, kv_size, () if shared is None else shared.descriptors, converts_kv=converts_kv
    )
    sizing, pace = sized.sizing, costs()[2]
    manager = KVCacheManager(layout, sizing.num_blocks, config.cache, sizing.max_model_len)
    scheduler = Scheduler(
        config.scheduler,
        manager,
        max_model_len=sizing.max_model_len,
        speculation=config.speculative_config,
        max_drafts=loaded.drafter_facts.max_drafts,
        step_times=pace.step_times,
        layers=Layers(loaded.config.layer_windows),
    )
    process = "" if handover is None else handover.port.name
    journal = _journal(config, loaded, layout, sizing, costs(), event_log, listeners, process)
    executor = executor if around_executor is None else around_executor(executor)
    size, hashes_blocks = layout.block_size, config.cache.enable_prefix_caching
    if handover is not None:
        geometry = _geometry(config, loaded, runner)
        ends, where = open_ends(handover, geometry, scheduler, journal, runner, shared)
        pooled = PoolEngine(scheduler, executor, ends, block_size=size, hashes_blocks=hashes_blocks, journal=journal)
        return pooled, where, geometry, sized
    self_check = None
    if config.cache.kv_check_rate:
        dtype = str(loaded.attention_dtype).removeprefix("torch.")
        most = tolerance(layout.kv_format, dtype, loaded.config.num_layers)
        self_check = KVSelfCheck(scheduler, executor, block_size=size, tolerance=most)
    engine = Engine(
        scheduler,
        executor,
        block_size=size,
        hashes_blocks=hashes_blocks,
        journal=journal,
        self_check=self_check,
    )
    return engine, None, None, sized


def _kv_size(
    config: EngineConfig, loaded: Prepared, handover: HandoverEnds | None, probe: MemoryProbe | None
) -> KVSizing | MemoryProbe:
    """How many KV blocks there are, or who will measure that when the weights are there.

    Raises:
        DoesNotFit: the weights do not, or an explicit size, with the arithmetic.
        SetupError: a card's KV is to be handed over.
    """
    if probe is None:
        share = 1.0 if handover is None else handover.port.memory_share
        return account_for_memory(config, loaded, share=share).sizing
    if handover is not None:
        raise SetupError(f"device={config.load.device}: KV of a card is not handed over so far. Take --device cpu.")
    check_weights_fit(config, loaded)
    return probe


def _executor(
    config: EngineConfig,
    loaded: Prepared,
    kv_size: KVSizing | MemoryProbe,
    descriptors: tuple[int, ...],
    *,
    converts_kv: bool,
) -> tuple[Executor, ModelRunner, Sized]:
    """Loads the model, here or here and in other processes, and opens the one door to it; and what is here."""
    descriptor = descriptors[0] if descriptors else None
    finds_key_means = converts_kv or is_quantized(loaded.kv_format)
    if config.load.tensor_parallel_size == 1:
        runner, sized = _runner(config, loaded, kv_size, RowSplit(), descriptor, finds_key_means=finds_key_means)
        return InProcessExecutor(runner, max_in_flight=2 if config.schedules_ahead else 1), runner, sized
    ranks: Ranks | None = None
    try:
        decided = KVDecision(kv_size.num_blocks, kv_size.max_model_len) if isinstance(kv_size, KVSizing) else None
        ranks = Ranks.start(RankStart(config, decided, descriptors, finds_key_means))
        split = RowSplit(ranks.communicator)
        runner, sized = _runner(config, loaded, kv_size, split, descriptor, finds_key_means=finds_key_means)
        ranks.communicator.barrier()
    except BaseException as error:
        if ranks is not None:
            ranks.end()
        if isinstance(error, RankLost):
            raise SetupError(f"tensor_parallel_size={config.load.tensor_parallel_size}: {error}") from error
        raise
    return TensorParallelExecutor(runner, ranks.communicator, ranks.end), runner, sized


def run_rank(start: RankStart, communicator: Communicator) -> None:
    """One of the ranks above 0, from loading its share to its end.

    Args:
        start: what rank 0 was asked for and has decided.
        communicator: to the others.

    Raises:
        SetupError: its share cannot be loaded.
        RankLost: another rank is gone.
    """
    loaded = prepare(start.config, communicator.rank)
    kv_size = probe_of(loaded.device)
    if start.kv is not None:
        num_kv_bytes = start.kv.num_blocks * loaded.layout.bytes_per_block
        kv_size = KVSizing(start.kv.num_blocks, start.kv.max_model_len, num_kv_bytes, 0)
        _check_own_memory(start.config, loaded, kv_size)
    assert kv_size is not None, "rank 0 said how many blocks there are, or each rank measures"
    descriptor = start.kv_descriptors[communicator.rank] if start.kv_descriptors else None
    split, finds_key_means = RowSplit(communicator), start.finds_key_means
    runner, _ = _runner(start.config, loaded, kv_size, split, descriptor, finds_key_means=finds_key_means)
    communicator.barrier()
    follow(runner, communicator)


def _runner(
    config: EngineConfig,
    loaded: Prepared,
    kv_size: KVSizing | MemoryProbe,
    split: RowSplit,
    descriptor: int | None = None,
    *,
    finds_key_means: bool,
) -> tuple[ModelRunner, Sized]:
    """Reads the weights of a rank and builds what runs them, with its KV cache in shared memory where that is given.

    Quantized KV stores keys less their means; who converts KV from and to a quantized format needs these, too.

    Returns:
        What runs them, and how large that cache is.
    """
    is_known = isinstance(kv_size, KVSizing)
    model = load_model(
        loaded.weights,
        loaded.config,
        dtype=loaded.dtype,
        device=loaded.device,
        max_model_len=kv_size.max_model_len if is_known else longest_request(config, loaded),
        operators=loaded.operators,
        quantization=config.load.quantization,
        group_size=config.load.group_size or DEFAULT_GROUP_SIZE,
        split=split,
        cache=_packed_cache(config, loaded),
    )
    if finds_key_means:
        center_keys(model, loaded.tokenizer.encode, loaded.dtype, loaded.device, split)
    sampler = Sampler(
        loaded.config.vocab_size,
        loaded.eos_token_ids,
        loaded.device,
        loaded.operators.gumbel_argmax,
        loaded.operators.filtered_argmax,
        loaded.operators.argmax,
    )
    sized = Sized(kv_size) if is_known else measure_and_size(config, loaded, model, sampler, kv_size, split)
    sizing = sized.sizing
    drafts = loaded.drafter_facts
    kv = KVStorage(
        loaded.layout,
        sizing.num_blocks,
        loaded.device,
        sizing.num_scratch_blocks,
        drafts.num_branch_blocks,
        descriptor,
    )
    target = Target(
        model, kv, sampler, sizing.max_model_len, step_tokens(config, loaded), config.scheduler.max_num_seqs
    )
    proposer = None if loaded.drafter is None else loaded.drafter.build(target)
    assert not (config.schedules_ahead and proposer), "drafts are guessed from tokens that are known"
    parts = RunnerParts(
        graphs=_graphs(config, loaded, sizing, model, kv),
        mover=KVMover(kv, num_slots) if (num_slots := host_slots(config.cache, loaded.layout)) else None,
        # torch's threads go where the one that runs the model may
        cpus=loaded.cpus if loaded.operators.pin_threads is None else loaded.cpus[:1],
    )
    kind = RunnerAhead if config.schedules_ahead else ModelRunner
    if proposer is not None:
        kind = partial(DraftingRunner, proposer)
    return kind(model, kv, sampler, max_model_len=sizing.max_model_len, grammars=loaded.grammars, parts=parts), sized


def _packed_cache(config: EngineConfig, loaded: Prepared) -> PackedCache | None:
    """Return the cache for packed weights; None if `packed_cache` is not set.

    Raises:
        InvalidParameter: the operators keep none.
        SetupError: its folder cannot be made.
        CorruptCheckpoint: a hash differs from the one that is kept.
    """
    load = config.load
    if load.packed_cache is None:
        return None
    if not loaded.operators.name.startswith("native "):
        limit = f"keeps what native kernels pack; this model runs on {loaded.operators.name}"
        raise InvalidParameter("packed_cache", load.packed_cache, limit, "Leave it out.")
    folder = default_folder() if load.packed_cache == "default" else Path(load.packed_cache).expanduser()
    form = {
        "dtype": str(loaded.dtype),
        "quantization": load.quantization or loaded.weights.quantization,
        "group_size": load.group_size or DEFAULT_GROUP_SIZE,
        "kernels": loaded.operators.name,
    }
    return PackedCache(folder, loaded.weights.path, form, verify=load.verify)


def _graphs(
    config: EngineConfig, loaded: Prepared, sizing: KVSizing, model: DecoderModel, kv: KVStorage
) -> DecodeGraphs | None:
    """Recorded passes, where there is somebody to record them. Not of several ranks, who gather in between."""
    recorder = _recorder(loaded.device.type) if loaded.num_ranks == 1 else None
    layout = kv.attention_layout(model.num_heads)
    if recorder is None or config.load.enforce_eager or recordable(model.attention, layout) is None:
        return None
    return DecodeGraphs(
        model,
        kv,
        max_model_len=sizing.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_tokens=step_tokens(config, loaded),
        device=loaded.device,
        recorder=recorder,
    )


def _recorder(device_type: str) -> Recorder | None:
    return CudaGraphs() if device_type == "cuda" else None


def _geometry(config: EngineConfig, loaded: Prepared, runner: ModelRunner) -> KVGeometry:
    """What another process has to agree on."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    return KVGeometry(
        identity_facts(loaded.weights.path, loaded.config, config.load, loaded.tokenizer.encode(KEY_MEANS_TEXT)),
        numerics_facts(
            loaded.operators.name,
            loaded.device.type,
            config.load,
            dtype=dtype,
            kv_format=loaded.kv_format,
            quantization=loaded.weights.quantization,
        ),
        layout_facts(loaded.layout, runner.kv_order, loaded.num_ranks),
    )


def _journal(  # noqa: PLR0913 (everything that was found out before)
    config: EngineConfig,
    loaded: Prepared,
    layout: KVLayout,
    sizing: KVSizing,
    costs: _Costs,
    event_log: JsonlEventLog | None,
    listeners: Sequence[EventLog],
    process: str,
) -> Journal:
    """The event log, begun with everything that a replay has to be built from."""
    model = loaded.config
    shape, machine, pace = costs
    what = f"{model.architecture}, {num_parameters(model)} parameters, {loaded.dtype}{_unlike(loaded)}"
    started = engine_started(
        config.scheduler,
        config.cache,
        layout,
        num_blocks=sizing.num_blocks,
        max_model_len=sizing.max_model_len,
        model=f"{loaded.path.name} ({what})",
        now_s=monotonic_clock(),
    )
    speculation = config.speculative_config
    started = replace(
        started,
        process=process or started.process,
        speculation=None if speculation is None else plain(speculation),
        machine=machine,
        max_drafts=loaded.drafter_facts.max_drafts,
        step_times=pace.step_times,
    )
    return Journal(started, shape, event_log, listeners, own_anonymous_bytes)


def _check_own_memory(config: EngineConfig, loaded: Prepared, sizing: KVSizing) -> None:
    """Of a rank on a host of its own, whose memory rank 0 did not see when it chose the number of blocks."""
    if config.load.tensor_parallel_address is None:
        return
    num_weight_bytes = loaded_weight_bytes(config, loaded, config.load.tensor_parallel_size)
    usable = free_memory(config, loaded, num_weight_bytes).usable_bytes
    if sizing.kv_bytes > usable:
        raise DoesNotFit(
            f"KV memory of {sizing.kv_bytes:,} bytes, as rank 0 chose for every rank; this host has {usable:,} for it. "
            f"Give rank 0 --kv-cache-memory {usable} or less."
        )


def _startup_lines(
    loaded: Prepared, num_weight_bytes: int, layout: KVLayout, sizing: KVSizing, load_s: float
) -> tuple[str, ...]:
    config = loaded.config
    ending = "" if loaded.num_threads == 1 else "s"
    pinned = f" on {show_cpus(loaded.cpus)}" if loaded.cpus else ""
    threads = f", {loaded.num_threads} thread{ending}{pinned}" if loaded.device.type == "cpu" else ""
    num_ranks = loaded.num_ranks
    of_ranks = "" if num_ranks == 1 else f", {num_ranks} ranks (threads, weights and kv cache are each rank's)"
    where = f"{loaded.device.type}{threads}{of_ranks}, {loaded.operators.name} kernels{_unlike(loaded)}"
    dtype = str(loaded.dtype).removeprefix("torch.")
    model = f"{config.architecture}, {num_parameters(config) / 1e6:,.1f} M parameters, {dtype}, {where}"
    weights = f"{num_weight_bytes:,} bytes of weights, loaded in {load_s:.2f} s"
    per_token = f"{layout.kv_format}, {layout.bytes_per_token:,} bytes per token"
    beside = f" and {sizing.num_scratch_blocks} to check them with" if sizing.num_scratch_blocks else ""
    blocks = f"{sizing.num_blocks:,} blocks of {layout.block_words}{beside} = {sizing.kv_bytes:,} bytes"
    capacity = layout.capacity_tokens(sizing.num_blocks)
    limit = f" ({sizing.limit})" if sizing.limit else ""
    return (
        f"model    {model}; {weights}",
        f"kv cache {per_token}; {blocks}, room for {capacity:,} tokens{limit}",
        f"requests {sizing.full_length_requests:,} of {sizing.max_model_len:,} tokens fit at once",
        *(() if loaded.drafter is None else (f"drafts   {loaded.drafter.words}",)),
        *_proof_lines(),
        *(f"note     {remark}" for remark in (*sizing.remarks, *_rope_remarks(config), *_promise_remarks(loaded))),
    )


def _rope_remarks(config: ModelConfig) -> list[str]:
    found: list[str] = []
    for rope, _ in config.ropes:
        original, longest = rope.original_max_position_embeddings or 0, rope.longest_request or 0
        if rope.rope_type in ("dynamic", "longrope") and longest > original:
            name = "dynamic rope scaling is" if rope.rope_type == "dynamic" else "the long factors of longrope are"
            fixed = f"{name} fixed for {longest} tokens: another --max-model-len, other outputs"
            found.append(f"{fixed}; up to {original} nothing is stretched")
    return found


def _unlike(loaded: Prepared) -> str:
    """How answers are not what one expects of the model."""
    is_random = isinstance(loaded.weights, RandomWeights)
    is_free = not loaded.operators.is_batch_invariant
    return (", random weights" if is_random else "") + (", not batch-invariant" if is_free else "")


def _promise_remarks(loaded: Prepared) -> list[str]:
    if loaded.operators.is_batch_invariant:
        return []
    return ["not batch-invariant: tokens may change with the batch, and so with drafts, preemption, ranks, pools"]


def _proof_lines() -> list[str]:
    """Which numbers of rows the products of this process may have, and what it took to prove that."""
    found = proofs()
    if not found:
        return []
    counts = Counter(proof.heights for proof in found)
    admitted = ", ".join(f"{' '.join(map(str, heights))} rows for {count}" for heights, count in counts.items())
    seconds = sum(proof.time_s for proof in found)
    return [f"products {len(found)} kinds proved independent of their batch in {seconds:.2f} s: {admitted}"]
