"""The KV cache of a card: weights are there, the largest steps run and are measured, and the rest is for KV."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from twostroke.config.engine import EngineConfig
from twostroke.config.load import DEFAULT_GROUP_SIZE, QuantizationOnLoad
from twostroke.errors import DoesNotFit, InvalidParameter
from twostroke.kv_cache.device_memory import DeviceMemory
from twostroke.kv_cache.sizing import KVSizing, blocks_of_request
from twostroke.layers.row_split import RowSplit
from twostroke.model.decoder import DecoderModel
from twostroke.model.loader import check_weights
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.largest_steps import largest_steps
from twostroke.runner.launched_step import LaunchedStep
from twostroke.runner.memory_probe import MemoryProbe
from twostroke.runner.model_runner import ModelRunner
from twostroke.runner.running_ahead import RunnerAhead
from twostroke.sampling.sampler import Sampler
from twostroke.startup.card_memory import CardUse, card_memory, largest_step
from twostroke.startup.preparation import (
    Prepared,
    loaded_weight_bytes,
    longest_request,
    max_tokens_per_step,
    size_for,
)


@dataclass(frozen=True, slots=True)
class Sized:
    """How large the KV cache is."""

    sizing: KVSizing
    memory: DeviceMemory | None = None
    """What was measured for it, of several ranks that of the one which has least room; None: it was known before."""


def measure_and_size(
    config: EngineConfig,
    prepared: Prepared,
    model: DecoderModel,
    sampler: Sampler,
    probe: MemoryProbe,
    split: RowSplit,
) -> Sized:
    """Runs the largest steps and decides how many KV blocks there are; all ranks do, and decide the same.

    Raises:
        DoesNotFit: too little is left, with the numbers and the settings that would do.
    """

    def measure(config: EngineConfig) -> DeviceMemory:
        return _poorest(_measure(config, prepared, model, sampler, probe), split, prepared.device)

    try:
        memory = measure(config)
    except torch.OutOfMemoryError as error:
        # the frames that it came through hold the tensors of the step: smaller ones would be measured beside them
        traceback.clear_frames(error.__traceback__)
        # of several ranks, the others are in the middle of the step that this one had to leave
        fits = () if split.size > 1 else smaller_steps(config, prepared, measure)
        size = largest_step(config, prepared)
        raise DoesNotFit(
            f"a step of {size.max_tokens:,} tokens, of which {min(size.max_rows, size.max_tokens):,} sample, does not "
            f"fit beside the weights of {prepared.path.name}: {str(error).splitlines()[0]}. {_advice(fits)}"
        ) from error
    is_given = config.cache.kv_cache_memory is not None or config.cache.num_kv_blocks is not None
    needed = needed_bytes(config, prepared)
    if not is_given and memory.default_bytes < needed:  # how a given size fits is said when it is cut up
        raise DoesNotFit(
            f"{memory.account}, and a request of {config.load.max_model_len or 2} tokens takes {needed:,}. "
            f"{_advice(settings_that_fit(config, prepared, memory, measure))}"
        )
    return Sized(size_for(config, prepared, memory), memory)


def _advice(fits: Sequence[str]) -> str:
    if not fits:
        return "Lower several of --max-num-batched-tokens, --max-num-seqs and --max-model-len, or take a larger card."
    return f"What would fit: {'; or '.join(fits)}."


def _measure(
    config: EngineConfig, prepared: Prepared, model: DecoderModel, sampler: Sampler, probe: MemoryProbe
) -> DeviceMemory:
    """Of this rank's card.

    Raises:
        torch.OutOfMemoryError: not even the largest steps fit beside the weights.
    """
    size = largest_step(config, prepared)

    def run() -> None:
        kv = KVStorage(prepared.layout, 1, prepared.device)
        ahead = config.schedules_ahead
        kind = RunnerAhead if ahead else ModelRunner
        runner = kind(model, kv, sampler, max_model_len=size.longest, grammars=prepared.grammars)
        launched: list[LaunchedStep] = []
        for requests, batch in largest_steps(size, prepared.layout):
            for request in requests:
                runner.add_request(request)
            launched.append(runner.launch(batch))
            if not ahead:
                runner.finish(launched.pop())
        for step in launched:  # until here, two steps hold what they have computed
            runner.finish(step)

    reading = probe.around(run)
    use = CardUse(
        total_bytes=reading.total_bytes,
        others_bytes=reading.others_bytes,
        held_bytes=reading.held_bytes,
        step_bytes=reading.peak_bytes,  # includes the block of KV that the steps used; it is too small to matter
    )
    return card_memory(config, prepared, use)


def _poorest(own: DeviceMemory, split: RowSplit, device: torch.device) -> DeviceMemory:
    """Of all ranks' cards the one that has least room, since every rank has as many blocks."""
    numbers = [
        own.total_bytes,
        own.others_bytes,
        own.weight_bytes,
        own.draft_bytes,
        own.step_bytes,
        own.recorded_bytes,
        own.reserve_bytes,
    ]
    of_ranks = split.gather(torch.tensor([numbers], device=device), len(numbers) * split.size)
    found = [
        DeviceMemory(
            total_bytes=total,
            utilization=own.utilization,
            others_bytes=others,
            weight_bytes=weights,
            draft_bytes=drafts,
            step_bytes=step,
            recorded_bytes=recorded,
            reserve_bytes=reserve,
        )
        for total, others, weights, drafts, step, recorded, reserve in of_ranks.view(split.size, -1).tolist()
    ]
    return min(found, key=lambda memory: memory.default_bytes)


