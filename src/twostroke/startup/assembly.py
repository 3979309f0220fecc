"""Assembly of an engine: the one module that combines model, memory, scheduler and text.

A start has stages, each built from those before it:

    EngineConfig -> Prepared (preparation.py)     settings and files resolved, and checked as far as possible
                 -> Costs                         the machine's limits, and step times for latency limits
                 -> KVSizing, or MemoryProbe      the number of KV blocks, or the probe that will measure it
                 -> Computing                     the weights are read, by one rank or several
                 -> BuiltEngine                   scheduler, journal and hand-over ends around it
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

from twostroke.communicator.interface import Communicator
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import is_quantized
from twostroke.cost.step_cost import Layers, MachineLimits, ModelShape
from twostroke.cost.step_model import StepTimeModel
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.engine.expert_use import ExpertUse
from twostroke.engine.facts import NOTE, EngineFacts
from twostroke.engine.handover_messages import LenderAddress
from twostroke.engine.journal import Journal, engine_started
from twostroke.engine.kv_self_check import KVSelfCheck
from twostroke.engine.pool_engine import PoolEngine
from twostroke.errors import DoesNotFit, RankLost, SetupError
from twostroke.event_codec import plain
from twostroke.events import EngineStarted, EventLog
from twostroke.grammar.backend import GrammarBackend
from twostroke.kernels.memory import return_unused
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.sizing import KVSizing
from twostroke.kv_check import tolerance
from twostroke.kv_transfer.geometry import KVGeometry, layout_facts
from twostroke.kv_transfer.memory import SharedMemory
from twostroke.layers.row_split import RowSplit
from twostroke.log import get_logger
from twostroke.model.registry import num_parameters
from twostroke.process_memory import own_anonymous_bytes
from twostroke.runner.key_means import TEXT as KEY_MEANS_TEXT
from twostroke.runner.machine_limits import measure_machine_limits
from twostroke.runner.memory_probe import MemoryProbe, memory_probe_for
from twostroke.runner.model_runner import Executor, InProcessExecutor, ModelRunner
from twostroke.runner.tensor_parallel import TensorParallelExecutor, run_follower_rank
from twostroke.scheduler.scheduler import Scheduler
from twostroke.startup.calibrated import LatencyModel, latency_model
from twostroke.startup.handover_setup import (
    HandoverSetup,
    build_handovers,
    identity_facts,
    numerics_facts,
    shared_memory_for,
)
from twostroke.startup.loading import load_rank
from twostroke.startup.measured_memory import KVSize
from twostroke.startup.memory import account_for_memory, check_weights_fit, free_memory
from twostroke.startup.preparation import prepare
from twostroke.startup.prepared import Drafter, Prepared
from twostroke.startup.ranks import KVDecision, Ranks, RankStart
from twostroke.startup.start_lines import deviation_words, start_lines
from twostroke.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBasis:
    """Basis for the costs and times of steps."""

    shape: ModelShape
    machine: MachineLimits
    pace: LatencyModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, of one rank or several, with its KV cache."""

    executor: Executor
    runner: ModelRunner
    """Runner of rank 0."""
    sized: KVSize
    shared: SharedMemory | None
    """Memory of all ranks' KV caches, if other processes map it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine, with the facts that the text side needs."""

    engine: Engine
    facts: EngineFacts
    tokenizer: Tokenizer
    grammars: GrammarBackend
    lender: LenderAddress | None
    """Address at which its KV can be fetched; None: it lends none."""
    geometry: KVGeometry | None
    """Identity, numerics and layout of its KV, in a pool."""
    machine: MachineLimits
    """Limits of the machine."""


