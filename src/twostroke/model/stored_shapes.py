"""Check that a source has exactly the tensors of a model, in their shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint, shorten, show_name
from twostroke.model.checkpoint import is_mtp_tensor, is_shared_kv_tensor
from twostroke.model.expert_formats import stored_names
from twostroke.model.registry import parameters_of, parts_of
from twostroke.model.weight_source import StoredWeight, WeightSource


def check_shapes(source: WeightSource, config: ModelConfig) -> None:
    """Raise if tensors are missing, misshapen or unused.

    Args:
        source: source of the weights.
        config: config of the model.

    Raises:
        CorruptCheckpoint: all such tensors, under their stored names.
    """
    parameters, stored = parameters_of(config), parts_of(config)
    missing: list[str] = []
    misshapen: list[str] = []
    for name, parts in stored.items():
        parameter = parameters[name]
        rows = parameter.rows if len(parts) == len(parameter.rows) else (sum(parameter.rows),)
        for part, num_rows in zip(parts, rows, strict=True):
            found, expected = source.weights.get(part), parameter.shape(num_rows)
            if found is None:
                missing.append(part)
            elif found.shape != expected:
                misshapen.append(f"{_placed(found, part)} {list(found.shape)} instead of {list(expected)}")
    expected_names = {part for parts in stored.values() for part in parts}
    extra = [name for name in source.weights if name not in expected_names and not _is_ignored(name, source, config)]
    problems = [
        f"{what}: {shorten(sorted(set(found)), show=show)}"
        for what, found, show in (
            ("missing", stored_names(source, missing), show_name),
            ("wrong shape", misshapen, str),
            ("not of this architecture", extra, show_name),
        )
        if found
    ]
    if problems:
        is_folder = source.path.is_dir()
        others = "config.json" if is_folder else "its metadata"
        remedy = "Download the model again, or correct config.json." if is_folder else "Convert the model again."
        raise CorruptCheckpoint(
            f"{source.path}: the tensors do not fit {others} ({config.architecture}); {'; '.join(problems)}. {remedy}"
        )


def _placed(found: StoredWeight, part: str) -> str:
    """Return a weight's name in its file; for a weight within a stack, also the expert's part."""
    if found.stack is None:
        return f"{show_name(found.stored_name or part)} is"
    stack = found.stack
    return f"{show_name(stack.name)} is {list(stack.shape)}, where {part.split('.')[-2]} of an expert is"


def _is_ignored(name: str, source: WeightSource, config: ModelConfig) -> bool:
    """Return whether an extra tensor is expected and ignored.

    Old checkpoints store the rotary frequencies. Tied ones sometimes store the head a second time, AutoGPTQ a bias
    of zeros for every matrix that it quantized, and Gemma 4 the K and V projections of layers that use those of
    other layers.
    """
    if is_shared_kv_tensor(name, config) or is_mtp_tensor(name, config):
        return True
    if name.endswith(".bias"):
        weight = source.weights.get(name.removesuffix("bias") + "weight")
        return weight is not None and weight.format is not None and _is_zero(source, name)
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _is_zero(source: WeightSource, name: str) -> bool:
    stored = source.read(name, torch.float32)
    return isinstance(stored, Tensor) and not stored.any()
