"""`twostroke plan --search`: placement search over kinds of workers.

It gives the pure search (placement.py) worker kinds with step times and memory, a workload, and simulated runs
(simulation/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

from tqdm.auto import tqdm

from twostroke.config.engine import EngineConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import DoesNotFit, InvalidParameter, TwostrokeError
from twostroke.plain_words import counted, multiple
from twostroke.planner.devices import find_device
from twostroke.planner.machine import memory_here, published_machine
from twostroke.planner.memory import MemoryPlan, plan_memory, weights_fit
from twostroke.planner.options import PlanOptions, SearchOptions
from twostroke.planner.placement import (
    Candidate,
    LatencyLimits,
    PlacementOutcome,
    Ranking,
    Space,
    candidates_of,
    goodput_bound,
    outcome_of,
    search,
)
from twostroke.planner.replay import predict
from twostroke.planner.search_workload import SearchWorkload, read_workload
from twostroke.planner.worker_kinds import KindKey, WorkerKind, kinds_of_workers, simulated_start
from twostroke.simulation.requests import RecordedRun
from twostroke.simulation.settings import WhatIf
from twostroke.startup.preparation import usable_processors
from twostroke.startup.prepared import Prepared

DEFAULT_LINK_BYTES_PER_S = 1.25e9
"""Assumed bandwidth of a link that was not measured: 10 Gbit/s."""
DEFAULT_GPUS = 8
_SEARCH_OPTIONS = {"memory", "device_name", "price_per_hour", "link_bytes_per_s"}
"""Options of `plan` that a search also uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Results of a search."""

    model: str
    machine: str
    predicted_by: str
    are_floors: bool
    """Whether step times are floors; real steps take longer."""
    workload: SearchWorkload
    limits: LatencyLimits
    link_bytes_per_s: float
    link_is_assumed: bool
    space: Space
    ranking: Ranking
    price_per_device_hour: float | None
    notes: tuple[str, ...]
    device: str
    """Name of a device: GPU or core."""


def search_placement(config: EngineConfig, plan: PlanOptions, options: SearchOptions) -> SearchResult:
    """Search the placements of a model.

    Args:
        config: settings of each worker.
        plan: the machine, its memory, link and price.
        options: the workload, the limits and the candidates.

    Raises:
        InvalidParameter: the machine has no step times, no request of the workload fits, no candidate fits, or no
            candidate keeps the limits (with the nearest).
        SetupError: there is no such model, or it does not fit.
    """
    _check(config, plan)
    notes: list[str] = []
    kinds = kinds_of_workers(config, plan, options, notes)
    most_devices = options.max_devices or (DEFAULT_GPUS if plan.device_name else usable_processors())
    candidates = candidates_of(
        workers=tuple(kinds),
        budgets=options.token_budgets,
        max_workers=options.max_workers,
        max_devices=most_devices,
    )
    link = plan.link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S
    runs = _CandidateRuns(kinds, plan, options.limits, link)
    longest = max((runs.longest_of(candidate) for candidate in candidates), default=0)
    if not longest and runs.why_not is not None:
        if not isinstance(runs.why_not, DoesNotFit):
            raise runs.why_not
        remedy = f"A search tries the ranks of --ranks, within --max-devices ({most_devices})."
        words = f"No candidate fits into memory. Of {candidates[0]}: {runs.why_not} {remedy}"
        raise DoesNotFit(words) from runs.why_not
    if not longest:
        limit = f"leaves no candidate: the smallest worker takes {min(_devices_of(kind) for kind in kinds)}"
        raise InvalidParameter("max_devices", most_devices, limit, "Give more devices or memory, or fewer --ranks.")
    first = next(iter(kinds.values()))
    block_size = first.prepared.layout.block_size  # ranks and threads do not change it
    runs.workload = read_workload(options, block_size=block_size, longest=longest)
    loading = tuple(one for one in candidates if runs.longest_of(one))
    fitting = tuple(one for one in loading if runs.longest_of(one) >= runs.workload.longest)
    for number, why in (
        (len(candidates) - len(loading), "the model does not fit into their memory"),
        (len(loading) - len(fitting), "their memory holds shorter requests"),
    ):
        if number:
            notes.append(f"left out: {counted(number, 'candidate')}, as {why}")
    if not any(one.is_split for one in candidates):
        notes.append(_no_split(kinds, most_devices, config.load.model, is_gpu=plan.device_name is not None))
    elif not any(one.is_split for one in fitting):
        notes.append("no split is searched: none of them fits")
    factors = options.factors if runs.workload.span_s > 0 else (1.0,)
    if factors == (1.0,) != options.factors:
        notes.append("all requests come at once, so there is no rate to change")
    space = Space(fitting, factors)
    with tqdm(total=space.most_simulations, desc="placements", unit="run", disable=None, leave=False) as bar:
        runs.ran = partial(bar.update, 1)
        ranking = search(
            space,
            options.limits,
            runs.simulate,
            bound=partial(runs.bound, fastest=factors[-1]),
            num_places=options.runners_up + 1,
        )
    if ranking.nearest is not None:
        raise _unreachable(ranking, options.limits, len(fitting))
    return SearchResult(
        model=first.prepared.path.name,
        machine="this machine" if plan.device_name is None else find_device(plan.device_name)[0],
        predicted_by=first.predicted_by,
        are_floors=plan.device_name is not None,
        workload=runs.workload,
        limits=options.limits,
        link_bytes_per_s=link,
        link_is_assumed=plan.link_bytes_per_s is None,
        space=space,
        ranking=ranking,
        price_per_device_hour=_price(plan),
        notes=tuple(notes),
        device="core" if plan.device_name is None else "GPU",
    )


class _CandidateRuns:
    """Simulated runs of candidates, with cached inputs for each kind of worker."""

    def __init__(
        self,
        kinds: dict[KindKey, WorkerKind],
        plan: PlanOptions,
        limits: LatencyLimits,
        link_bytes_per_s: float,
    ) -> None:
        self._kinds = kinds
        self._plan = plan
        self._limits = limits
        self._link = link_bytes_per_s
        self._planned: dict[tuple[int | None, int, int, int, int], MemoryPlan | None] = {}
        """Memory plans by kind, budget and bytes; a split's workers on their own devices use the same plan as a single
        worker."""
        self._here: dict[KindKey, tuple[int, int]] = {}
        """Bytes of this machine for each kind of worker, read once because free memory changes."""
        self.why_not: TwostrokeError | None = None
        """Error of the first candidate that does not fit."""
        self.workload = SearchWorkload("nothing", ())
        self.ran: Callable[[], object] = lambda: None
        """Callback after each simulation."""

    def longest_of(self, candidate: Candidate) -> int:
        """Return the tokens of the longest request that a candidate accepts; 0: it does not fit into memory."""
        memory = self._memory_of(candidate)
        return 0 if memory is None else memory.max_model_len

    def simulate(self, candidate: Candidate, rate_factor: float) -> PlacementOutcome:
        """Return the outcome of the workload with a candidate."""
        settings: dict[str, object] = {"request_rate_factor": rate_factor}
        if candidate.is_split:
            settings |= {
                "prefill": candidate.prefill,
                "decode": candidate.decode,
                "link_bytes_per_s": self._link,
                "tpot_target_s": self._limits.tpot_target_s,
            }
        kind = self._kind_of(candidate)
        run = predict(self._recording(candidate), kind.step_times, WhatIf(settings=settings)).run
        self.ran()
        return outcome_of(run, self._limits, rate_factor=rate_factor, num_requests=len(self.workload.requests))

    def bound(self, candidate: Candidate, fastest: float) -> float:
        """Return an upper bound of a candidate's requests a second at any rate."""
        workload, started = self.workload, self._recording(candidate).started
        bound = goodput_bound(
            workload.requests,
            started,
            self._kind_of(candidate).step_times,
            self._limits,
            num_workers=candidate.num_workers,
        )
        if workload.span_s > 0:
            bound = min(bound, len(workload.requests) * fastest / workload.span_s)
        return bound

    def _kind_of(self, candidate: Candidate) -> WorkerKind:
        return self._kinds[candidate.threads, candidate.ranks]

    def _prepared_for(self, candidate: Candidate) -> Prepared:
        prepared = self._kind_of(candidate).prepared
        scheduler = replace(prepared.settings.scheduler, max_num_batched_tokens=candidate.max_num_batched_tokens)
        return replace(prepared, settings=replace(prepared.settings, scheduler=scheduler))

    def _memory_of(self, candidate: Candidate) -> MemoryPlan | None:
        """Return the memory plan of one worker of a candidate; None: it does not fit."""
        num_bytes, others = self._bytes_of(candidate)
        key = candidate.threads, candidate.ranks, candidate.max_num_batched_tokens, num_bytes, others
        if key not in self._planned:
            self._planned[key] = self._plan_memory(candidate, num_bytes, others)
        return self._planned[key]

    def _plan_memory(self, candidate: Candidate, num_bytes: int, others: int) -> MemoryPlan | None:
        """Return the memory plan of one worker; None: it does not fit.

        Only the first error is made and recorded, as making one takes a second.
        """
        prepared = self._prepared_for(candidate)
        is_told = self.why_not is not None
        if is_told and not weights_fit(prepared, num_bytes, others_bytes=others):
            return None
        try:
            return plan_memory(prepared, num_bytes, others_bytes=others)
        except TwostrokeError as error:
            self.why_not = self.why_not or error
            return None

    def _bytes_of(self, candidate: Candidate) -> tuple[int, int]:
        """Return the bytes of a worker, and the bytes that other processes use.

        These are its own devices' memory, or its share of this machine.
        """
        kind = self._kind_of(candidate)
        if self._plan.device_name is not None:
            return published_machine(self._plan.device_name, kind.prepared, self._plan.memory).memory_bytes, 0
        key = candidate.threads, candidate.ranks
        if key not in self._here:
            self._here[key] = memory_here(kind.prepared, self._plan.memory)
        num_bytes, others = self._here[key]
        return num_bytes // candidate.num_workers, others // candidate.num_workers

    def _recording(self, candidate: Candidate) -> RecordedRun:
        """Return the workload, and the start event of each worker of the candidate."""
        memory = self._memory_of(candidate)
        assert memory is not None, f"{candidate} does not fit"
        started = simulated_start(self._prepared_for(candidate), memory)
        return RecordedRun(started, self.workload.requests, unfinished=0)


