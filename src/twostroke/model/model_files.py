"""Files of a model: a folder in Hugging Face's layout, or a GGUF file, chosen by the user's model argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from twostroke.config.load import LoadConfig, Quantization
from twostroke.config.model import ModelConfig
from twostroke.config.quantization import QuantizationConfig
from twostroke.errors import InvalidParameter, UnsupportedModel
from twostroke.gguf.container import GGUFFile
from twostroke.model.checkpoint import find_model_folder, read_model_config
from twostroke.model.gguf.model_config import read_gguf_config
from twostroke.model.gguf.weights import GGUFWeights
from twostroke.model.loader import check_quantization, open_weights
from twostroke.model.model_path import gguf_path
from twostroke.model.random_weights import RandomWeights
from twostroke.model.weight_source import WeightSource
from twostroke.tokenizer.gguf_tokenizer import (
    read_gguf_eos_token_ids,
    read_gguf_sampling_defaults,
    tokenizer_from_gguf,
)
from twostroke.tokenizer.settings import read_eos_token_ids, read_sampling_defaults
from twostroke.tokenizer.tokenizer import Tokenizer


class ModelFiles(Protocol):
    """Everything known about a model before its weights are read.

    Each method raises only SetupErrors, apart from the errors listed at it.
    """

    @property
    def path(self) -> Path:
        """The model's folder or file."""
        ...

    def config(self) -> ModelConfig:
        """Return the config of the model."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model."""
        ...

    def eos_token_ids(self, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
        """Return the ids that end a generation: those of `tokenizer`, and those that the model names."""
        ...

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling values that the model recommends; they are not applied (`SamplingParams`)."""
        ...

    def weights(self, config: ModelConfig, quantization: Quantization | None) -> WeightSource:
        """Return the weights, not read yet; `quantization` is what the user asks for."""
        ...

    def random_weights(self, config: ModelConfig, device: torch.device) -> WeightSource:
        """Return random weights of the model's shape, made on the device on demand.

        Raises:
            InvalidParameter: the shape is not known without the weights, or they are not floats.
        """
        ...


def find_model(model: str, *, with_weights: bool = True) -> ModelFiles:
    """Return the files of a model.

    Args:
        model: a GGUF file, a folder (of a model, or with one GGUF file), a short name, a hub id, or "embedded".
        with_weights: False fetches only the files that a tokenizer needs.

    Raises:
        ModelNotFound: there is no such file or folder, and the hub does not have it or cannot be reached.
        CorruptCheckpoint: a GGUF file is truncated or not one.
        UnsupportedModel: a GGUF file has tensors, or a version, that cannot be read.
    """
    path = gguf_path(model)
    return ModelFolder(find_model_folder(model, with_weights=with_weights)) if path is None else GGUFModel(path)


def find_model_of(load: LoadConfig) -> ModelFiles:
    """Return the files of the configured model; weights are fetched only if they will be read."""
    return find_model(load.model, with_weights=load.load_format == "auto")


def weights_of(files: ModelFiles, config: ModelConfig, load: LoadConfig, device: torch.device) -> WeightSource:
    """Return the weights that the configuration asks for, not read yet.

    Args:
        files: files of the model.
        config: config of the same model.
        load: settings for loading.
        device: device on which random weights are made.

    Raises:
        SetupError: errors of `ModelFiles.weights`.
        InvalidParameter: errors of `ModelFiles.random_weights`.
    """
    if load.load_format == "dummy":
        return files.random_weights(config, device)
    return files.weights(config, load.quantization)


def find_folder_only(model: str, why: str) -> Path:
    """Return the folder of a model, for purposes that a GGUF file does not serve.

    Args:
        model: a folder, a hub id, or "embedded".
        why: reason why a folder is needed: "benchmarks compare writes ...".

    Raises:
        UnsupportedModel: it is a GGUF file.
        ModelNotFound: there is no such file or folder, and the hub does not have it or cannot be reached.
    """
    if gguf_path(model) is not None:
        raise UnsupportedModel(
            f"{model!r} is a GGUF file; {why}. Give the folder or hub id that the file was made from."
        )
    return find_model_folder(model)


class ModelFolder:
    """A folder with config.json, tokenizer.json and safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> ModelConfig:
        return read_model_config(self.path)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)

    def eos_token_ids(self, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
        return read_eos_token_ids(self.path, tokenizer.eos_token_id, vocab_size)

    def sampling_defaults(self) -> dict[str, Any]:
        return read_sampling_defaults(self.path)

    def weights(self, config: ModelConfig, quantization: Quantization | None) -> WeightSource:
        return open_weights(self.path, config, quantization)

    def random_weights(self, config: ModelConfig, device: torch.device) -> WeightSource:
        if isinstance(config.quantization, QuantizationConfig):
            raise InvalidParameter(
                "load_format",
                "dummy",
                f"random weights are floats, but config.json of {self.path} says that its weights are quantized",
                "Remove quantization_config from config.json, and quantize while loading (--quantization int8).",
            )
        return RandomWeights(self.path, config, device)


class GGUFModel:
    """A GGUF file with config, tokenizer and weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)

    def config(self) -> ModelConfig:
        return read_gguf_config(self._file)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file.metadata)

    def eos_token_ids(self, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
        of_tokenizer = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        return read_gguf_eos_token_ids(self._file.metadata, vocab_size).union(of_tokenizer)

    def sampling_defaults(self) -> dict[str, Any]:
        return read_gguf_sampling_defaults(self._file.metadata)

    def weights(self, config: ModelConfig, quantization: Quantization | None) -> WeightSource:
        source = GGUFWeights(self._file, config)
        check_quantization(source, quantization)
        return source

    def random_weights(self, config: ModelConfig, device: torch.device) -> WeightSource:
        del config, device
        limit = f"{self.path} is a GGUF file, for which random weights are not implemented"
        remedy = "Give a folder with config.json, or leave it out."
        raise InvalidParameter("load_format", "dummy", limit, remedy)
