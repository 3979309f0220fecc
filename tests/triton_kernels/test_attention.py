"""Paged attention against the dense oracle, and bit for bit against itself under everything that must not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_pool import Pool, Shape, alone
from oracle.naive_attention import naive_attention
from twostroke.config.kv_format import is_quantized
from twostroke.config.layer_spec import KVSpec
from twostroke.kernels.cuda import attention as cuda_attention
from twostroke.kernels.cuda.attention import TritonAttention
from twostroke.kernels.cuda.attention_plan import TileSizes
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.interface import QKNormRope
from twostroke.kernels.reference.kv_codec import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, where NaN are
SHAPES = {
    "gqa": Shape(),
    "mha": Shape(num_heads=2, num_kv_heads=2, block_size=1),
    "mqa of seven, odd heads": Shape(num_heads=7, num_kv_heads=1, head_dim=24, block_size=128),
    "heads of 64": Shape(head_dim=64, num_heads=4, num_kv_heads=1),
    "heads of 128": Shape(head_dim=128, num_heads=4, num_kv_heads=1, dtype=torch.bfloat16),
    "window": Shape(window=37, block_size=8),
    "window of one": Shape(window=1),
    "wide window, bf16": Shape(window=66, dtype=torch.bfloat16),
    "f16": Shape(dtype=torch.float16),
    "capped": Shape(attention_softcap=1.5, block_size=8, window=37),
    "sinks": Shape(has_sinks=True, block_size=8, window=37),
    "slopes": Shape(has_slopes=True),
    "sinks and slopes, bf16": Shape(has_sinks=True, has_slopes=True, dtype=torch.bfloat16, head_dim=64),
    "capped, bf16": Shape(attention_softcap=1.5, dtype=torch.bfloat16, head_dim=64),
    "int8": Shape(kv_format="int8"),
    "int4, small blocks": Shape(kv_format="int4", head_dim=24, block_size=4),
    "int4, bf16, window": Shape(kv_format="int4", dtype=torch.bfloat16, head_dim=80, block_size=32, window=37),
    "int8, bf16, blocks of one": Shape(kv_format="int8", dtype=torch.bfloat16, block_size=1, window=100),
    "fp8": Shape(kv_format="fp8"),
    "fp8, bf16, window": Shape(kv_format="fp8", dtype=torch.bfloat16, head_dim=24, block_size=8, window=37),
    "bf16 in f32": Shape(kv_format="bf16", block_size=8, window=21),
    "f32 in bf16": Shape(kv_format="f32", dtype=torch.bfloat16, head_dim=24),
}
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 5e-2, "atol": 3e-2},
}


@pytest.fixture(autouse=True)
def small_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a cut with short segments, since long ones take too long in the interpreter. Tiles are as high as on a
    card."""
    monkeypatch.setattr(cuda_attention, "TILE_SIZES", TileSizes(chunk=32, segment=64))