def build_engine(
    config: EngineConfig,
    wrap_executor: Callable[[Executor], Executor] | None = None,
    listeners: Sequence[EventLog] = (),
    wrap_drafter: Callable[[Drafter], Drafter] | None = None,
    handover: HandoverSetup | None = None,
    machine: MachineLimits | None = None,
    step_times: StepTimeModel | None = None,
) -> BuiltEngine:
    """Load a model and build the engine that runs sequences of its token ids.

    Args:
        config: all settings of the user.
        wrap_executor: wraps the executor that computes, to observe it (benchmarks do).
        listeners: receive every event, in addition to the engine's file and ring.
        wrap_drafter: wraps or replaces the drafter that the settings name (benchmarks do).
        handover: hand-over settings of an engine in a pool.
        machine: limits of the machine; None: they are measured.
        step_times: step times for latency limits; None: those of a calibration, if there is one.

    Raises:
        SetupError: no such model, files that contradict each other, sizes that do not fit.
        InvalidParameter: the event log cannot be written.
    """
    begin_s = time.perf_counter()
    prepared = prepare(config)
    if wrap_drafter is not None and prepared.drafter is not None:
        prepared = replace(prepared, drafter=wrap_drafter(prepared.drafter))
    return_unused()  # reading a large tokenizer takes twice the memory that it keeps

    @cache
    def costs() -> CostBasis:
        return _costs(prepared, machine, step_times)

    if prepared.device.type != "cpu" or prepared.num_ranks > 1:
        costs()  # before the weights fill the card, and before ranks wait
    # on a CPU it is measured after the weights, when the server's process is idle
    kv_size = _kv_size(prepared, handover)
    with ExitStack() as cleanup:
        # opened before the weights are read, which may take minutes, to refuse a bad path at once
        path = config.load.event_log
        event_log = None if path is None else cleanup.enter_context(JsonlEventLog(path))
        computing = _computing(prepared, kv_size, handover)
        started = _engine_started(prepared, computing.sized.sizing, costs(), handover)
        expert_use = _expert_use(prepared, computing.runner)
        journal = Journal(started, costs().shape, event_log, listeners, own_anonymous_bytes, expert_use)
        scheduler = _scheduler(prepared, computing.sized.sizing, costs().pace)
        executor = computing.executor if wrap_executor is None else wrap_executor(computing.executor)
        geometry = lender = None
        if handover is None:
            engine = _engine(prepared, scheduler, executor, journal)
        else:
            geometry = _geometry(prepared, computing.runner)
            ends, lender = build_handovers(handover, geometry, scheduler, journal, computing.runner, computing.shared)
            engine = PoolEngine(
                scheduler,
                executor,
                ends,
                block_size=prepared.layout.block_size,
                hashes_blocks=config.cache.enable_prefix_caching,
                journal=journal,
            )
        cleanup.pop_all()  # the engine owns them now
    lines = start_lines(prepared, computing.sized, costs().pace, time.perf_counter() - begin_s)
    for line in lines:
        log.log(logging.WARNING if line.startswith(NOTE) else logging.INFO, line)
    return BuiltEngine(
        engine=engine,
        facts=_facts(prepared, computing.sized.sizing, lines),
        tokenizer=prepared.tokenizer,
        grammars=prepared.grammars,
        lender=lender,
        geometry=geometry,
        machine=costs().machine,
    )


def run_rank(start: RankStart, communicator: Communicator) -> None:
    """Run one of the ranks above 0, from loading its share to its end.

    Args:
        start: settings and decisions of rank 0.
        communicator: to the other ranks.

    Raises:
        SetupError: its share cannot be loaded.
        RankLost: another rank is gone.
    """
    prepared = prepare(start.config, communicator.rank)
    kv_size = memory_probe_for(prepared.device)
    if start.kv is not None:
        num_kv_bytes = start.kv.num_blocks * prepared.layout.bytes_per_block
        kv_size = KVSizing(start.kv.num_blocks, start.kv.max_model_len, num_kv_bytes, 0)
        _check_own_memory(prepared, kv_size)
    assert kv_size is not None, "rank 0 said how many blocks there are, or each rank measures"
    descriptor = start.kv_descriptors[communicator.rank] if start.kv_descriptors else None
    splits_by_expert, finds_key_means = prepared.split.splits_by_expert, start.finds_key_means
    split = RowSplit(communicator, splits_by_expert=splits_by_expert)
    runner, _ = load_rank(prepared, kv_size, split, descriptor, finds_key_means=finds_key_means)
    communicator.barrier()
    run_follower_rank(runner, communicator)


def _costs(prepared: Prepared, machine: MachineLimits | None, step_times: StepTimeModel | None) -> CostBasis:
    """Measure the machine unless its limits are given, and find the step times for latency limits."""
    settings, shape = prepared.settings, prepared.shape
    if machine is None:
        num_threads = prepared.num_threads * settings.load.num_local_ranks
        machine = measure_machine_limits(
            prepared.attention_dtype,
            prepared.device,
            num_threads,
            int8=prepared.int8_operators,
            read=prepared.read_stream,
            step_bytes=prepared.step_bytes,
        )
    pace = latency_model(settings, prepared.path, shape, machine, step_times)
    return CostBasis(shape=shape, machine=machine, pace=pace)


