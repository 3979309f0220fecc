"""Paged attention against the dense oracle, and bit for bit against itself under everything that must not matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.naive_attention import naive_attention
from twostroke.config.load import Kernels
from twostroke.kernels import native
from twostroke.kernels.dispatch import AttentionOperator, operators_for
from twostroke.kernels.reference import attention_plan
from twostroke.layers.attention_metadata import AttentionLayout, AttentionMetadata

CPU = torch.device("cpu")
BACKENDS: list[Kernels] = ["reference", *native.levels()]  # type: ignore[list-item]
LAYER = 1  # of two in a block, so that a wrong offset shows


@dataclass(frozen=True)
class Shape:
    """Heads and storage of a case."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    backend: Kernels = "reference"

    def operator(self) -> AttentionOperator:
        operators = operators_for(CPU, self.dtype, self.backend)
        return operators.attention(self.num_heads, self.num_kv_heads, self.head_dim, self.dtype, CPU)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def qkv(self, num_tokens: int, seed: int) -> Tensor:
        """[num_tokens, num_heads + 2 * num_kv_heads, head_dim]"""
        generator = torch.Generator().manual_seed(seed)
        heads = self.num_heads + 2 * self.num_kv_heads
        spread = 2 if self.dtype is torch.float32 else 1  # bfloat16 scores carry 8 bits
        return (torch.randn(num_tokens, heads, self.head_dim, generator=generator) * spread).to(self.dtype)

    def dense(self, qkv: Tensor) -> Tensor:
        """The oracle's answer for a whole request. [num_tokens, num_heads * head_dim]"""
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return naive_attention(q, k, v, 0, self.window, self.scale).flatten(1)


class Pool:
    """A storage full of NaN, and requests with scrambled blocks in it."""

    def __init__(self, shape: Shape, requests: Sequence[Tensor], seed: int = 0) -> None:
        self.shape, self.requests, self.operator = shape, requests, shape.operator()
        needed = [-(-len(qkv) // shape.block_size) for qkv in requests]
        num_blocks = sum(needed) + 3
        order = np.random.default_rng(seed).permutation(num_blocks)
        self.table = np.full((len(requests), max(needed) + 2), -1, np.int32)
        for row, count in enumerate(needed):
            self.table[row, :count], order = order[:count], order[count:]
        size = (num_blocks, 2, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.storage = torch.full(size, float("nan"), dtype=shape.dtype)
        self.done = [0] * len(requests)
        self.outputs: list[list[Tensor]] = [[] for _ in requests]

    def step(self, work: Sequence[tuple[int, int]]) -> None:
        """Runs the next n tokens of some requests."""
        shape = self.shape
        rows = [row for row, _ in work]
        table = self.table[rows].copy()
        if shape.window is not None:
            for i, row in enumerate(rows):  # what no query sees any more is not ours to read
                table[i, : max(0, self.done[row] - shape.window + 1) // shape.block_size] = -1
        lens = np.array([self.done[row] + n for row, n in work], np.int32)
        starts = np.concatenate([[0], np.cumsum([n for _, n in work])]).astype(np.int32)
        metadata = AttentionMetadata.build(
            query_start_loc=starts,
            seq_lens=lens,
            block_tables=[table],
            layout=AttentionLayout.of(
                [((0, 1), shape.window)],
                block_size=shape.block_size,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
            ),
            operator=self.operator,
        )
        qkv = torch.cat([self.requests[row][self.done[row] : self.done[row] + n] for row, n in work])
        out = self.operator(qkv, self.storage, metadata.plans[0], LAYER, shape.scale)
        for (row, n), part in zip(work, out.split([n for _, n in work]), strict=True):
            self.outputs[row].append(part)
            self.done[row] += n

    def results(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in self.outputs]


def alone(shape: Shape, qkv: Tensor) -> Tensor:
    """One request by itself, in one pass."""
    pool = Pool(shape, [qkv])
    pool.step([(0, len(qkv))])
    return pool.results()[0]


SHAPES = {
    "gqa": Shape(),
    "mha": Shape(num_heads=2, num_kv_heads=2, block_size=1),
    "mqa": Shape(num_heads=7, num_kv_heads=1, head_dim=24, block_size=128),
    "window": Shape(window=37, block_size=8),
    "window of one": Shape(window=1),
    "wide window, bf16": Shape(window=200, dtype=torch.bfloat16),
    "bf16": Shape(dtype=torch.bfloat16, head_dim=64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_dense_oracle_and_decodes_like_it_prefills(threads: int, name: str, backend: Kernels) -> None:
    shape = replace(SHAPES[name], backend=backend)
    requests = [shape.qkv(n, seed=n) for n in (1, 2, 130, 300)]
    expected = [shape.dense(qkv) for qkv in requests]
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if shape.dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_block_size_does_not_change_a_bit(block_size: int, backend: Kernels) -> None:
    reference = Shape(window=100, backend=backend)
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


def test_a_request_full_of_nan_stays_alone_with_it(backend: Kernels) -> None:
    shape = Shape(backend=backend)
    good, bad = shape.qkv(150, seed=1), torch.full_like(shape.qkv(90, seed=2), float("nan"))
    pool = Pool(shape, [good, bad])
    pool.step([(0, 77), (1, 60)])
    pool.step([(0, 73), (1, 30)])
    found, diverged = pool.results()
    assert torch.equal(found, alone(shape, good))
    assert diverged.isnan().all()


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
    last = naive_attention(q[-1:], k, v, 8_999, None, shape.scale).flatten(1)
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
