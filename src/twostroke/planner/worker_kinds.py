"""Kinds of workers for `twostroke plan --search`, and step times of one machine for a trace replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.cost.calibration import Calibration
from twostroke.cost.roofline import roofline
from twostroke.cost.step_model import StepTimeModel
from twostroke.engine.journal import engine_started
from twostroke.errors import InvalidParameter
from twostroke.events import EngineStarted
from twostroke.measure.report import model_name
from twostroke.plain_words import counted
from twostroke.planner.devices import devices
from twostroke.planner.machine import prepared_for, published_machine
from twostroke.planner.memory import MemoryPlan
from twostroke.planner.options import PlanOptions, SearchOptions
from twostroke.startup.calibrated import find_calibration, mismatch_reason
from twostroke.startup.preparation import prepare
from twostroke.startup.prepared import Prepared

DEFAULT_RANKS = (1, 2, 4)

KindKey = tuple[int | None, int]
"""Threads of each rank (None on a GPU), and number of ranks."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Workers with one number of threads and ranks."""

    threads: int | None
    """Threads of each rank; None on a GPU."""
    prepared: Prepared
    step_times: StepTimeModel
    predicted_by: str

    @property
    def key(self) -> KindKey:
        """Key that identifies the kind."""
        return self.threads, self.prepared.num_ranks


def kinds_of_workers(
    config: EngineConfig, plan: PlanOptions, options: SearchOptions, notes: list[str]
) -> dict[KindKey, WorkerKind]:
    """Return the kinds of workers with known step times.

    Args:
        config: settings of each worker.
        plan: the machine.
        options: the calibrations, and the numbers of ranks to try.
        notes: receives what is left out, with the reasons.

    Raises:
        InvalidParameter: no kind is left.
    """
    of_machine = _published(config, plan, options, notes) if plan.device_name else _calibrated(config, options, notes)
    found: dict[KindKey, WorkerKind] = {}
    for kind in of_machine:
        if kind.key in found:
            notes.append(f"left out ({kind.predicted_by}): there are workers with the same threads and ranks")
        found.setdefault(kind.key, kind)
    if not found:
        why = "; ".join(note.rstrip(".") for note in notes) or "there is no number of ranks to try"
        remedy = "Give a number that divides the model's heads and is calibrated, or leave it out."
        if plan.device_name:
            remedy = "Give a number that divides the model's heads, or leave it out."
        raise InvalidParameter("ranks", options.ranks, f"leaves no kind of worker: {why}", remedy)
    return found


def calibrated_steps(prepared: Prepared) -> tuple[StepTimeModel | None, str]:
    """Return the calibrated step times of this machine, and their source or why there are none."""
    load, cache = prepared.settings.load, prepared.settings.cache
    calibration, words = find_calibration(prepared.path, load, cache)
    return None if calibration is None else calibration.step_times, words


def not_calibrated(prepared: Prepared, words: str) -> InvalidParameter:
    """Return the error for a model without step times on this machine."""
    limit = f"has no step times on this machine ({words})"
    remedy = f"Calibrate it, or take the floors of a published device: --device-name {', '.join(devices())}."
    return InvalidParameter("model", prepared.settings.load.model, limit, remedy)


def simulated_start(prepared: Prepared, memory: MemoryPlan) -> EngineStarted:
    """Return the start event of a simulated engine with this memory plan."""
    started = engine_started(
        prepared.settings.scheduler,
        prepared.settings.cache,
        prepared.layout,
        num_blocks=memory.num_blocks,
        max_model_len=memory.max_model_len,
        model=memory.model,
        now_s=0.0,
    )
    return replace(started, process="simulated")


def _published(
    config: EngineConfig, plan: PlanOptions, options: SearchOptions, notes: list[str]
) -> Iterator[WorkerKind]:
    assert plan.device_name is not None, "asked of a machine whose figures are published"
    if options.calibrations:
        limit = "is of this machine, and a device is named"
        raise InvalidParameter("calibrations", options.calibrations, limit, "Leave out one of the two.")
    words = "published figures: step times are floors; communication between ranks takes no time"
    for ranks in options.rank_counts or DEFAULT_RANKS:
        of_ranks = replace(config, load=replace(config.load, tensor_parallel_size=ranks))
        try:
            prepared = prepared_for(of_ranks, plan.device_name)
            machine = published_machine(plan.device_name, prepared)
        except InvalidParameter as error:
            if ranks == 1:
                raise
            notes.append(f"{ranks} ranks are left out: {error}")
            continue
        times = roofline(prepared.shape, machine.limits, most_tokens=max(options.token_budgets))
        yield WorkerKind(None, prepared, times, words)


def _calibrated(config: EngineConfig, options: SearchOptions, notes: list[str]) -> Iterator[WorkerKind]:
    """Yield the kind that is calibrated here, and those of the given calibration files."""
    prepared = prepare(config)
    step_times, words = calibrated_steps(prepared)
    if step_times is None and not options.calibration_files:
        raise not_calibrated(prepared, words)
    if step_times is not None and _is_requested(config.load, words, options, notes):
        yield WorkerKind(prepared.num_threads, prepared, step_times, words)
    for path in options.calibration_files:
        of_file = Calibration.read(path)
        if of_file.step_times is None:
            raise InvalidParameter("calibrations", str(path), "has no step times", "Make it again without --drafts.")
        load = replace(
            config.load,
            threads=of_file.load.get("threads"),
            tensor_parallel_size=of_file.load.get("tensor_parallel_size", 1),
            enable_expert_parallel=of_file.load.get("enable_expert_parallel", False),
        )
        words = f"calibrated: {path.name}"
        if not _is_requested(load, words, options, notes):
            continue
        if of_file.model != model_name(config.load.model):
            limit = f"is of {of_file.model}, not of {model_name(config.load.model)}"
            raise InvalidParameter("calibrations", str(path), limit, "Give files of the model that is searched.")
        reason = mismatch_reason(of_file, load, config.cache)
        if reason:
            remedy = "Calibrate on this machine with the settings that are searched, and with --output."
            raise InvalidParameter("calibrations", str(path), reason, remedy)
        ready = prepare(replace(config, load=load))
        yield WorkerKind(ready.num_threads, ready, of_file.step_times, words)


def _is_requested(load: LoadConfig, words: str, options: SearchOptions, notes: list[str]) -> bool:
    """Return whether workers of this number of ranks are asked for; otherwise add the reason to the notes."""
    size = load.tensor_parallel_size
    if options.rank_counts is None or size in options.rank_counts:
        return True
    notes.append(f"left out ({words}): its workers have {counted(size, 'rank')}, which --ranks does not name")
    return False
