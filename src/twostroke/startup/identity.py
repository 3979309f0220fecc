"""What a process computes and by what, as far as the bits of K and V depend on it; compared before any travel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from twostroke.config.kv_format import KVFormat
from twostroke.config.load import DEFAULT_GROUP_SIZE, LoadConfig
from twostroke.config.model import ModelConfig
from twostroke.gguf.container import parts_of
from twostroke.kv_transfer.geometry import KV_CACHE_DTYPE
from twostroke.version import __version__

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
_KV_CODEC = "3"
"""Raised when a KV format comes to mean other numbers: what one process stored another must not misread."""


def identity_facts(path: Path, config: ModelConfig, load: LoadConfig, token_ids: Sequence[int]) -> dict[str, str]:
    """Of the model. Two folders with the same weights are the same model, whatever they are called.

    Args:
        path: of the weights.
        config: of the model, fixed for the longest request.
        load: what the user asked for.
        token_ids: of the text that the means of keys are found with (runner/key_means.py): quantized keys are less
            these means.
    """
    ropes = (sorted(asdict(rope).items()) for rope, _ in config.ropes)
    rope = "; ".join(" ".join(f"{name}={value}" for name, value in fields if value is not None) for fields in ropes)
    return {
        "architecture": config.architecture,
        "shape": f"{config.num_layers} layers of {config.hidden_size}, {config.vocab_size} tokens",
        "rope": rope,
        "maths": _digest(_maths(config)),
        "KV codec": _KV_CODEC,
        "tokenizer": f"one with the tokens {_digest(token_ids)}",
        "weights": fingerprint(path) if load.load_format == "auto" else f"random, of {_digest(config)}",
    }


def numerics_facts(
    kernels: str, device: str, load: LoadConfig, *, dtype: str, kv_format: KVFormat, quantization: str | None
) -> dict[str, str]:
    """Return the facts that decide the numerics, named as the settings where there is one.

    Args:
        kernels: name of the operators.
        device: type of the device.
        load: load settings of the user.
        dtype: type of activations.
        kv_format: format of K and V.
        quantization: quantization of the weights as the checkpoint stores them.
    """
    quantized = load.quantization or quantization or "none"
    if load.quantization == "int4":
        quantized += f", group size {load.group_size or DEFAULT_GROUP_SIZE}"
    of_activations = load.activation_quantization or ("int8" if kernels.startswith("native ") else "none")
    return {
        "twostroke": __version__,
        "kernels": kernels,
        "device": device,
        "dtype": dtype,
        KV_CACHE_DTYPE: kv_format,
        "quantization": quantized,
        "activation_quantization": "none" if quantized == "none" else of_activations,
        "batch_invariant": "yes" if load.batch_invariant else "no",
    }


def _maths(config: ModelConfig) -> ModelConfig:
    """Return what a model computes with its weights; where two differ, no weight tells."""
    return replace(config, dtype="", max_position_embeddings=0, max_context=0, early_exit_layers=())


def _digest(value: object) -> str:
    """Return a digest of a value's `repr`: of token ids, or of a shape, which is all that random weights come from."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def fingerprint(path: Path) -> str:
    """Of weight files: their sizes, and samples spread over each. Reading all of them would take as long as loading.

    Two fine-tunes of one model differ nearly everywhere, so some of the samples do.
    """
    files = parts_of(path) if path.is_file() else sorted(path.glob("*.safetensors"))
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            for i in range(_NUM_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                found.update(stream.read(_SAMPLE_BYTES))
    return found.hexdigest()
