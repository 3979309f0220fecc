"""Queries of draft trees: they see the prefix, their ancestors and themselves, and ordinary sequences do not notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_pool import Pool, Shape
from oracle import naive_kv
from oracle.naive_attention import attention_over
from tiers import examples
from twostroke.config.load import Kernels
from twostroke.kernels import native

BACKENDS: list[Kernels] = ["reference", *native.levels()]  # type: ignore[list-item]
BoolArray = npt.NDArray[np.bool_]


def mask_of(parents: list[int]) -> BoolArray:
    """From each token's parent; -1 is the prefix."""
    mask = np.eye(len(parents), dtype=bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def random_tree(num_tokens: int, seed: int) -> BoolArray:
    rng = np.random.default_rng(seed)
    return mask_of([int(rng.integers(-1, token)) if token else -1 for token in range(num_tokens)])


def expected(shape: Shape, qkv: Tensor, prefix_len: int, mask: BoolArray) -> Tensor:
    """The oracle's answer for the tree's tokens."""
    depth = torch.from_numpy(mask.sum(1) - 1)
    key_position = torch.cat([torch.arange(prefix_len), prefix_len + depth])
    visible = torch.cat([torch.ones(len(mask), prefix_len, dtype=torch.bool), torch.from_numpy(mask)], dim=1)
    if shape.window is not None:
        visible &= key_position > (prefix_len + depth)[:, None] - shape.window
    q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    k, v = (naive_kv.stored(x, shape.stored_as, shape.dtype) for x in (k, v))
    return attention_over(q[prefix_len:], k, v, visible, shape.scoring.scale).flatten(1)


def run(shape: Shape, qkv: Tensor, prefix_len: int, mask: BoolArray | None, chunk: int = 1000) -> Tensor:
    """Return attention's results for the last tokens, as a tree or one after the other in one step."""
    pool = Pool(shape, [qkv])
    while pool.done[0] < prefix_len:
        pool.step([(0, min(chunk, prefix_len - pool.done[0]))])
    pool.step([(0, len(qkv) - prefix_len)], None if mask is None else [mask])
    return pool.results()[0][prefix_len:]


SHAPES = {
    "gqa": Shape(),
    "window": Shape(window=5, block_size=4),
    "wide window": Shape(window=60, block_size=8),
    "bf16, int8": Shape(dtype=torch.bfloat16, kv_format="int8", head_dim=24),
}


@settings(max_examples=examples(40), deadline=None)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    backend=st.sampled_from(BACKENDS),
    prefix_len=st.one_of(st.integers(0, 20), st.integers(50, 70), st.sampled_from([127, 128, 500, 511, 512, 600])),
    num_tokens=st.one_of(st.integers(1, 12), st.sampled_from([63, 64, 65, 130])),
    seed=st.integers(0, 99),
)
def test_equals_the_oracle(name: str, backend: Kernels, prefix_len: int, num_tokens: int, seed: int) -> None:
    shape, mask = replace(SHAPES[name], backend=backend), random_tree(num_tokens, seed)
    qkv = shape.qkv(prefix_len + num_tokens, seed=seed)
    found = run(shape, qkv, prefix_len, mask)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if shape.multiplies_in is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.double(), expected(shape, qkv, prefix_len, mask), **tolerance)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("prefix_len", [0, 37, 500])
def test_a_tree_without_branches_is_an_ordinary_step(name: str, prefix_len: int, backend: Kernels) -> None:
    shape = replace(SHAPES[name], backend=backend)
    qkv = shape.qkv(prefix_len + 70, seed=1)
    mask = mask_of(list(range(-1, 69)))
    assert torch.equal(run(shape, qkv, prefix_len, mask), run(shape, qkv, prefix_len, None))


@pytest.mark.parametrize("name", SHAPES)
def test_a_path_in_the_same_slots_has_the_same_bits(name: str, backend: Kernels) -> None:
    """The first branch lies where its tokens would lie alone; what else is in the tree changes no bit of it."""
    shape, prefix_len = replace(SHAPES[name], backend=backend), 61
    qkv = shape.qkv(prefix_len + 9, seed=2)
    mask = mask_of([-1, 0, 1, 2, 0, 4, 1, -1, 7])
    found = run(shape, qkv, prefix_len, mask)
    path = run(shape, qkv[: prefix_len + 4], prefix_len, None)
    assert torch.equal(found[:4], path)
    # the other branches: the same numbers, summed at other places
    for branch in ([0, 4, 5], [0, 1, 6], [7, 8]):
        rows = torch.tensor([*range(prefix_len), *(prefix_len + token for token in branch)])
        alone = run(shape, qkv[rows], prefix_len, None)
        tolerance = 5e-2 if shape.multiplies_in is torch.bfloat16 else 1e-4
        torch.testing.assert_close(found[branch], alone, rtol=tolerance, atol=tolerance)


def test_neither_the_batch_nor_the_chunks_of_the_prefix_change_a_bit(threads: int, backend: Kernels) -> None:
    shape = Shape(window=100, backend=backend)
    requests = [shape.qkv(n, seed=n) for n in (90, 140, 33, 560)]
    trees = [None, random_tree(12, 5), random_tree(33, 6), random_tree(7, 7)]
    lens = [10, 12, 33, 7]
    pool = Pool(shape, requests)
    pool.step([(row, len(requests[row]) - n) for row, n in enumerate(lens) if len(requests[row]) > n])
    pool.step(list(enumerate(lens)), trees)
    for qkv, tree, num_own, found in zip(requests, trees, lens, pool.results(), strict=True):
        alone = run(shape, qkv, len(qkv) - num_own, tree, chunk=17)
        assert torch.equal(found[len(qkv) - num_own :], alone)


def test_what_is_no_tree_is_refused(backend: Kernels) -> None:
    shape = Shape(backend=backend)
    qkv = shape.qkv(12, seed=0)
    for wrong in (np.ones((3, 3), bool), np.zeros((3, 3), bool), np.eye(2, dtype=bool).repeat(2, axis=1)):
        with pytest.raises(AssertionError):
            run(shape, qkv, 12 - len(wrong), wrong)
