"""KV formats: the codes of the definition, bit for bit on every backend, and attention over what they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_pool import LAYER, Pool, Shape, alone
from oracle import naive_kv
from tiers import examples
from twostroke.config.kv_format import KV_FORMATS, KVFormat, is_quantized, slot_bytes
from twostroke.config.load import Kernels
from twostroke.kernels import native

FORMATS = [kv_format for kv_format in KV_FORMATS if kv_format not in ("f16", "fp8")]
"""That every backend reads; tests/unit/kernels/test_fp8_kv.py has the others."""
BACKENDS: list[Kernels] = ["reference", *native.levels()]  # type: ignore[list-item]
LARGEST = 65504.0


def slot(head: np.ndarray, t: int, shape: Shape, values: bool) -> naive_kv.Codes:
    """One slot of a KV head's bytes, by the order's name."""
    bits, order = (8 if shape.stored_as == "int8" else 4), shape.operator().kv_order(shape.stored_as)
    row = shape.head_dim * bits // 8
    if order.startswith("plain"):
        codes, params = np.split(head.reshape(shape.block_size, -1)[t], [row])
        if bits == 4:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(-1)
        return naive_kv.Codes(codes, *params.view(np.float16))
    assert order.startswith("lanes16")
    scales, zeros = head[shape.block_size * row :].view(np.float16).reshape(2, shape.block_size)
    codes = head[: shape.block_size * row]
    if values:
        codes = codes.reshape(shape.block_size, row)[t]
        if bits == 4:
            groups = [codes[d // 2 : d // 2 + min(16, shape.head_dim - d) // 2] for d in range(0, shape.head_dim, 16)]
            codes = np.concatenate([np.concatenate([group & 15, group >> 4]) for group in groups])
    else:
        lanes = min(16, shape.block_size)
        units = codes.reshape(shape.block_size // lanes, shape.head_dim // 2, lanes, bits // 4)[
            t // lanes, :, t % lanes
        ]
        codes = units.reshape(-1) if bits == 8 else np.stack([units[:, 0] & 15, units[:, 0] >> 4], -1).reshape(-1)
    return naive_kv.Codes(codes, scales[t], zeros[t])


def assert_stored(shape: Shape, qkv: Tensor) -> None:
    """Check every slot that a request's only step wrote against the definition."""
    pool = Pool(shape, [qkv])
    pool.step([(0, len(qkv))])
    for position in range(len(qkv)):
        block, t = pool.table[0, position // shape.block_size], position % shape.block_size
        for values, first in ((False, shape.num_heads), (True, shape.num_heads + shape.num_kv_heads)):
            for head in range(shape.num_kv_heads):
                found = slot(pool.storage[block, LAYER, int(values), head].numpy(), t, shape, values)
                expected = naive_kv.quantize(qkv[position, first + head].float().numpy(), shape.stored_as)
                where = f"position {position}, head {head}, {'V' if values else 'K'}"
                assert found.scale.tobytes() == expected.scale.tobytes(), where
                assert found.zero.tobytes() == expected.zero.tobytes() or np.isnan([found.zero, expected.zero]).all()
                assert (found.codes == expected.codes).all(), where


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 8), (4, 24), (16, 64), (32, 80), (2, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_those_of_the_definition(
    kv_format: KVFormat, block_size: int, head_dim: int, dtype: torch.dtype, backend: Kernels
) -> None:
    shape = Shape(head_dim=head_dim, block_size=block_size, kv_format=kv_format, dtype=dtype, backend=backend)
    assert_stored(shape, shape.qkv(37, seed=block_size))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 8), (4, 24), (16, 64), (32, 80), (2, 6)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_are_read_back_from_any_order(
    kv_format: KVFormat, block_size: int, head_dim: int, backend: Kernels
) -> None:
    shape = Shape(head_dim=head_dim, block_size=block_size, kv_format=kv_format, backend=backend)
    qkv = shape.qkv(3 * block_size, seed=block_size)
    pool = Pool(shape, [qkv])
    pool.step([(0, len(qkv))])
    sides = qkv[:, shape.num_heads :].split(shape.num_kv_heads, dim=1)  # K, V: [num_tokens, num_kv_heads, head_dim]
    for values, side in enumerate(sides):
        expected = naive_kv.stored(side, kv_format, torch.float32).unflatten(0, (3, block_size)).transpose(1, 2)
        heads = pool.storage[pool.table[0, :3], LAYER, values]  # [3, num_kv_heads, bytes per head]
        found = shape.operator().read_heads(heads.flatten(0, 1), kv_format, head_dim, values=bool(values))
        assert torch.equal(found.view(expected.shape), expected), "V" if values else "K"