def _check(config: EngineConfig, plan: PlanOptions) -> None:
    if config.speculative_config is not None:
        limit = "has no part in a search: acceptance of drafts cannot be simulated"
        raise InvalidParameter("speculative_config", config.speculative_config, limit, "Leave it out.")
    if not config.cache.enable_prefix_caching:
        limit = "KV is handed over through the prefix cache, so no split can be searched"
        raise InvalidParameter("enable_prefix_caching", False, limit, "Leave it on.")
    budget = config.scheduler.max_num_batched_tokens
    if budget != SchedulerConfig().max_num_batched_tokens:
        raise InvalidParameter("max_num_batched_tokens", budget, "has no part in a search", "Give --budgets.")
    ranks = config.load.tensor_parallel_size
    if plan.device_name is not None and ranks != 1:
        raise InvalidParameter("tensor_parallel_size", ranks, "has no part in a search of a device", "Give --ranks.")
    for option in fields(plan):
        given = getattr(plan, option.name)
        if option.name not in _SEARCH_OPTIONS and given != option.default:
            remedy = "Leave it out, or leave out --search."
            raise InvalidParameter(option.name, str(given), "has no part in a search", remedy)


def _unreachable(ranking: Ranking, limits: LatencyLimits, num_candidates: int) -> InvalidParameter:
    """Return the error with the missed limit, by how much it is missed, and the nearest candidate."""
    found = ranking.nearest
    assert found is not None, "some candidate is the nearest"
    assert found.missed is not None, "a candidate without a place has missed a limit"
    missed, worse = found.missed, found.missed.worse
    kept, flag = worse.num_within / missed.num_requests, worse.option.replace("_", "-")
    limit = (
        f"is kept by none of {num_candidates} candidates at {missed.rate_factor:g} times the workload's rate. The "
        f"nearest ({found.candidate}) keeps it for {kept:.1%} of the requests, of which "
        f"{limits.attainment:.1%} must keep both limits; its p99 is {worse.p99_s:.4g} s, "
        f"{multiple(worse.p99_s / worse.limit_s)} times the limit"
    )
    remedy = f"Give a larger --{flag}, a lower --attainment or lower --rate-factors, or more devices."
    return InvalidParameter(worse.option, worse.limit_s, limit, remedy)


def _price(plan: PlanOptions) -> float | None:
    """Return the price of a device for an hour; the cores of this machine share its price."""
    if plan.device_name is None:
        return None if plan.price_per_hour is None else plan.price_per_hour / usable_processors()
    _, device = find_device(plan.device_name)
    return device.price_per_hour if plan.price_per_hour is None else plan.price_per_hour


def _no_split(kinds: dict[KindKey, WorkerKind], most: int, model: str, *, is_gpu: bool) -> str:
    least = 2 * min(_devices_of(kind) for kind in kinds)
    if is_gpu:
        return f"no split is searched: it takes {least} GPUs and more, and {most} may be taken (--max-devices)"
    return (
        f"no split is searched: two workers take {least} cores and more, and {most} may be taken. Calibrate workers "
        f"of fewer threads (twostroke calibrate {model} --threads 1 --no-drafts --output one-thread.json) and add "
        "--calibrations one-thread.json"
    )


def _devices_of(kind: KindKey) -> int:
    threads, ranks = kind
    return ranks * (threads or 1)
