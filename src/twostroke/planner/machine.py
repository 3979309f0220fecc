"""The machine of a plan: this one, measured, or a GPU with published figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.cost.expert_shares import ExpertShares
from twostroke.cost.step_cost import MachineLimits, StepCost, raised_by_steps
from twostroke.kernels.cuda import LOWEST_CAPABILITY
from twostroke.kernels.dispatch import operators_to_plan
from twostroke.kernels.interface import Operators
from twostroke.model.model_path import local_path
from twostroke.planner.devices import Device, find_device
from twostroke.planner.options import PlanOptions
from twostroke.planner.words import significant
from twostroke.runner.machine_limits import measure_machine_limits
from twostroke.startup.memory import free_bytes_of
from twostroke.startup.preparation import moved_to, prepare
from twostroke.startup.prepared import Prepared

MAX_RATE_RATIO, MAX_RATE_RATIO_BUSY = 3.0, 20.0
"""Largest factor between two measurements of one machine: when idle, and when other processes ran during either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """The machine that runs the model: the devices of all ranks together."""

    name: str
    limits: MachineLimits
    memory_bytes: int
    """Free bytes of this machine, or all bytes of all ranks' cards."""
    others_bytes: int = 0
    """Bytes of each card that other processes use."""
    price_per_hour: float | None
    is_published: bool
    """Whether its figures come from a data sheet instead of a measurement."""


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The findings of a run about its machine."""

    limits: MachineLimits | None
    """Limits as measured at the start of the run; None: the log has none."""
    steps: tuple[tuple[StepCost, float], ...]
    """Work of each step, and its seconds."""
    expert_shares: tuple[ExpertShares, ...] = ()
    """Measured shares of experts, for each kind of them; empty: the log has none."""


def raised(machine: PlannedMachine, run: ObservedRun) -> tuple[PlannedMachine, str]:
    """Return the machine at rates that allow every step of a run on it, and a description of raised rates."""
    before = machine.limits
    after = before if machine_mismatch(before, run.limits) else raised_by_steps(before, run.steps)
    if after == before:
        return machine, ""
    num_faster = sum(before.floor_s(cost) > seconds for cost, seconds in run.steps)
    words = (
        f"raised to what the run shows, where {num_faster:,} of {len(run.steps):,} steps were faster than "
        f"{significant(before.flops_per_s / 1e12)} TFLOP/s and {significant(before.bytes_per_s / 1e9)} GB/s allow"
    )
    return replace(machine, limits=after), words


def machine_mismatch(planned: MachineLimits, of_log: MachineLimits | None) -> str:
    """Return a statement that a log is from another machine; empty where it may be from this one.

    Only the memory rates are compared: the arithmetic rate depends on the type of the factors.
    """
    if of_log is None:
        return ""
    apart = planned.bytes_per_s / of_log.bytes_per_s
    most = MAX_RATE_RATIO_BUSY if planned.is_estimate or of_log.is_estimate else MAX_RATE_RATIO
    if 1 / most <= apart <= most:
        return ""
    rates = f"{significant(of_log.bytes_per_s / 1e9)} GB/s there, {significant(planned.bytes_per_s / 1e9)} planned"
    return f"the log is of another machine ({rates})"


def planned_load(load: LoadConfig) -> LoadConfig:
    """Return settings for a plan, where a local folder may lack weights and a tokenizer.

    Weights are then random ones of config.json's shape, which a plan does not read. No number of a plan depends on the
    tokenizer, so the embedded one replaces a missing one.
    """
    folder = local_path(load.model)
    if not (folder / "config.json").is_file():
        return load
    has_weights = any(
        next(folder.glob(names), None) for names in ("*.safetensors", "*.safetensors.index.json", "*.gguf")
    )
    if load.load_format == "auto" and not has_weights:
        load = replace(load, load_format="dummy")
    if load.tokenizer is None and load.load_format == "dummy" and not (folder / "tokenizer.json").is_file():
        load = replace(load, tokenizer="embedded")
    return load


def prepared_for(config: EngineConfig, device_name: str | None) -> Prepared:
    """Return the model, prepared for a device.

    Args:
        config: settings of the engine.
        device_name: a GPU with published figures, which need not be present; None: the device of `config`.

    Raises:
        SetupError: there is no such model, or the settings do not fit the device.
    """
    if device_name is None:
        return prepare(config)
    _, device = find_device(device_name)
    config = replace(config, load=replace(config.load, device="cuda"))
    return prepare(config, planned=_operators(device, config.load))


def moved_to_device(prepared: Prepared, device_name: str) -> Prepared:
    """Return a prepared model as it would be on a published GPU, with that GPU's kernels."""
    _, device = find_device(device_name)
    load = replace(prepared.settings.load, device="cuda", kernels="auto", activation_quantization=None)
    settings = replace(prepared.settings, load=load)
    return moved_to(replace(prepared, settings=settings), _operators(device, load))


def machine_for(prepared: Prepared, options: PlanOptions) -> PlannedMachine:
    """Return the machine that the options ask for; measure it if it is this one."""
    if options.device_name is not None:
        return published_machine(options.device_name, prepared, options.memory, options.price_per_hour)
    memory, others = memory_here(prepared, options.memory)
    return PlannedMachine(
        name="this machine",
        limits=_measured(prepared),
        memory_bytes=memory,
        others_bytes=others,
        price_per_hour=options.price_per_hour,
        is_published=False,
    )


def published_machine(
    name: str, prepared: Prepared, memory: int | None = None, price_per_hour: float | None = None
) -> PlannedMachine:
    """Return one device for each rank; their rates add up, and communication between ranks takes no time.

    Args:
        name: name of the device.
        prepared: the model on that device.
        memory: bytes of each device; None: the published bytes.
        price_per_hour: price of all devices; None: their list price, if there is one.
    """
    name, device = find_device(name)
    num_ranks = prepared.num_ranks
    if price_per_hour is None and device.price_per_hour is not None:
        price_per_hour = device.price_per_hour * num_ranks
    each = device.memory_bytes if memory is None else memory
    limits = device.limits(name, prepared.dtype_name)
    return PlannedMachine(
        name=name,
        limits=MachineLimits(limits.flops_per_s * num_ranks, limits.bytes_per_s * num_ranks),
        memory_bytes=each * prepared.settings.load.num_local_ranks,
        price_per_hour=price_per_hour,
        is_published=True,
    )


def _operators(device: Device, load: LoadConfig) -> Operators:
    has_triton = device.compute_capability >= LOWEST_CAPABILITY
    return operators_to_plan(load.kernels, load.activation_quantization, has_triton=has_triton)


def memory_here(prepared: Prepared, asked: int | None) -> tuple[int, int]:
    """Return the bytes of this machine for `plan_memory`, and the bytes of each card that other processes use.

    For cards these are all bytes of all ranks, for the host the free bytes.

    Args:
        prepared: the model on its device.
        asked: bytes to plan with instead, of which other processes use none; None: the actual bytes.
    """
    if asked is not None:
        return asked, 0
    free = free_bytes_of(prepared.device)
    if prepared.device.type != "cuda":
        return free, 0
    total = torch.cuda.mem_get_info(prepared.device)[1]
    return total * prepared.num_ranks, total - free


def _measured(prepared: Prepared) -> MachineLimits:
    """Measure this machine, as an engine with this model does."""
    return measure_machine_limits(
        prepared.attention_dtype,
        prepared.device,
        prepared.num_threads * prepared.settings.load.num_local_ranks,
        int8=prepared.int8_operators,
        read=prepared.read_stream,
        step_bytes=prepared.step_bytes,
    )
