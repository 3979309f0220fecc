"""Default types of the computation, and of K and V."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import twostroke
from benchmarks.compare.random_gguf import SHAPES, random_gguf
from gguf_files import changed, fixture
from twostroke.config.engine import EngineConfig
from twostroke.startup.preparation import prepare


def types(model: Path, **given: Any) -> tuple[torch.dtype, str, torch.dtype]:
    """Return the types of activations, of K and V, and of attention's products."""
    prepared = prepare(EngineConfig.from_keywords(model=str(model), threads=1, **given))
    return prepared.dtype, prepared.kv_format, prepared.attention_dtype


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (torch.float32, "bf16", torch.bfloat16)),
        ({"kv_cache_dtype": "int8"}, (torch.float32, "int8", torch.bfloat16)),
        ({"kv_cache_dtype": "float32"}, (torch.float32, "f32", torch.float32)),
        ({"dtype": "float32"}, (torch.float32, "f32", torch.float32)),
        ({"dtype": "bfloat16"}, (torch.bfloat16, "bf16", torch.bfloat16)),
        ({"activation_quantization": "none"}, (torch.bfloat16, "bf16", torch.bfloat16)),
        ({"kernels": "reference"}, (torch.bfloat16, "bf16", torch.bfloat16)),
        (
            {"kernels": "reference", "dtype": "float32", "kv_cache_dtype": "bf16"},
            (torch.float32, "bf16", torch.float32),
        ),
    ],
    ids=str,
)
def test_a_file_of_codes_has_activations_in_float32(
    given: dict[str, Any], expected: tuple[torch.dtype, str, torch.dtype]
) -> None:
    assert types(fixture("llama-wide-q4_k_m"), **given) == expected


@pytest.mark.parametrize("name", ["llama-bf16", "llama-f16"])
def test_a_file_of_floats_keeps_its_type(name: str) -> None:
    assert types(fixture(name)) == (torch.bfloat16, "bf16", torch.bfloat16)


def test_a_file_with_floats_among_codes_is_computed_in_bfloat16(tmp_path: Path) -> None:
    """In float32 its floats would take twice the memory."""
    floats = np.zeros((64, 64), np.float16)
    path = changed("llama-q4_0", tmp_path / "mixed.gguf", tensors={"blk.0.attn_q.weight": floats})
    assert types(path) == (torch.bfloat16, "bf16", torch.bfloat16)


def test_a_router_of_floats_is_no_float_among_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 1, "hidden_size": 256, "inner_size": 256}
    small = replace(SHAPES["qwen3-3b-a0.6b"], num_experts=4, num_chosen=2, **sizes)
    monkeypatch.setitem(SHAPES, "small", small)
    random_gguf(
        "small", vocabulary=Path(twostroke.__file__).parent / "embedded", output=tmp_path / "x.gguf", progress=False
    )
    assert types(tmp_path / "x.gguf") == (torch.float32, "bf16", torch.bfloat16)
