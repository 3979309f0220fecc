"""Attention by itself: requests with scrambled blocks in a pool, computed a step at a time by any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import triton_device
from oracle import naive_kv
from oracle.naive_attention import naive_attention
from twostroke.config.kv_format import KVFormat, resolve_kv_format, slot_bytes
from twostroke.config.layer_spec import KVSpec
from twostroke.config.load import Kernels
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.interface import AttentionOperator, AttentionOperators, QKNormRope, Scoring
from twostroke.kernels.tree_mask import TreeMasks
from twostroke.layers.attention import AttentionLayout, AttentionMetadata

CPU = torch.device("cpu")
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
    kv_format: KVFormat | None = None  # the one of the dtype by default
    attention_softcap: float | None = None
    has_sinks: bool = False
    has_slopes: bool = False

    @property
    def device(self) -> torch.device:
        """Return the operator's device: a card for Triton's if there is one."""
        return triton_device.device() if self.backend == "triton" else CPU

    @property
    def scoring(self) -> Scoring:
        sinks = torch.linspace(-1, 6, self.num_heads).to(self.device) if self.has_sinks else None
        slopes = 2.0 ** -torch.arange(1.0, self.num_heads + 1).to(self.device) if self.has_slopes else None
        return Scoring(self.head_dim**-0.5, self.attention_softcap, sinks, slopes)

    @property
    def kv(self) -> KVSpec:
        return KVSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, window=self.window)

    @property
    def stored_as(self) -> KVFormat:
        return self.kv_format or resolve_kv_format("auto", str(self.dtype).removeprefix("torch."))

    @property
    def multiplies_in(self) -> torch.dtype:
        """Return the type of the operator's products; native kernels use float32 only if K and V are stored in it."""
        is_native = self.backend not in ("reference", "triton")
        return torch.bfloat16 if is_native and self.stored_as != "f32" else self.dtype

    def operator(self) -> AttentionOperator:
        operators = operators_for(self.device, self.dtype, self.backend)
        return operators.attention(self.num_heads, self.num_kv_heads, self.head_dim, self.dtype, self.device)

    def qkv(self, num_tokens: int, seed: int) -> Tensor:
        """[num_tokens, num_heads + 2 * num_kv_heads, head_dim]"""
        generator = torch.Generator().manual_seed(seed)
        heads = self.num_heads + 2 * self.num_kv_heads
        spread = 2 if self.multiplies_in is torch.float32 else 1  # bfloat16 scores carry 8 bits
        return (torch.randn(num_tokens, heads, self.head_dim, generator=generator) * spread).to(self.dtype)

    def dense(self, qkv: Tensor) -> Tensor:
        """Return the oracle's result for a whole request, from K and V as stored. [num_tokens, num_heads * head_dim]"""
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        s = self.scoring
        sinks, slopes = (None if of_heads is None else of_heads.cpu() for of_heads in (s.sinks, s.slopes))
        k, v = (naive_kv.stored(x, self.stored_as, self.dtype) for x in (k, v))
        return naive_attention(q, k, v, 0, self.window, s.scale, s.cap, sinks, slopes).flatten(1)


class Pool:
    """A storage full of NaN, whatever the format, and requests with scrambled blocks in it.

    Requests and results are on the CPU; the storage is where the operator runs.
    """

    def __init__(self, shape: Shape, requests: Sequence[Tensor], seed: int = 0) -> None:
        self.shape, self.requests, self.operator = shape, requests, shape.operator()
        needed = [-(-len(qkv) // shape.block_size) for qkv in requests]
        num_blocks = sum(needed) + 3
        order = np.random.default_rng(seed).permutation(num_blocks)
        self.table = np.full((len(requests), max(needed) + 2), -1, np.int32)
        for row, count in enumerate(needed):
            self.table[row, :count], order = order[:count], order[count:]
        head_bytes = shape.block_size * slot_bytes(shape.stored_as, shape.head_dim)
        self.storage = torch.full(
            (num_blocks, 2, 2, shape.num_kv_heads, head_bytes), 0xFF, dtype=torch.uint8, device=shape.device
        )
        self.done = [0] * len(requests)
        self.outputs: list[list[Tensor]] = [[] for _ in requests]

    def step(
        self,
        work: Sequence[tuple[int, int]],
        tree_masks: TreeMasks | None = None,
        qk_norm_rope: QKNormRope | None = None,
    ) -> None:
        """Run the next n tokens of some requests."""
        shape = self.shape
        rows = [row for row, _ in work]
        table = self.table[rows].copy()
        if shape.window is not None:
            for i, row in enumerate(rows):  # blocks that no query sees any more must not be read
                table[i, : max(0, self.done[row] - shape.window + 1) // shape.block_size] = -1
        lens = np.array([self.done[row] + n for row, n in work], np.int32)
        starts = np.concatenate([[0], np.cumsum([n for _, n in work])]).astype(np.int32)
        metadata = AttentionMetadata.build(
            query_start_loc=starts,
            seq_lens=lens,
            block_tables=[table],
            layout=AttentionLayout.of(
                [((0, 1), shape.kv, 2 * shape.block_size * shape.kv.bytes_per_token(shape.stored_as))],
                num_heads=shape.num_heads,
                block_size=shape.block_size,
                kv_format=shape.stored_as,
            ),
            operators=AttentionOperators({(shape.num_kv_heads, shape.head_dim): self.operator}),
            tree_masks=tree_masks,
        )
        qkv = torch.cat([self.requests[row][self.done[row] : self.done[row] + n] for row, n in work])
        out = self.operator(
            qkv.to(shape.device), self.storage, metadata.plans[0], LAYER, shape.scoring, _on(shape.device, qk_norm_rope)
        )
        for (row, n), part in zip(work, out.cpu().split([n for _, n in work]), strict=True):
            self.outputs[row].append(part)
            self.done[row] += n

    def results(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in self.outputs]


def _on(device: torch.device, qk_norm_rope: QKNormRope | None) -> QKNormRope | None:
    if qk_norm_rope is None:
        return None
    weight = None if qk_norm_rope.norm_weight is None else qk_norm_rope.norm_weight.to(device)
    mean = None if qk_norm_rope.key_mean is None else qk_norm_rope.key_mean.to(device)
    return QKNormRope(qk_norm_rope.cos.to(device), qk_norm_rope.signed_sin.to(device), weight, qk_norm_rope.eps, mean)


def alone(shape: Shape, qkv: Tensor) -> Tensor:
    """Return the result of one request in a pass of its own."""
    pool = Pool(shape, [qkv])
    pool.step([(0, len(qkv))])
    return pool.results()[0]