def _kv_size(prepared: Prepared, handover: HandoverSetup | None) -> KVSizing | MemoryProbe:
    """Return the number of KV blocks, or the probe that measures it after the weights are loaded.

    Raises:
        DoesNotFit: the weights or an explicit size are too large; the message has the arithmetic.
        SetupError: KV of a card would have to be handed over.
    """
    probe = memory_probe_for(prepared.device)
    if probe is None:
        share = 1.0 if handover is None else handover.port.memory_share
        return account_for_memory(prepared, share=share).sizing
    if handover is not None:
        device = prepared.settings.load.device
        raise SetupError(f"device={device}: handing over KV of a GPU is not implemented. Use --device cpu.")
    check_weights_fit(prepared)
    return probe


def _computing(prepared: Prepared, kv_size: KVSizing | MemoryProbe, handover: HandoverSetup | None) -> LoadedModel:
    """Load the model in this process and the processes of other ranks, and return its executor."""
    shared: SharedMemory | None = None
    finds_key_means = is_quantized(prepared.kv_format)
    if handover is not None:
        assert isinstance(kv_size, KVSizing), "memory that is shared is made before a weight is read"
        num_blocks = kv_size.num_blocks + kv_size.num_scratch_blocks + prepared.drafter_facts.num_branch_blocks
        shared = shared_memory_for(handover.port, prepared.num_ranks, num_blocks * prepared.layout.bytes_per_block)
        # a process that converts KV from or to a quantized format needs them too
        finds_key_means |= handover.port.fetches and handover.port.allows_drift
    descriptors = () if shared is None else shared.descriptors
    descriptor = descriptors[0] if descriptors else None
    settings, num_ranks = prepared.settings, prepared.num_ranks
    if num_ranks == 1:
        runner, sized = load_rank(prepared, kv_size, RowSplit(), descriptor, finds_key_means=finds_key_means)
        executor = InProcessExecutor(runner, max_in_flight=2 if settings.schedules_ahead else 1)
        return LoadedModel(executor=executor, runner=runner, sized=sized, shared=shared)
    ranks: Ranks | None = None
    try:
        decided = KVDecision(kv_size.num_blocks, kv_size.max_model_len) if isinstance(kv_size, KVSizing) else None
        ranks = Ranks.start(RankStart(settings, decided, descriptors, finds_key_means))
        split = RowSplit(ranks.communicator, splits_by_expert=prepared.split.splits_by_expert)
        runner, sized = load_rank(prepared, kv_size, split, descriptor, finds_key_means=finds_key_means)
        ranks.communicator.barrier()
    except BaseException as error:
        if ranks is not None:
            ranks.end()
        if isinstance(error, RankLost):
            raise SetupError(f"tensor_parallel_size={num_ranks}: {error}") from error
        raise
    executor = TensorParallelExecutor(runner, ranks.communicator, ranks.end)
    return LoadedModel(executor=executor, runner=runner, sized=sized, shared=shared)


def _check_own_memory(prepared: Prepared, sizing: KVSizing) -> None:
    """Check the memory of a rank on another host, which rank 0 did not see when it chose the number of blocks."""
    if prepared.settings.load.tensor_parallel_address is None:
        return
    usable = free_memory(prepared).usable_bytes
    if sizing.kv_bytes > usable:
        raise DoesNotFit(
            f"KV memory of {sizing.kv_bytes:,} bytes, as rank 0 chose for every rank; this host has {usable:,} for it. "
            f"Give rank 0 --kv-cache-memory {usable} or less."
        )


def _scheduler(prepared: Prepared, sizing: KVSizing, pace: LatencyModel) -> Scheduler:
    settings = prepared.settings
    return Scheduler(
        settings.scheduler,
        KVCacheManager(prepared.layout, sizing.num_blocks, settings.cache, sizing.max_model_len),
        max_model_len=sizing.max_model_len,
        speculation=settings.speculative_config,
        max_drafts=prepared.drafter_facts.max_drafts,
        step_times=pace.step_times,
        layers=Layers(prepared.config.layer_windows),
    )


