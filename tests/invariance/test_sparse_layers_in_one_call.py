"""A sparse layer in one native call, held against its parts called one by one: the same bits in every format of
weights, for one row and for many, at every level of the processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.gguf_blocks import TYPES_BY_NAME, random_blocks
from oracle.naive_model import config_class
from oracle.paged_driver import PagedDriver
from twostroke.config.model import ModelConfig
from twostroke.gguf.container import TYPES
from twostroke.kernels import native
from twostroke.kernels.interface import FusedLayer, LayerParts, Operators, no_fused_layer
from twostroke.kernels.quantized_weight import QuantizedWeight, quantize_in_groups, quantize_per_channel
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.gguf.blocks import repack
from twostroke.model.sparse import Sparse

pytestmark = pytest.mark.skipif(not native.is_built(), reason="only the native kernels have layers in one call")

Quantize = Callable[[Tensor], Tensor | QuantizedWeight]
SHAPE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "pad_token_id": None},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256},
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "GptOss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    "Dots1": {
        **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 256},
        **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "first_k_dense_replace": 1},
    },
}
"""Norms of heads; biases and sinks; a shared expert, groups and a dense layer."""


def blocks(type_name: str, weight: Tensor) -> QuantizedWeight:
    """Return random blocks of a ggml type in place of a matrix, with numbers of similar size."""
    kind, (num_rows, num_columns) = TYPES[TYPES_BY_NAME[type_name]], weight.shape
    found = random_blocks(kind, (1e-3, 4e-3), (num_rows, num_columns // kind.block_size), seed=num_rows)
    return repack(
        type_name, torch.from_numpy(found).unflatten(-1, (-1, kind.block_bytes)), (num_rows, num_columns), weight.dtype
    )


FORMATS: dict[str, Quantize] = {
    "floats": lambda weight: weight,
    "int8": quantize_per_channel,
    "int4": partial(quantize_in_groups, group_size=32),
    "Q4_K": partial(blocks, "Q4_K"),
    "MXFP4": partial(blocks, "MXFP4"),
}


def weights(config: ModelConfig, dtype: torch.dtype, quantize: Quantize) -> dict[str, Tensor | QuantizedWeight]:
    """Return random weights, those of layers in a format."""
    generator, found = torch.Generator().manual_seed(5), dict[str, Tensor | QuantizedWeight]()
    for name, parameter in Sparse.parameters(config).items():
        numbers = torch.randn(parameter.shape(sum(parameter.rows)), generator=generator)
        numbers = numbers * 0.1 + (1.0 if "norm" in name else 0.0)
        numbers = numbers.to(torch.float32 if parameter.is_router or parameter.is_wide else dtype)
        found[name] = quantize(numbers) if is_of_products(name, parameter) else numbers
    return found


def is_of_products(name: str, parameter: Parameter) -> bool:
    return name.startswith("layers.") and parameter.columns is not None and not parameter.is_router


def states(model: Sparse) -> list[Tensor]:
    """Return hidden states of two prompts at once, of decodes one by one, and of both together."""
    driver = PagedDriver(model, num_blocks=64, kv_format="bf16")
    first, second = driver.add([i * 7 % 60 for i in range(60)]), driver.add([i * 5 % 60 for i in range(40)])
    steps = [[(first, 37), (second, 13)], [(first, 1)], [(first, 1), (second, 1)], [(second, 3)], [(first, 1)]]
    return [rows for step in steps for rows in driver.step(step)]


class Noted:
    """The layers that a back end bound."""

    def __init__(self, operators: Operators) -> None:
        self._bind, self.found = operators.fused_layer, list[FusedLayer | None]()

    def __call__(self, parts: LayerParts) -> FusedLayer | None:
        self.found.append(self._bind(parts))
        return self.found[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_has_the_bits_of_the_parts(family: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config_class(family)(architectures=[f"{family}ForCausalLM"], **SHAPE, **FAMILIES[family]).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    given = weights(config, dtype, FORMATS[name])
    for level in native.levels():
        operators = native.operators(level)
        noted = Noted(operators)
        in_one_call, by_parts = (
            states(Sparse(config, given, Placement(of, dtype, torch.device("cpu"), 128)))
            for of in (replace(operators, fused_layer=noted), replace(operators, fused_layer=no_fused_layer))
        )
        assert len(noted.found) == config.num_layers, noted.found
        assert None not in noted.found, (level, noted.found)
        assert all(torch.equal(one, other) for one, other in zip(in_one_call, by_parts, strict=True)), level
        assert all(rows.isfinite().all() for rows in in_one_call), level
