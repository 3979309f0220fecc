"""Size of the KV cache on a card: after loading the weights the largest steps run and are measured, and KV gets the
rest."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from twostroke.config.load import DEFAULT_GROUP_SIZE, QuantizationOnLoad
from twostroke.errors import DoesNotFit, InvalidParameter
from twostroke.kv_cache.device_memory import DeviceMemory
from twostroke.kv_cache.sizing import KVSizing, blocks_of_request
from twostroke.layers.row_split import RowSplit
from twostroke.model.decoder import DecoderModel
from twostroke.model.loader import check_weights
from twostroke.runner.async_runner import AsyncModelRunner
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.largest_steps import largest_steps
from twostroke.runner.launched_step import LaunchedStep
from twostroke.runner.memory_probe import MemoryProbe
from twostroke.runner.model_runner import ModelRunner
from twostroke.sampling.sampler import Sampler
from twostroke.startup.memory import card_memory, integer_quantizations, largest_step, size_for, with_quantization
from twostroke.startup.prepared import Prepared


@dataclass(frozen=True, slots=True)
class KVSize:
    """Size of the KV cache."""

    sizing: KVSizing
    memory: DeviceMemory | None = None
    """Measured memory, of the rank with the least room; None: the size was known before."""


def measure_and_size(
    prepared: Prepared, model: DecoderModel, sampler: Sampler, probe: MemoryProbe, split: RowSplit
) -> KVSize:
    """Run the largest steps and decide the number of KV blocks; all ranks do so, with the same result.

    Raises:
        DoesNotFit: too little is left; the message has the numbers and settings that would fit.
    """

    def measure(changed: Prepared) -> DeviceMemory:
        return _least_room(_measure(changed, model, sampler, probe), split, prepared.device)

    try:
        memory = measure(prepared)
    except torch.OutOfMemoryError as error:
        # the traceback's frames hold the step's tensors, which would count in the measurement of smaller steps
        traceback.clear_frames(error.__traceback__)
        # with several ranks, the others are still in the step that failed here
        fits = () if split.size > 1 else smaller_steps(prepared, measure)
        size = largest_step(prepared)
        raise DoesNotFit(
            f"a step of {size.max_tokens:,} tokens, of which {min(size.max_rows, size.max_tokens):,} sample, does not "
            f"fit beside the weights of {prepared.path.name}: {str(error).splitlines()[0]}. {_advice(fits)}"
        ) from error
    cache = prepared.settings.cache
    is_given = cache.kv_cache_memory is not None or cache.num_kv_blocks is not None
    needed = needed_bytes(prepared)
    if not is_given and memory.default_bytes < needed:  # a given size is checked by size_for
        raise DoesNotFit(
            f"{memory.account}, and a request of {prepared.settings.load.max_model_len or 2} tokens takes {needed:,}. "
            f"{_advice(settings_that_fit(prepared, memory, measure))}"
        )
    return KVSize(size_for(prepared, memory), memory)


def _advice(fits: Sequence[str]) -> str:
    if not fits:
        return "Lower several of --max-num-batched-tokens, --max-num-seqs and --max-model-len, or take a larger card."
    return f"What would fit: {'; or '.join(fits)}."


def _measure(prepared: Prepared, model: DecoderModel, sampler: Sampler, probe: MemoryProbe) -> DeviceMemory:
    """Return the memory of this rank's card.

    Raises:
        torch.OutOfMemoryError: not even the largest steps fit beside the weights.
    """
    size = largest_step(prepared)

    def run() -> None:
        kv = KVStorage(prepared.layout, 1, prepared.device)
        ahead = prepared.settings.schedules_ahead
        kind = AsyncModelRunner if ahead else ModelRunner
        runner = kind(model, kv, sampler, max_model_len=size.longest, grammars=prepared.grammars)
        launched: list[LaunchedStep] = []
        for requests, batch in largest_steps(size, prepared.layout):
            for request in requests:
                runner.add_request(request)
            launched.append(runner.launch(batch))
            if not ahead:
                runner.finish(launched.pop())
        for step in launched:  # up to here, two steps hold their results
            runner.finish(step)

    # the peak includes the block of KV that the steps used; it is too small to matter
    return card_memory(prepared, probe.measure(run))


def _least_room(own: DeviceMemory, split: RowSplit, device: torch.device) -> DeviceMemory:
    """Return the memory of the card with the least room over all ranks, because every rank has as many blocks."""
    names = [field.name for field in fields(own) if field.name != "utilization"]
    numbers = torch.tensor([[getattr(own, name) for name in names]], device=device)
    of_ranks = split.gather(numbers, len(names) * split.size).view(split.size, -1).tolist()
    found = [replace(own, **dict(zip(names, of_rank, strict=True))) for of_rank in of_ranks]
    return min(found, key=lambda memory: memory.default_bytes)


def needed_bytes(prepared: Prepared) -> int:
    """Return the KV bytes of the longest request in the settings, or else of the shortest: one token in, one out."""
    cache, layout = prepared.settings.cache, prepared.layout
    num_tokens = prepared.settings.load.max_model_len or 2
    num_blocks = blocks_of_request(layout, cache, num_tokens, prepared.max_tokens_per_step)
    num_scratch = len(layout.groups) if cache.kv_check_rate else 0
    per_block = layout.bytes_per_block + prepared.drafter_facts.kv_bytes_per_block
    return (num_blocks + num_scratch) * per_block + num_scratch * layout.bytes_per_block


def settings_that_fit(
    prepared: Prepared, memory: DeviceMemory, measure: Callable[[Prepared], DeviceMemory]
) -> list[str]:
    """Return changes of a single setting, as flags, each of which leaves room for a request.

    Args:
        prepared: the model with the current settings.
        memory: measured with these settings.
        measure: measures other settings.
    """
    needed, words = needed_bytes(prepared), list[str]()
    utilization = memory.utilization_for(needed)
    if utilization is not None:
        words.append(f"--gpu-memory-utilization {utilization:g}")
    words += smaller_steps(prepared, measure)
    for quantization in _smaller_quantizations(prepared):
        spared = prepared.rank_weight_bytes - with_quantization(prepared, quantization).rank_weight_bytes
        if replace(memory, weight_bytes=max(0, memory.weight_bytes - spared)).default_bytes >= needed:
            words.append(f"--quantization {quantization}")
            break  # the smallest change
    return words


def smaller_steps(prepared: Prepared, measure: Callable[[Prepared], DeviceMemory]) -> list[str]:
    """Return settings that make steps smaller, as flags.

    For each setting it is the first of its halves, quarters, ... that leaves room for a request. They are tried out,
    because the weights are loaded.
    """
    settings = prepared.settings

    def fits(part: str, name: str, value: int) -> bool:
        changed = replace(settings, **{part: replace(getattr(settings, part), **{name: value})})
        of_changed = replace(prepared, settings=changed)
        try:
            return measure(of_changed).default_bytes >= needed_bytes(of_changed)
        except torch.OutOfMemoryError:
            return False

    words: list[str] = []
    for part, name, now, least in (
        ("scheduler", "max_num_batched_tokens", settings.scheduler.max_num_batched_tokens, 1),
        ("scheduler", "max_num_seqs", settings.scheduler.max_num_seqs, 1),
        ("load", "max_model_len", prepared.longest_request, 2),
    ):
        value = next((value for value in _halves(now, least) if fits(part, name, value)), None)
        if value is not None:
            words.append(f"--{name.replace('_', '-')} {value}")
    return words


def _halves(value: int, least: int) -> Iterator[int]:
    """Yield a value's halves, down to the least.

    >>> list(_halves(100, 10)), list(_halves(2, 2))
    ([50, 25, 12], [])
    """
    while value // 2 >= least:
        value //= 2
        yield value


def _smaller_quantizations(prepared: Prepared) -> Iterator[QuantizationOnLoad]:
    """Yield the quantizations in which this model's weights can be loaded, the larger first."""
    for name in integer_quantizations(prepared):
        with contextlib.suppress(InvalidParameter):  # its matrices do not divide into groups
            check_weights(prepared.weights, prepared.config, name, DEFAULT_GROUP_SIZE)
            yield name
