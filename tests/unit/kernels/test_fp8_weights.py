"""Weights in fp8: the codes of the definition with a power of two for each row, and engines that run on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import naive_kv
from twostroke import LLM, SamplingParams
from twostroke.errors import InvalidParameter
from twostroke.kernels import native
from twostroke.kernels.quantized_weight import QuantizedWeight, quantize_fp8


def numbers(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and codes of one row by definition: the scale is the least power of two that holds the largest
    number."""
    row = weight.float().numpy().astype(np.float64)
    exponent = -24
    while exponent < 15 and np.abs(row).max() > 448 * 2.0**exponent:
        exponent += 1
    return np.float64(2.0**exponent), naive_kv.e4m3((row / 2.0**exponent).astype(np.float32))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=4, max_size=4),
    st.integers(-20, 8),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_codes_and_scales_are_those_of_the_definition(row: list[float], power: int, dtype: torch.dtype) -> None:
    weight = (torch.tensor([row], dtype=torch.float32) * 2.0**power).to(dtype)
    found = quantize_fp8(weight)
    scale, codes = numbers(weight[0])
    assert found.scales[0, 0].item() == scale
    assert np.array_equal(found.codes[0].numpy(), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_is_off_by_a_sixteenth_of_itself_at_most(dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 320, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    found = quantize_fp8(weight)
    back = found.dequantize()
    smallest = found.scales[:, :1].float() * 2.0**-6  # below, steps are of one size
    limit = torch.maximum(weight.float().abs(), smallest) / 16
    assert ((back.float() - weight.float()).abs() <= limit).all()
    assert back.dtype is dtype
    assert torch.equal(quantize_fp8(back).dequantize(), back)  # its value is stored exactly


def test_rows_of_zeros_and_huge_ones() -> None:
    weight = torch.tensor([[0.0, 0.0], [3e38, -1.0], [1e-30, 0.0]])
    found = quantize_fp8(weight).dequantize()
    assert torch.isfinite(found).all()
    assert not found[0].any()


def test_fp8_is_stacked_with_its_like_alone() -> None:
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    fp8, int8 = (
        quantize_fp8(weight),
        QuantizedWeight(torch.zeros(4, 128).byte(), torch.ones(4, 1).half(), None, 8, 128, torch.float32),
    )
    assert fp8.has_same_format(quantize_fp8(2 * weight))
    assert not fp8.has_same_format(int8)
    stacked = QuantizedWeight.stack([fp8, fp8.select_rows(slice(1, 2))])
    assert stacked.is_fp8
    assert torch.equal(stacked.dequantize(), torch.cat([fp8.dequantize(), fp8.dequantize()[1:2]]))
    assert fp8.format != int8.format


def outputs(model: Path, **config: Any) -> list[tuple[int, ...]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(100) for _ in range(n)] for n in (1, 33, 70)]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(prompts))]
    settings: dict[str, Any] = {"threads": 1, "num_kv_blocks": 64, "kernels": "reference", "quantization": "fp8"}
    with LLM(str(model), **{**settings, **config}) as llm:
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        return [tuple(output.outputs[0].token_ids) for output in found]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tokens_do_not_depend_on_the_batch(family: str, random_models: dict[str, Path]) -> None:
    expected = outputs(random_models[family])
    for knob in ({"max_num_batched_tokens": 7}, {"max_num_seqs": 1}, {"enable_prefix_caching": False}):
        assert outputs(random_models[family], **knob) == expected, knob


@pytest.mark.skipif(not native.is_built(), reason="the native kernels were not built")
def test_the_native_kernels_say_that_they_do_not_multiply_it(random_models: dict[str, Path]) -> None:
    with pytest.raises(InvalidParameter, match=r"quantization='fp8': the native .* take int8, int4\. Take int8, or"):
        LLM(str(random_models["llama"]), quantization="fp8")