def _expert_use(prepared: Prepared, runner: ModelRunner) -> ExpertUse | None:
    """Return the measurement of experts' shares; None if there are none, or the runner does not count their tokens."""
    return ExpertUse(prepared.config.layers, runner.expert_counts) if len(runner.expert_counts()) else None


def _engine(prepared: Prepared, scheduler: Scheduler, executor: Executor, journal: Journal) -> Engine:
    """Return an engine outside of pools, with a KV self-check if the settings ask for one."""
    cache, size = prepared.settings.cache, prepared.layout.block_size
    self_check = None
    if cache.kv_check_rate:
        dtype = str(prepared.attention_dtype).removeprefix("torch.")
        most = tolerance(prepared.kv_format, dtype, prepared.config.num_layers)
        self_check = KVSelfCheck(scheduler, executor, block_size=size, tolerance=most)
    return Engine(
        scheduler,
        executor,
        block_size=size,
        hashes_blocks=cache.enable_prefix_caching,
        journal=journal,
        self_check=self_check,
    )


def _engine_started(
    prepared: Prepared, sizing: KVSizing, costs: CostBasis, handover: HandoverSetup | None
) -> EngineStarted:
    """Return the first event of the log: everything that a replay needs."""
    settings, model = prepared.settings, prepared.config
    what = f"{model.architecture}, {num_parameters(model)} parameters, {prepared.dtype}{deviation_words(prepared)}"
    started = engine_started(
        settings.scheduler,
        settings.cache,
        prepared.layout,
        num_blocks=sizing.num_blocks,
        max_model_len=sizing.max_model_len,
        model=f"{prepared.path.name} ({what})",
        now_s=monotonic_clock(),
    )
    speculation, process = settings.speculative_config, "" if handover is None else handover.port.name
    return replace(
        started,
        process=process or started.process,
        speculation=None if speculation is None else plain(speculation),
        machine=costs.machine,
        max_drafts=prepared.drafter_facts.max_drafts,
        step_times=costs.pace.step_times,
        weight_bytes=prepared.weight_bytes(),
    )


def _geometry(prepared: Prepared, runner: ModelRunner) -> KVGeometry:
    """Return the properties that must match those of another process."""
    load = prepared.settings.load
    text = prepared.tokenizer.encode(KEY_MEANS_TEXT)
    return KVGeometry(
        identity_facts(prepared.weights.path, prepared.config, load, text),
        numerics_facts(
            prepared.operators.name,
            prepared.device.type,
            load,
            dtype=prepared.dtype_name,
            kv_format=prepared.kv_format,
            quantization=prepared.weights.quantization,
        ),
        layout_facts(prepared.layout, runner.kv_order, prepared.num_ranks),
    )


def _facts(prepared: Prepared, sizing: KVSizing, lines: tuple[str, ...]) -> EngineFacts:
    scheduler, layout = prepared.settings.scheduler, prepared.layout
    return EngineFacts(
        model=prepared.path.name,
        tokenizer_path=str(prepared.tokenizer_path),
        max_model_len=sizing.max_model_len,
        max_logprobs=prepared.settings.load.max_logprobs,
        vocab_size=prepared.config.vocab_size,
        hidden_size=prepared.config.hidden_size,
        eos_token_ids=tuple(sorted(prepared.eos_token_ids)),
        max_num_seqs=scheduler.max_num_seqs,
        num_blocks=sizing.num_blocks,
        block_size=layout.block_size,
        prefix_tokens=layout.prefix_tokens,
        uses_priority=scheduler.policy == "priority",
        serves_background=scheduler.serves_background,
        is_fair=scheduler.policy == "fair",
        dtype=prepared.dtype_name,
        kv_cache_dtype=layout.kv_format,
        kernels=prepared.operators.name,
        num_threads=prepared.num_threads,
        kv_bytes_per_token=layout.bytes_per_token * prepared.num_ranks,
        num_layers=prepared.config.num_layers,
        architecture=prepared.config.architecture,
        num_parameters=num_parameters(prepared.config),
        quantization=prepared.settings.load.quantization or prepared.weights.quantization,
        weight_bytes=prepared.weight_bytes(),
        startup_lines=lines,
    )