def needed_bytes(config: EngineConfig, prepared: Prepared) -> int:
    """KV of the longest request that was asked for, or else of the shortest there is: one token in, one out."""
    drafts = prepared.drafter_facts
    num_tokens = config.load.max_model_len or 2
    num_blocks = blocks_of_request(
        prepared.layout, config.cache, num_tokens, max_tokens_per_step(config, prepared.config)
    )
    num_scratch = len(prepared.layout.groups) if config.cache.kv_check_rate else 0
    per_block = prepared.layout.bytes_per_block + drafts.kv_bytes_per_block
    return (num_blocks + num_scratch) * per_block + num_scratch * prepared.layout.bytes_per_block


def settings_that_fit(
    config: EngineConfig, prepared: Prepared, memory: DeviceMemory, measure: Callable[[EngineConfig], DeviceMemory]
) -> list[str]:
    """Changes of one setting, each of which leaves room for a request, as flags.

    Args:
        config: what was asked for.
        prepared: what it comes to.
        memory: as it was measured for that.
        measure: the same with other sizes of steps.
    """
    needed, words = needed_bytes(config, prepared), list[str]()
    utilization = memory.utilization_for(needed)
    if utilization is not None:
        words.append(f"--gpu-memory-utilization {utilization:g}")
    words += smaller_steps(config, prepared, measure)
    num_weight_bytes = loaded_weight_bytes(config, prepared, prepared.num_ranks)
    for quantization in _smaller_forms(config, prepared):
        smaller = replace(config, load=replace(config.load, quantization=quantization))
        spared = num_weight_bytes - loaded_weight_bytes(smaller, prepared, prepared.num_ranks)
        if replace(memory, weight_bytes=max(0, memory.weight_bytes - spared)).default_bytes >= needed:
            words.append(f"--quantization {quantization}")
            break  # the least change of them
    return words


def smaller_steps(
    config: EngineConfig, prepared: Prepared, measure: Callable[[EngineConfig], DeviceMemory]
) -> list[str]:
    """Of the settings that steps become smaller with: the first of its halves, quarters, ... that leaves room for a
    request, found by trying, as the weights are there. As flags."""

    def fits(changed: EngineConfig) -> bool:
        try:
            return measure(changed).default_bytes >= needed_bytes(changed, prepared)
        except torch.OutOfMemoryError:
            return False

    scheduler, load = config.scheduler, config.load
    changes: tuple[tuple[str, int, int, Callable[[int], EngineConfig]], ...] = (
        (
            "--max-num-batched-tokens",
            scheduler.max_num_batched_tokens,
            1,
            lambda value: replace(config, scheduler=replace(scheduler, max_num_batched_tokens=value)),
        ),
        (
            "--max-num-seqs",
            scheduler.max_num_seqs,
            1,
            lambda value: replace(config, scheduler=replace(scheduler, max_num_seqs=value)),
        ),
        (
            "--max-model-len",
            longest_request(config, prepared),
            2,
            lambda value: replace(config, load=replace(load, max_model_len=value)),
        ),
    )
    words: list[str] = []
    for flag, now, least, change in changes:
        value = next((value for value in _halves(now, least) if fits(change(value))), None)
        if value is not None:
            words.append(f"{flag} {value}")
    return words


def _halves(value: int, least: int) -> Iterator[int]:
    """
    >>> list(_halves(100, 10)), list(_halves(2, 2))
    ([50, 25, 12], [])
    """
    while value // 2 >= least:
        value //= 2
        yield value


def _smaller_forms(config: EngineConfig, prepared: Prepared) -> Iterator[QuantizationOnLoad]:
    """Forms that this model's weights can be loaded in, the larger first."""
    is_quantized = config.load.quantization is not None or prepared.weights.quantization is not None
    if is_quantized or not prepared.operators.keeps_quantized:
        return
    names: tuple[QuantizationOnLoad, ...] = ("int8", "int4")
    for name in names:
        with contextlib.suppress(InvalidParameter):  # its matrices do not divide into groups
            check_weights(prepared.weights, prepared.config, name, DEFAULT_GROUP_SIZE)
            yield name
