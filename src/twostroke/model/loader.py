"""Safetensors to a model that runs: checks every name and shape first, then reads, converts and packs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from twostroke.config.load import Quantization
from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint, SetupError
from twostroke.kernels.dispatch import Operators, Weight
from twostroke.kernels.quantized_weight import QuantizedWeight, quantize_in_groups, quantize_per_channel
from twostroke.log import get_logger
from twostroke.model.checkpoint import Checkpoint, shorten
from twostroke.model.decoder import DecoderModel, Parameter, Placement
from twostroke.model.registry import architecture, model_class
from twostroke.model.weight_map import checkpoint_names

log = get_logger(__name__)


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    operators: Operators,
    quantization: Quantization | None = None,
) -> DecoderModel:
    """Loads a model folder.

    Args:
        folder: holds the safetensors files.
        config: of that folder (checkpoint.read_model_config).
        dtype: of weights and activations; stored weights are converted.
        device: where it runs.
        max_model_len: positions the rotary tables are made for.
        operators: the backend.
        quantization: of the weights that are multiplied; None keeps them in `dtype`.

    Raises:
        UnsupportedModel: the architecture or the type of the weights is not implemented.
        ModelNotFound: there are no safetensors files.
        CorruptCheckpoint: unreadable files, or tensors that are missing, extra or misshapen; all of them are named.
            Also NaN or infinity in one.
        SetupError: weights too large for `dtype`.
    """
    start_s = time.perf_counter()
    kind, names = model_class(config.architecture), architecture(config.architecture).names
    checkpoint = Checkpoint(folder)
    parameters = kind.parameters(config)
    sources = {name: checkpoint_names(names, name) for name in parameters}
    _check(checkpoint, parameters, sources, config, folder)
    quantize = None if quantization is None else _QUANTIZERS[quantization]
    multiplied = {name for name, parameter in parameters.items() if _is_multiplied(name, config, parameter)}
    weights = _Weights(checkpoint, sources, dtype, device, folder, multiplied, quantize)
    if config.tie_word_embeddings:
        _check_tied_head(checkpoint, sources["embedding.weight"][0])
    model = kind(config, weights, Placement(operators, dtype, device, max_model_len))
    mib = weight_bytes(config, dtype, quantization) >> 20
    log.info("%s: %d MiB of weights in %.1f s", folder.name, mib, time.perf_counter() - start_s)
    return model


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Bytes of all weights once they are loaded; tied ones count once."""
    of_multiplied = dtype.itemsize if quantization is None else _BYTES_PER_WEIGHT[quantization]
    parameters = model_class(config.architecture).parameters(config).items()
    sizes = (
        parameter.size * (of_multiplied if _is_multiplied(name, config, parameter) else dtype.itemsize)
        for name, parameter in parameters
    )
    return math.ceil(sum(sizes))


_QUANTIZERS: dict[Quantization, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_per_channel,
    "int4": quantize_in_groups,
}
_BYTES_PER_WEIGHT: dict[Quantization, float] = {"int8": 1 + 2 / 128, "int4": 0.5 + 2 / 32}
"""A code, and its share of a group's float16 scale."""


def _is_multiplied(name: str, config: ModelConfig, parameter: Parameter) -> bool:
    """Whether it is a matrix of a product; a table that tokens are looked up in is not, unless it is the head too."""
    return parameter.columns is not None and (name != "embedding.weight" or config.tie_word_embeddings)


class _Weights(Mapping[str, Weight]):
    """A model's weights by our names, read when asked for and not kept: who packs one needs no second copy of it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Mapping[str, tuple[str, ...]],
        dtype: torch.dtype,
        device: torch.device,
        folder: Path,
        multiplied: Set[str],
        quantize: Callable[[Tensor], QuantizedWeight] | None,
    ) -> None:
        self._checkpoint, self._sources, self._folder = checkpoint, sources, folder
        self._dtype, self._device = dtype, device
        self._multiplied, self._quantize = multiplied, quantize

    def __getitem__(self, name: str) -> Weight:
        parts = self._sources[name]
        found = _join([self._checkpoint.read(part) for part in parts], self._dtype, self._device)
        if not _is_finite(found):
            _refuse_not_finite(self._checkpoint, parts, self._dtype, self._folder)
        return found if self._quantize is None or name not in self._multiplied else self._quantize(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _join(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of our own: memory that the checkpoint's file maps would change with the file."""
    if len(parts) > 1:
        return torch.cat([part.to(dtype) for part in parts]).to(device)
    return parts[0].to(device=device, dtype=dtype, copy=True).contiguous()


def _is_finite(tensor: Tensor) -> bool:
    """One cheap pass: neither NaN nor infinity goes away in a sum. One that is only too large is looked at again."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _refuse_not_finite(checkpoint: Checkpoint, parts: tuple[str, ...], dtype: torch.dtype, folder: Path) -> NoReturn:
    broken = [part for part in parts if not _is_finite(checkpoint.read(part))]
    if broken:
        raise CorruptCheckpoint(f"{folder}: NaN or infinity in {shorten(broken)}. Download the model again.")
    wide = [part for part in parts if not _is_finite(checkpoint.read(part).to(dtype))]
    raise SetupError(
        f"dtype={str(dtype).removeprefix('torch.')}: {shorten(wide)} has numbers beyond its largest, "
        f"{torch.finfo(dtype).max:g}. Use a wider one (--dtype bfloat16, --dtype float32)."
    )


def _check(
    checkpoint: Checkpoint,
    parameters: dict[str, Parameter],
    sources: dict[str, tuple[str, ...]],
    config: ModelConfig,
    folder: Path,
) -> None:
    missing: list[str] = []
    misshapen: list[str] = []
    for name, parts in sources.items():
        parameter = parameters[name]
        rows = parameter.rows if len(parts) == len(parameter.rows) else (sum(parameter.rows),)
        for part, num_rows in zip(parts, rows, strict=True):
            found, expected = checkpoint.shapes.get(part), parameter.shape(num_rows)
            if found is None:
                missing.append(part)
            elif found != expected:
                misshapen.append(f"{part} is {list(found)} instead of {list(expected)}")
    expected_names = {part for parts in sources.values() for part in parts}
    extra = [name for name in checkpoint.shapes if name not in expected_names and not _is_harmless(name, config)]
    problems = [
        f"{what}: {shorten(sorted(names))}"
        for what, names in (("missing", missing), ("wrong shape", misshapen), ("not of this architecture", extra))
        if names
    ]
    if problems:
        raise CorruptCheckpoint(
            f"{folder}: the tensors do not fit config.json ({config.architecture}); {'; '.join(problems)}."
        )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store the rotary frequencies, and tied ones sometimes the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _check_tied_head(checkpoint: Checkpoint, embedding: str) -> None:
    if "lm_head.weight" in checkpoint.shapes and not torch.equal(
        checkpoint.read("lm_head.weight"), checkpoint.read(embedding)
    ):
        raise CorruptCheckpoint(
            "config.json ties lm_head.weight to the embedding, but the checkpoint holds another lm_head.weight. "
            "Set tie_word_embeddings to false to use it."
        )