def awkward(head_dim: int) -> list[Tensor]:
    """Vectors that break careless quantizers."""
    ramp = torch.linspace(-1, 1, head_dim)
    outlier = ramp.clone()
    outlier[3] = 4e4
    return [
        torch.zeros(head_dim),
        -torch.zeros(head_dim),
        torch.full((head_dim,), 3.14159),
        torch.full((head_dim,), -7e-8),
        torch.full((head_dim,), LARGEST),
        ramp * 1e-30,
        ramp * 1e-6,
        ramp * LARGEST,
        ramp + 1000.0,
        ramp * 1e6,  # beyond float16: cut off
        ramp * 3e38,
        outlier,
        ramp.abs(),
        -ramp.abs(),
    ]


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_of_awkward_vectors(kv_format: KVFormat, dtype: torch.dtype, backend: Kernels) -> None:
    shape = Shape(num_heads=1, num_kv_heads=1, kv_format=kv_format, dtype=dtype, backend=backend)
    vectors = torch.stack(awkward(shape.head_dim))
    assert_stored(shape, torch.stack([vectors, vectors, vectors.flip(0)], dim=1).to(dtype))


@settings(max_examples=examples(60), deadline=None)
@given(
    kv_format=st.sampled_from(["int8", "int4"]),
    backend=st.sampled_from(BACKENDS),
    vectors=st.lists(
        st.lists(st.floats(-1e5, 1e5, width=32, allow_subnormal=False), min_size=10, max_size=10),
        min_size=1,
        max_size=3,
    ),
)
def test_codes_of_any_vector(kv_format: KVFormat, backend: Kernels, vectors: list[list[float]]) -> None:
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=10, kv_format=kv_format, backend=backend)
    assert_stored(shape, torch.tensor(vectors, dtype=torch.float32)[:, None, :].expand(-1, 3, -1).contiguous())


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_a_quantized_number_is_within_half_a_step(kv_format: KVFormat) -> None:
    """The result is compared with the definition itself."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 200)[:, None]
    found = naive_kv.stored(x, kv_format, torch.float32)
    if kv_format == "int4":  # of what is stored
        x, found = (torch.from_numpy(np.stack([naive_kv.transformed(row) for row in y.numpy()])) for y in (x, found))
    span = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    num_steps = {"int8": 255, "int4": 16}[kv_format]
    # half a step, and what the rounding of zero and scale to float16 adds
    limit = span * (0.5 / num_steps + 2**-11) + x.abs().amax(-1, keepdim=True) * 2**-11
    assert ((found - x).abs() <= limit).all()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edge_shapes_against_the_oracle(
    head_dim: int, kv_format: KVFormat, dtype: torch.dtype, backend: Kernels
) -> None:
    """One row, ragged lengths, lengths at and around block borders; one KV head."""
    shape = Shape(3, 1, head_dim, 16, None, dtype, backend, kv_format)
    requests = [shape.qkv(n, seed=n) for n in (1, 15, 16, 17, 65)]
    pool = Pool(shape, requests)
    pool.step([(row, max(1, len(qkv) - 2)) for row, qkv in enumerate(requests)])
    while unfinished := [row for row, qkv in enumerate(requests) if pool.done[row] < len(qkv)]:
        pool.step([(row, 1) for row in unfinished])
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if shape.multiplies_in is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for qkv, found in zip(requests, pool.results(), strict=True):
        assert torch.equal(found, alone(shape, qkv))
        torch.testing.assert_close(found.double(), shape.dense(qkv), **tolerance)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_values_of_extreme_sizes(kv_format: KVFormat, backend: Kernels) -> None:
    """Constant, tiny and huge vectors side by side: nothing becomes NaN, and nothing is far off."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=32, kv_format=kv_format, backend=backend)
    qkv = shape.qkv(64, seed=3) * torch.logspace(-6, 3, 64)[:, None, None]
    qkv[5::7] = 0.0
    qkv[6::7] = qkv[6::7, :, :1]
    expected = shape.dense(qkv)
    error = (alone(shape, qkv).double() - expected).abs()
    # products in bfloat16 have an error relative to the head's largest number, which int4 spreads over the head
    is_wide = shape.multiplies_in is torch.float32
    limit = 1e-3 * expected.abs() if is_wide else 2**-7 * expected.abs().amax(-1, keepdim=True)
    assert (error <= limit + 1e-4 * qkv.abs().amax()).all()


def test_a_block_is_as_large_as_the_formula_says_and_holds_more_when_quantized() -> None:
    bytes_of = {kv_format: slot_bytes(kv_format, 128) for kv_format in KV_FORMATS}
    assert round(bytes_of["bf16"] / bytes_of["int8"], 2) == 1.94
    assert round(bytes_of["bf16"] / bytes_of["int4"], 2) == 3.76


def test_orders_have_names_of_their_own(backend: Kernels) -> None:
    names = {Shape(backend=backend).operator().kv_order(kv_format) for kv_format in FORMATS}
    assert len(names) == len(FORMATS)
    if backend != "reference":
        assert not names & {Shape().operator().kv_order(kv_format) for kv_format in FORMATS}


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_quantized_attention_is_near_the_exact_one(kv_format: KVFormat, backend: Kernels) -> None:
    assert is_quantized(kv_format)
    shape = Shape(head_dim=64, backend=backend)
    qkv = shape.qkv(150, seed=4)
    exact, found = alone(shape, qkv), alone(replace(shape, kv_format=kv_format), qkv)
    error = (found - exact).norm() / exact.norm()
    assert 0 < error < (0.05 if kv_format == "int8" else 0.6)
