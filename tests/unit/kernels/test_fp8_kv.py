"""K and V in fp8: the codes of the definition, attention over what they stand for, and the same tokens in any batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_pool import Pool, Shape, alone
from oracle import naive_kv
from twostroke import LLM, SamplingParams
from twostroke.config.kv_format import slot_bytes
from twostroke.errors import InvalidParameter
from twostroke.kernels import native
from twostroke.kernels.reference.kv_codec import decode, encode
from twostroke.kv_check import tolerance


def every_kind_of_number() -> np.ndarray:
    """All codes' values, the middles between them, what is just beside both, and floats of every size."""
    values = naive_kv.e4m3_values().astype(np.float32)
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([values, middles, np.float32([448.1, 463.9, 464.0, 464.1, 480.0, 1e5, 3e38])])
    beside = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-1))])
    powers = np.float32(2.0) ** np.arange(-149, 128, dtype=np.float32)
    dice = np.random.default_rng(0).normal(size=4096).astype(np.float32) * 100
    found = np.concatenate([beside, powers, powers * np.float32(1.3), dice])
    return np.concatenate([found, -found, np.float32([np.inf, -np.inf, np.nan])])


def test_codes_are_those_of_the_definition() -> None:
    x = every_kind_of_number()
    codes = encode(torch.from_numpy(x)[:, None], "fp8")[:, 0].numpy()
    is_nan = ~np.isfinite(x)
    assert np.array_equal(codes[~is_nan], naive_kv.e4m3(x)[~is_nan])
    assert (codes[is_nan] & 0x7F == 0x7F).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        read = decode(torch.arange(0x7F, dtype=torch.uint8)[:, None], "fp8", dtype)[:, 0]
        assert np.array_equal(read.double().numpy(), naive_kv.e4m3_values())


def test_a_slot_is_a_byte_for_each_number() -> None:
    assert slot_bytes("fp8", 128) == 128
    assert tolerance("fp8", "bfloat16", 1) > 2 * 2.0**-3


@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_against_the_oracle(head_dim: int, dtype: torch.dtype) -> None:
    """Ragged lengths, at and around block borders; in one step, in chunks and alone to the same bits."""
    shape = Shape(4, 2, head_dim, 16, None, dtype, "reference", "fp8")
    requests = [shape.qkv(n, seed=n) for n in (1, 15, 16, 17, 65)]
    pool = Pool(shape, requests)
    pool.step([(row, max(1, len(qkv) - 2)) for row, qkv in enumerate(requests)])
    while unfinished := [row for row, qkv in enumerate(requests) if pool.done[row] < len(qkv)]:
        pool.step([(row, 1) for row in unfinished])
    limit = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    for qkv, found in zip(requests, pool.results(), strict=True):
        assert torch.equal(found, alone(shape, qkv))
        torch.testing.assert_close(found.double(), shape.dense(qkv), **limit)


def outputs(model: Path, **config: Any) -> list[tuple[int, ...]]:
    rng = random.Random(3)
    common = [rng.randrange(100) for _ in range(40)]
    prompts = [[rng.randrange(100) for _ in range(n)] for n in (1, 33, 70)] + [[*common, 5], [*common, 6, 7]]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(prompts))]
    settings: dict[str, Any] = {"threads": 1, "num_kv_blocks": 64, "kernels": "reference", "kv_cache_dtype": "fp8"}
    with LLM(str(model), **{**settings, **config}) as llm:
        found: list[tuple[int, ...]] = []
        for _ in range(2):  # the second time with what is cached
            found += [
                tuple(output.outputs[0].token_ids)
                for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params)
            ]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_do_not_depend_on_the_batch(family: str, random_models: dict[str, Path]) -> None:
    expected = outputs(random_models[family])
    assert expected[:5] == expected[5:]
    for knob in (
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"block_size": 8},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 12, "max_model_len": 96},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_check_rate": 1.0},
    ):
        assert outputs(random_models[family], **knob) == expected, knob


@pytest.mark.skipif(not native.is_built(), reason="the native kernels were not built")
def test_the_native_kernels_say_that_they_do_not_read_it(random_models: dict[str, Path]) -> None:
    with pytest.raises(
        InvalidParameter, match=r"kv_cache_dtype='fp8': the native .*do not read it; they read f32, bf16,"
    ):
        LLM(str(random_models["llama"]), kv_cache_dtype="fp8")
