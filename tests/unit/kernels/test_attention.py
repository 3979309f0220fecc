"""Paged attention against the dense oracle, and bit for bit against itself under everything that must not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_pool import Pool, Shape, alone
from oracle.naive_attention import naive_attention
from tiers import examples
from twostroke.config.kv_format import KVFormat, is_quantized
from twostroke.config.load import Kernels
from twostroke.kernels import native
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.interface import QKNormRope
from twostroke.kernels.reference import attention_plan

BACKENDS: list[Kernels] = ["reference", *native.levels()]  # type: ignore[list-item]

SHAPES = {
    "gqa": Shape(),
    "mha": Shape(num_heads=2, num_kv_heads=2, block_size=1),
    "mqa": Shape(num_heads=7, num_kv_heads=1, head_dim=24, block_size=128),
    "window": Shape(window=37, block_size=8),
    "window of one": Shape(window=1),
    "wide window, bf16": Shape(window=200, dtype=torch.bfloat16),
    "bf16": Shape(dtype=torch.bfloat16, head_dim=64),
    "capped": Shape(attention_softcap=1.5, block_size=8, window=37),
    "sinks": Shape(has_sinks=True, block_size=8, window=37),
    "slopes": Shape(has_slopes=True),
    "sinks and slopes, bf16": Shape(has_sinks=True, has_slopes=True, dtype=torch.bfloat16, head_dim=64),
    "capped, bf16": Shape(attention_softcap=1.5, dtype=torch.bfloat16, head_dim=64),
    "int8": Shape(kv_format="int8"),
    "int4, small blocks": Shape(kv_format="int4", head_dim=24, block_size=4),
    "int4, bf16, window": Shape(kv_format="int4", dtype=torch.bfloat16, head_dim=80, block_size=32, window=37),
    "int8, bf16, blocks of one": Shape(kv_format="int8", dtype=torch.bfloat16, block_size=1, window=100),
    "bf16 in f32": Shape(kv_format="bf16", block_size=8, window=21),
    "f32 in bf16": Shape(kv_format="f32", dtype=torch.bfloat16, head_dim=24),
}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_dense_oracle_and_decodes_like_it_prefills(threads: int, name: str, backend: Kernels) -> None:
    shape = replace(SHAPES[name], backend=backend)
    requests = [shape.qkv(n, seed=n) for n in (1, 2, 130, 300)]
    expected = [shape.dense(qkv) for qkv in requests]
    is_wide = shape.multiplies_in is torch.float32
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if is_wide else {"rtol": 5e-2, "atol": 5e-2}
    for qkv, dense in zip(requests, expected, strict=True):
        torch.testing.assert_close(alone(shape, qkv).double(), dense, **tolerance)
    pool = Pool(shape, requests)
    pool.step([(0, 1), (1, 1), (2, 120), (3, 7)])
    pool.step([(3, 200), (1, 1)])
    for _ in range(5):
        pool.step([(2, 1), (3, 1)])
    pool.step([(3, 88), (2, 5)])
    for qkv, found in zip(requests, pool.results(), strict=True):
        assert torch.equal(found, alone(shape, qkv))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_no_schedule_changes_a_bit(data: st.DataObject) -> None:
    shape = replace(SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))], backend=data.draw(st.sampled_from(BACKENDS)))
    lens = data.draw(st.lists(st.integers(1, 280), min_size=1, max_size=4))
    requests = [shape.qkv(n, seed=i) for i, n in enumerate(lens)]
    pool = Pool(shape, requests, seed=data.draw(st.integers(0, 99)))
    while any(done < n for done, n in zip(pool.done, lens, strict=True)):
        unfinished = [row for row, n in enumerate(lens) if pool.done[row] < n]
        chosen = data.draw(st.permutations(unfinished))[: data.draw(st.integers(1, len(unfinished)))]
        work = []
        for row in chosen:
            left = lens[row] - pool.done[row]
            work.append((row, data.draw(st.one_of(st.just(left), st.integers(1, left)))))
        pool.step(work)
    for qkv, found in zip(requests, pool.results(), strict=True):
        assert torch.equal(found, alone(shape, qkv))


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_block_size_does_not_change_a_bit(block_size: int, kv_format: KVFormat, backend: Kernels) -> None:
    reference = Shape(window=100, backend=backend, kv_format=kv_format)
    qkv = reference.qkv(290, seed=5)
    assert torch.equal(alone(replace(reference, block_size=block_size), qkv), alone(reference, qkv))


def test_memory_is_bounded_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape()
    requests = [shape.qkv(n, seed=n) for n in (700, 40, 333)]
    expected = [alone(shape, qkv) for qkv in requests]
    one_pair = 2 * shape.num_kv_heads * attention_plan.PARTITION * shape.head_dim
    for limit in (one_pair, 2 * one_pair, 5 * one_pair):
        monkeypatch.setattr(attention_plan, "MAX_GATHERED", limit)
        pool = Pool(shape, requests)
        pool.step([(row, len(qkv)) for row, qkv in enumerate(requests)])
        assert all(torch.equal(a, b) for a, b in zip(pool.results(), expected, strict=True))


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8", "int4"])
def test_a_request_full_of_nan_stays_alone_with_it(kv_format: KVFormat, backend: Kernels) -> None:
    shape = Shape(backend=backend, kv_format=kv_format)
    good, bad = shape.qkv(150, seed=1), torch.full_like(shape.qkv(90, seed=2), float("nan"))
    pool = Pool(shape, [good, bad])
    pool.step([(0, 77), (1, 60)])
    pool.step([(0, 73), (1, 30)])
    found, diverged = pool.results()
    assert torch.equal(found, alone(shape, good))
    assert diverged.isnan().all()


def test_heads_too_large_for_the_native_kernels_run_on_torch(backend: Kernels) -> None:
    shape = Shape(head_dim=520, num_heads=2, num_kv_heads=1, backend=backend, kv_format="int8")
    qkv = shape.qkv(40, seed=1)
    assert shape.operator().kv_order("int8") == Shape().operator().kv_order("int8")
    assert torch.equal(alone(shape, qkv), alone(replace(shape, backend="reference"), qkv))
    if backend != "reference":
        largest = replace(shape, head_dim=512)
        assert largest.operator().kv_order("int8") != Shape().operator().kv_order("int8")
        torch.testing.assert_close(
            alone(largest, largest.qkv(40, seed=1)).double(),
            largest.dense(largest.qkv(40, seed=1)),
            rtol=5e-2,
            atol=5e-2,
        )


@pytest.mark.parametrize("name", ["gqa", "window", "int8"])
def test_q_alone_reads_what_another_layer_wrote(name: str, backend: Kernels) -> None:
    shape = replace(SHAPES[name], backend=backend)
    requests = [shape.qkv(n, seed=n) for n in (1, 70)]
    pool = Pool(shape, requests)
    pool.step([(0, 1), (1, 60)])
    written = pool.storage.clone()
    pool.done = [0, 0]
    pool.requests = [qkv[:, : shape.num_heads].clone() for qkv in requests]
    pool.step([(0, 1), (1, 60)])
    assert torch.equal(pool.storage, written)
    for first, again in pool.outputs:
        assert torch.equal(first, again)


def test_later_tokens_do_not_reach_earlier_ones(backend: Kernels) -> None:
    shape = Shape(backend=backend)
    qkv = shape.qkv(200, seed=1)
    changed = qkv.clone()
    changed[120:] = shape.qkv(80, seed=9)
    assert torch.equal(alone(shape, qkv)[:120], alone(shape, changed)[:120])


def test_a_long_context_in_small_memory(backend: Kernels) -> None:
    shape = Shape(backend=backend, num_heads=2, num_kv_heads=1, head_dim=8)
    qkv = shape.qkv(9_000, seed=1)
    pool = Pool(shape, [qkv])
    while pool.done[0] < 8_999:
        pool.step([(0, min(1_500, 8_999 - pool.done[0]))])
    pool.step([(0, 1)])
    q, k, v = qkv.split([2, 1, 1], dim=1)
    last = naive_attention(q[-1:], k, v, 8_999, None, shape.scoring.scale).flatten(1)
    torch.testing.assert_close(pool.results()[0][-1:].double(), last, rtol=1e-4, atol=1e-5)


def test_every_query_sits_in_one_tile() -> None:
    rng = np.random.default_rng(0)
    for heights in ((1,), (1, 8, 64), (2, 8, 64), (4, 64)):
        query_lens = rng.integers(1, 200, 30)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        tiles = list(attention_plan._cut_into_tiles(starts, query_lens + 5, heights))
        seen = np.concatenate([np.concatenate([t.queries_of(t.first_token).reshape(-1)]) for t in tiles])
        assert set(seen.tolist()) == set(range(int(starts[-1])))
        assert sum(int(t.num_queries.sum()) for t in tiles) == starts[-1]


TURNS = {"rotation": None, "norm and rotation": "own", "wide norm and rotation": "f32"}


@pytest.mark.parametrize("norm", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("name", ["gqa", "mqa", "bf16", "capped, bf16", "sinks", "int4, bf16, window", "f32 in bf16"])
@pytest.mark.parametrize("level", native.levels())
def test_heads_are_turned_on_the_way_as_by_operators_of_their_own(
    threads: int, level: Kernels, name: str, norm: str | None
) -> None:
    """To the bit: K and V as they are stored, and what comes out; at once, in pieces, and of q alone."""
    shape = replace(SHAPES[name], backend=level)
    operators, num_tokens = operators_for(torch.device("cpu"), shape.dtype, level), 140
    qkv, num_turned = shape.qkv(num_tokens, seed=1), shape.num_heads + shape.num_kv_heads
    angles = torch.arange(num_tokens)[:, None] * 0.7 ** torch.arange(shape.head_dim // 2)
    cos, sin = (part.to(shape.dtype).unsqueeze(1) for part in (angles.cos(), angles.sin()))
    cos, signed_sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    wide = torch.linspace(0.5, 2, num_turned * shape.head_dim).view(num_turned, -1)
    weight = None if norm is None else wide if norm == "f32" else wide.to(shape.dtype)
    turned = qkv.clone()
    if weight is not None:
        operators.rms_norm_(turned[:, :num_turned], weight, 1e-6)
    operators.rotate_heads_(turned[:, :num_turned], cos, signed_sin)
    mean = torch.randn(shape.num_kv_heads, shape.head_dim).to(shape.dtype) if is_quantized(shape.stored_as) else None
    if mean is not None:
        turned[:, shape.num_heads : num_turned] -= mean

    separate, at_once, in_pieces = Pool(shape, [turned]), Pool(shape, [qkv]), Pool(shape, [qkv])
    separate.step([(0, num_tokens)])
    at_once.step([(0, num_tokens)], qk_norm_rope=QKNormRope(cos, signed_sin, weight, 1e-6, mean))
    for begin, end in ((0, 7), (7, 8), (8, 131), (131, 132), (132, num_tokens)):
        qk_norm_rope = QKNormRope(cos[begin:end], signed_sin[begin:end], weight, 1e-6, mean)
        in_pieces.step([(0, end - begin)], qk_norm_rope=qk_norm_rope)
    written = separate.storage.clone()
    for fused in (at_once, in_pieces):
        assert torch.equal(fused.storage, written)
        assert torch.equal(fused.results()[0], separate.results()[0])
    at_once.done, at_once.requests = [0], [qkv[:, : shape.num_heads]]  # a layer that reads what this one wrote
    weight_of_q = None if weight is None else weight[: shape.num_heads]
    at_once.step([(0, num_tokens)], qk_norm_rope=QKNormRope(cos, signed_sin, weight_of_q, 1e-6))
    assert torch.equal(at_once.outputs[0][1], separate.results()[0])
    assert torch.equal(at_once.storage, written)
