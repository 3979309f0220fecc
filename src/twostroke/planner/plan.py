"""`twostroke plan`: memory, floors, frontier and possible changes of a model, without reading its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from twostroke.config.engine import EngineConfig
from twostroke.config.load import QuantizationOnLoad
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.calibration import Choice, choices_of
from twostroke.cost.expert_shares import ExpertGroup, ExpertShares
from twostroke.cost.roofline import roofline
from twostroke.cost.step_model import PredictsSteps, StepTimeModel
from twostroke.errors import InvalidParameter, TwostrokeError
from twostroke.planner.floors import FrontierPoint, Predictor, TTFTPoint, VerifyPoint
from twostroke.planner.machine import (
    ObservedRun,
    PlannedMachine,
    machine_for,
    moved_to_device,
    prepared_for,
    published_machine,
    raised,
)
from twostroke.planner.memory import SMALLER, MemoryPlan, plan_memory, with_kv_format, with_quantization
from twostroke.planner.options import PlanOptions
from twostroke.planner.prompt_cost import PromptCost, cost_of_prompt
from twostroke.planner.what_if import Change, PlanFigures, TwoPools
from twostroke.startup.calibrated import find_calibration
from twostroke.startup.prepared import Prepared

USUAL_CONTEXT = 1024
MAX_VERIFIED_DRAFTS = 8
"""Most drafts of each request in the verification steps of a plan."""
DRAFTS = 4
"""Drafts of each request and step for the estimate of speculation."""


@dataclass(frozen=True, slots=True)
class RequestedUsers:
    """A number of concurrent longest requests, and the number that fits."""

    num_requests: int
    most: int
    """Number of requests that the blocks hold."""
    most_of_all: int | None
    """Number with all of a card's memory in use; None: no share of a card decides how many fit."""

    @property
    def fits(self) -> bool:
        """Whether the requested number fits."""
        return self.num_requests <= self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All results for a model on a machine."""

    machine: PlannedMachine
    memory: MemoryPlan
    context: int
    """Context tokens of each decoding request."""
    most_requests: int
    """Number of requests with this context and room for a token more, as blocks and slots allow."""
    ttft: tuple[TTFTPoint, ...]
    too_long_prompts: tuple[int, ...]
    """Requested prompt lengths that no request may have."""
    frontier: tuple[FrontierPoint, ...]
    base: PlanFigures
    changes: tuple[Change, ...]
    two_pools: TwoPools | None
    """Link of a prefill and a decode pool; None: no requested prompt length fits."""
    verified_batch: int
    """Requests in each of the steps of `verification`."""
    verification: tuple[VerifyPoint, ...]
    """A decode step with 0 to 8 drafts of each request, as far as a step has room for them."""
    prompt: PromptCost | None
    """Cost of the prompt in question; None: there is none."""
    asked: RequestedUsers | None
    """Whether the number of users fits; None: the question was not asked."""
    raised: str
    """The limits that observed steps raised, in words; empty: none were raised."""
    drafting: tuple[Choice, ...]
    """Drafting methods that were calibrated here, fastest first."""
    step_times: StepTimeModel
    """Measured step times, or floors."""
    has_measured_experts: bool
    """Whether the experts that steps read follow from measured shares; otherwise they are upper bounds."""
    is_predicted: bool
    """Whether measured steps predict times; otherwise there are only floors."""
    predicted_by: str
    """Source of the predictions, or why there are none."""


def make_plan(
    config: EngineConfig,
    options: PlanOptions,
    steps: StepTimeModel | None = None,
    run: ObservedRun | None = None,
) -> Plan:
    """Plan a model on a machine; this takes a few seconds at most.

    Args:
        config: settings of the engine.
        options: the machine, the load, and the comparisons.
        steps: step times fitted to this machine and model; None: as calibrated, if they are. A machine with
        published figures has floors only.
        run: run on that machine, if there was one; limits are raised to what it shows.

    Raises:
        SetupError: there is no such model, or it does not fit; the message says what would.
        InvalidParameter: the numbers contradict the model.
    """
    prepared = prepared_for(config, options.device_name)
    config = prepared.settings
    machine, raised_words = machine_for(prepared, options), ""
    if run is not None:
        machine, raised_words = raised(machine, run)
    calibration, predicted_by = None, "step times as given"
    if machine.is_published:
        steps, predicted_by = None, "a data sheet gives floors only"
    elif steps is None:
        calibration, predicted_by = find_calibration(prepared.path, config.load, config.cache)
        steps = None if calibration is None else calibration.step_times
    memory = plan_memory(prepared, machine.memory_bytes, others_bytes=machine.others_bytes)
    context = _context(options, memory)
    case = _PlanCase(prepared, machine, context, steps, expert_shares=_shares_of(prepared, run))
    predictor = case.predictor
    base, frontier = case.outcome(memory)
    ttft = tuple(
        predictor.ttft(length, memory.max_tokens_per_step)
        for length in options.prompts
        if length < memory.max_model_len
    )
    two_pools = None
    if ttft:
        best = max(ttft, key=lambda point: point.tokens_per_s)
        per_token = memory.kv_bytes_per_token * memory.num_ranks
        two_pools = TwoPools(per_token, best.tokens_per_s, best.predicted_s is not None, options.link_bytes_per_s)
    return Plan(
        machine=machine,
        memory=memory,
        context=context,
        most_requests=min(memory.max_num_seqs, base.num_requests),
        ttft=ttft,
        too_long_prompts=tuple(length for length in options.prompts if length >= memory.max_model_len),
        frontier=frontier,
        base=base,
        changes=_changes(case, options),
        verified_batch=options.batch,
        verification=predictor.verification(
            _batch(options, base.num_requests, context, config.scheduler), context, _most_verified(options, config)
        ),
        prompt=None if options.prompt is None else cost_of_prompt(options, prepared, memory, predictor, machine),
        asked=_asked(case, options, memory),
        raised=raised_words,
        two_pools=two_pools,
        drafting=() if calibration is None else choices_of(calibration),
        step_times=steps or roofline(predictor.shape, machine.limits, most_tokens=memory.max_tokens_per_step),
        has_measured_experts=len(case.expert_shares) > 0,
        is_predicted=steps is not None,
        predicted_by=predicted_by,
    )


@dataclass(frozen=True, slots=True)
class _PlanCase:
    """A model, a machine and a load."""

    prepared: Prepared
    machine: PlannedMachine
    context: int
    steps: PredictsSteps | None = None
    num_drafts: int = 0
    """Drafts of each request and step, all accepted."""
    expert_shares: tuple[ExpertShares, ...] = ()
    """Measured shares of experts; empty: not measured."""

    @property
    def predictor(self) -> Predictor:
        shape = replace(self.prepared.shape, expert_shares=self.expert_shares)
        return Predictor(shape, self.machine.limits, self.steps, self.num_drafts)

    def outcome(self, memory: MemoryPlan) -> tuple[PlanFigures, tuple[FrontierPoint, ...]]:
        """Return the figures of a memory plan under the load, and the frontier up to its number of requests."""
        num_requests = memory.concurrent_requests(self.context + 1)
        most = min(memory.max_num_seqs, num_requests)
        predictor = self.predictor
        frontier = predictor.frontier(most, self.context, self.machine.price_per_hour)
        outcome = PlanFigures(
            weight_bytes=memory.weight_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token,
            num_blocks=memory.num_blocks,
            max_model_len=memory.max_model_len,
            num_requests=num_requests,
            tpot_floor_s=predictor.tpot(1, self.context).tpot_floor_s,
            most_tokens_per_s=max((point.tokens_per_s_ceiling for point in frontier), default=0.0),
        )
        return outcome, frontier

    def quantized(self, quantization: QuantizationOnLoad) -> _PlanCase:
        """Return the case with quantized weights."""
        return replace(self, prepared=with_quantization(self.prepared, quantization), steps=None)

    def with_kv(self, kv_cache_dtype: str) -> _PlanCase:
        """Return the case with another KV format."""
        if self.prepared.settings.speculative_config is not None:
            raise InvalidParameter("kv_cache_dtype", kv_cache_dtype, "is planned without speculation", "Leave it out.")
        return replace(self, prepared=with_kv_format(self.prepared, kv_cache_dtype), steps=None)

    def drafting(self) -> _PlanCase:
        """Return the case with drafts that are all accepted and take no time."""
        return replace(self, steps=None, num_drafts=DRAFTS)

    def elsewhere(self, name: str) -> _PlanCase:
        """Return the case on another device."""
        prepared = moved_to_device(self.prepared, name)
        machine = published_machine(name, prepared)
        return replace(self, prepared=prepared, machine=machine, steps=None)


def _shares_of(prepared: Prepared, run: ObservedRun | None) -> tuple[ExpertShares, ...]:
    """Return the measured shares of experts; empty without any, or if they are of another model."""
    groups, shares = prepared.shape.experts, () if run is None else run.expert_shares
    is_alike = len(groups) == len(shares) and all(map(ExpertGroup.fits, groups, shares))
    return shares if is_alike else ()


def _batch(options: PlanOptions, num_requests: int, context: int, scheduler: SchedulerConfig) -> int:
    batch = options.batch
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    does_not_fit = f"does not fit: at most {num_requests} requests of {context} tokens do"
    for most, limit, remedy in (
        (num_requests, does_not_fit, "Lower it, or --context."),
        (seqs, f"is more than run at once, {seqs}", "Raise --max-num-seqs."),
        (tokens, f"is more than the tokens of a step, {tokens}", "Raise --max-num-batched-tokens."),
    ):
        if batch > most:
            raise InvalidParameter("batch", batch, limit, remedy)
    return batch


def _most_verified(options: PlanOptions, config: EngineConfig) -> int:
    """Return the most drafts of each request for which a step of `batch` requests has room."""
    return min(MAX_VERIFIED_DRAFTS, config.scheduler.max_num_batched_tokens // options.batch - 1)


def _asked(case: _PlanCase, options: PlanOptions, memory: MemoryPlan) -> RequestedUsers | None:
    if options.requests is None:
        return None
    most_of_all: int | None = None
    if memory.utilization is not None:
        settings = case.prepared.settings
        whole_card = replace(settings, cache=replace(settings.cache, gpu_memory_utilization=1.0))
        machine, asked = case.machine, replace(case.prepared, settings=whole_card)
        whole = plan_memory(asked, machine.memory_bytes, others_bytes=machine.others_bytes)
        most_of_all = whole.concurrent_requests(memory.max_model_len)
    return RequestedUsers(options.requests, memory.max_concurrent_requests, most_of_all)


def _changes(case: _PlanCase, options: PlanOptions) -> tuple[Change, ...]:
    settings = case.prepared.settings
    makers: dict[str, Callable[[], _PlanCase]] = {}
    if settings.load.quantization is None and case.prepared.weights.quantization is None:
        makers |= {f"weights in {name}": partial(case.quantized, name) for name in SMALLER}
    formats = [name for name in ("int8", "int4") if name != case.prepared.kv_format]
    makers |= {f"KV in {name}": partial(case.with_kv, name) for name in formats}
    if settings.speculative_config is None:
        makers[f"{DRAFTS} drafts, all accepted"] = case.drafting
    makers |= {f"on {name}": partial(case.elsewhere, name) for name in options.others if name != case.machine.name}
    return tuple(_change(name, make) for name, make in makers.items())


def _change(name: str, make: Callable[[], _PlanCase]) -> Change:
    try:
        case = make()
        machine = case.machine
        memory = plan_memory(case.prepared, machine.memory_bytes, others_bytes=machine.others_bytes)
        return Change(name, case.outcome(memory)[0], is_published=machine.is_published)
    except TwostrokeError as error:
        return Change(name, None, str(error))


def _context(options: PlanOptions, memory: MemoryPlan) -> int:
    if options.context is None:
        return max(1, min(USUAL_CONTEXT, memory.max_model_len // 2))
    if options.context >= memory.max_model_len:
        limit = f"must leave a token of the longest request here, {memory.max_model_len}"
        raise InvalidParameter("context", options.context, limit)
    return options.context