def cut_for(num_processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a cut: with one processor contexts are folded in one piece, with a thousand at every segment."""
    monkeypatch.setattr(cuda_attention, "num_multiprocessors", lambda device: num_processors)


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_dense_oracle_and_decodes_like_it_prefills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPES[name], backend="triton")
    cut_for(1, monkeypatch)
    requests = [shape.qkv(n, seed=n) for n in (5, 70)]
    whole = [alone(shape, qkv) for qkv in requests]
    for qkv, found in zip(requests, whole, strict=True):
        torch.testing.assert_close(found.double(), shape.dense(qkv), **TOLERANCE[shape.dtype])
    cut_for(1000, monkeypatch)
    pool = Pool(shape, requests)
    pool.step([(1, 63), (0, 1)])  # up to one before a segment's end
    pool.step([(1, 1), (0, 3)])
    pool.step([(0, 1), (1, 6)])
    for expected, found in zip(whole, pool.results(), strict=True):
        assert torch.equal(found, expected)


def test_where_a_context_is_cut_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(backend="triton", window=110, num_heads=2, num_kv_heads=1)
    qkv = shape.qkv(140, seed=1)
    found: list[torch.Tensor] = []
    for count in (1, 1000):
        cut_for(count, monkeypatch)
        pool = Pool(shape, [qkv, qkv[:3]])
        pool.step([(0, 138), (1, 2)])
        pool.step([(1, 1), (0, 2)])
        found.append(torch.cat(pool.results()))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("kv_format", ["f32", "fp8", "int4"])
def test_block_size_does_not_change_a_bit(kv_format: str) -> None:
    shape = Shape(backend="triton", kv_format=kv_format, window=50)
    qkv = shape.qkv(70, seed=5)
    expected = alone(shape, qkv)
    for block_size in (1, 128):
        assert torch.equal(alone(replace(shape, block_size=block_size), qkv), expected)


def test_an_empty_batch() -> None:
    shape = Shape(backend="triton")
    pool = Pool(shape, [shape.qkv(3, seed=1)])
    plan = pool.operator.plan(
        cuda_attention.GroupShape(4, KVSpec(num_kv_heads=2, head_dim=16), 16, 8192, "f32"),
        np.zeros(1, np.int32),
        np.zeros(0, np.int32),
        np.zeros((0, 2), np.int32),
    )
    nothing = torch.zeros(0, 8, 16, device=shape.device)
    assert pool.operator(nothing, pool.storage, plan, 0, cuda_attention.Scoring(1.0)).shape == (0, 64)


@pytest.mark.parametrize("kv_format", ["f32", "f16", "bf16", "fp8", "int8", "int4"])
def test_stored_bytes_are_the_references_in_their_own_order(kv_format: str) -> None:
    """Codes, scales and zeros bit for bit, of vectors of every kind; what stays unused of a block is zero."""
    shape = Shape(backend="triton", kv_format=kv_format, block_size=8)
    qkv = shape.qkv(9, seed=3)
    qkv[1] = 0.5  # constant
    qkv[2] = -0.0
    qkv[3] *= 1e6  # beyond float16 where scales are
    qkv[4] *= 1e-7
    if kv_format == "f16":
        qkv[3] = 1.0
    pool = Pool(shape, [qkv])
    pool.step([(0, 9)])
    first, second = (pool.storage[block] for block in pool.table[0, :2])
    for which, name in enumerate(("k", "v")):
        for head in range(2):
            stored = torch.stack([first[1, which, head], second[1, which, head]])
            found = pool.operator.read_heads(stored, kv_format, 16, values=name == "v").flatten(0, 1).cpu()
            written = encode(qkv[:, 4 + 2 * which + head], kv_format)
            assert torch.equal(found[:9], decode(written, kv_format, torch.float32))
            assert not found[9:].any()


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "f32"])
@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_seen_by_who_sees_them(kv_format: str, poison: float) -> None:
    shape = Shape(backend="triton", kv_format=kv_format)
    requests = [shape.qkv(20, seed=1), shape.qkv(20, seed=2)]
    expected = alone(shape, requests[1])
    requests[0][13, 4:] = poison  # all heads of K and V
    pool = Pool(shape, requests)
    pool.step([(0, 10), (1, 20)])
    pool.step([(0, 10)])
    found = pool.results()
    assert torch.equal(found[1], expected)
    assert torch.isfinite(found[0][:10]).all()
    assert torch.isnan(found[0][13:]).all()


def test_drafts_in_a_tree_see_their_ancestors() -> None:
    """40 drafts: more than one word of bits. Both branches of a comb, each alone, where they have the same slots."""
    shape = Shape(backend="triton", window=80)
    prefix, num_drafts = 70, 40
    qkv = shape.qkv(prefix + num_drafts, seed=7)
    mask = np.eye(num_drafts, dtype=bool)
    parents = [0, 0, *[i - 2 for i in range(3, num_drafts)]]
    for token, parent in enumerate(parents, start=1):
        mask[token] |= mask[parent]
    pool = Pool(shape, [qkv, qkv[:5]])
    pool.step([(0, prefix), (1, 5)])
    pool.step([(0, num_drafts)], tree_masks=[mask])
    found = pool.results()[0][prefix:]
    for token in (0, 1, 7, 33, 39):
        path = [*range(prefix), *(prefix + np.flatnonzero(mask[token]))]
        q, k, v = qkv[path].split([4, 2, 2], dim=1)
        dense = naive_attention(q[-1:], k, v, len(path) - 1, shape.window, shape.scoring.scale).flatten(1)
        torch.testing.assert_close(found[token].double(), dense[0], rtol=1e-4, atol=1e-5)


def test_a_chain_as_a_tree_is_the_chain_to_the_bit() -> None:
    shape = Shape(backend="triton", window=25)
    qkv = shape.qkv(40, seed=7)
    expected = alone(shape, qkv)
    pool = Pool(shape, [qkv])
    pool.step([(0, 30)])
    pool.step([(0, 10)], tree_masks=[np.tri(10, dtype=bool)])
    assert torch.equal(pool.results()[0], expected)


def test_heads_that_are_too_large_go_to_torch() -> None:
    shape = Shape(backend="triton", head_dim=320)
    assert not isinstance(shape.operator(), TritonAttention)
    assert isinstance(Shape(backend="triton").operator(), TritonAttention)


def test_fp8_codes_are_the_references() -> None:
    """Numbers at and beside every code, every middle and every power of two are tested."""
    values = decode(torch.arange(0x7F, dtype=torch.uint8)[:, None], "fp8", torch.float32)[:, 0]
    edges = torch.cat([values, (values[1:] + values[:-1]) / 2, 2.0 ** torch.arange(-149.0, 128.0)])
    up, down = (torch.nextafter(edges, torch.tensor(to)) for to in (torch.inf, -1.0))
    numbers = torch.cat([edges, up, down, torch.tensor([448.1, 464.0, 480.0, 3e38, torch.inf, torch.nan])])
    numbers = torch.cat([numbers, -numbers])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 16)).view(-1, 1, 16)
    shape = Shape(backend="triton", kv_format="fp8", num_heads=1, num_kv_heads=1)
    pool = Pool(shape, [numbers.expand(-1, 3, 16).contiguous()])
    pool.step([(0, len(numbers))])
    blocks = torch.from_numpy(pool.table[0, : -(-len(numbers) // 16)]).long()
    written = pool.storage.cpu()[blocks, 1, 0, 0].reshape(-1, 16)[: len(numbers)]
    expected = encode(numbers[:, 0], "fp8")
    is_nan = expected & 0x7F == 0x7F
    assert torch.equal(is_nan, written & 0x7F == 0x7F)
    assert torch.equal(written[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("has_norm", [False, True], ids=["rotation", "norm and rotation"])
@pytest.mark.parametrize(
    "name", ["gqa", "mqa of seven, odd heads", "heads of 128", "int8", "int4, bf16, window", "fp8"]
)
def test_heads_are_turned_on_the_way_as_by_operators_of_their_own(name: str, has_norm: bool) -> None:
    """To the bit, K and V as they are stored and what comes out; but a norm's sum may round by another order."""
    shape = replace(SHAPES[name], backend="triton")
    operators = operators_for(shape.device, shape.dtype, "triton")
    num_turned, num_tokens = shape.num_heads + shape.num_kv_heads, 9
    qkv = shape.qkv(num_tokens, seed=1)
    angles = torch.arange(num_tokens)[:, None] * 0.7 ** torch.arange(shape.head_dim // 2)
    cos, sin = (part.to(shape.dtype).unsqueeze(1) for part in (angles.cos(), angles.sin()))
    cos, signed_sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    weight = torch.linspace(0.5, 2, num_turned * shape.head_dim).view(num_turned, -1).to(shape.dtype)
    turned = qkv.to(shape.device).clone()
    if has_norm:
        operators.rms_norm_(turned[:, :num_turned], weight.to(shape.device), 1e-6)
    operators.rotate_heads_(turned[:, :num_turned], cos.to(shape.device), signed_sin.to(shape.device))
    mean = torch.randn(shape.num_kv_heads, shape.head_dim).to(shape.dtype) if is_quantized(shape.stored_as) else None
    if mean is not None:
        turned[:, shape.num_heads : num_turned] -= mean.to(shape.device)

    separate, fused = Pool(shape, [turned.cpu()]), Pool(shape, [qkv])
    separate.step([(0, num_tokens)])
    fused.step([(0, num_tokens)], qk_norm_rope=QKNormRope(cos, signed_sin, weight if has_norm else None, 1e-6, mean))
    if has_norm:
        torch.testing.assert_close(fused.results()[0], separate.results()[0], **TOLERANCE[shape.dtype])
    else:
        assert torch.equal(fused.storage, separate.storage)
        assert torch.equal(fused.results()[0], separate.results()[0])
    written = fused.storage.clone()
    fused.done, fused.requests = [0], [qkv[:, : shape.num_heads].clone()]  # a layer that reads what this one wrote
    weight_of_q = weight[: shape.num_heads].contiguous() if has_norm else None
    fused.step([(0, num_tokens)], qk_norm_rope=QKNormRope(cos, signed_sin, weight_of_q, 1e-6))
    fused.outputs[0], (again,) = fused.outputs[0][:1], fused.outputs[0][1:]
    assert torch.equal(again, fused.results()[0])
    assert torch.equal(fused.storage, written)
    one_by_one = Pool(shape, [qkv])
    for i in range(num_tokens):
        at = slice(i, i + 1)
        qk_norm_rope = QKNormRope(
            cos[at].contiguous(), signed_sin[at].contiguous(), weight if has_norm else None, 1e-6, mean
        )
        one_by_one.step([(0, 1)], qk_norm_rope=qk_norm_rope)
    assert torch.equal(torch.cat([one_by_one.results()[0]]), fused.results()[0])
    assert torch.equal(one_by_one.storage, fused.storage)
