"""Paged attention of one layer: decodes, a prompt, a chunk of one behind its context, and all of them in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat
from twostroke.config.model import ModelConfig
from twostroke.kernels import reference
from twostroke.kernels.dispatch import GroupShape, Operators, Scoring
from twostroke.measure.operators.subject import Point, Subject, against_reference

BLOCK_SIZE = 16
CPU = torch.device("cpu")
_DTYPE = torch.bfloat16
_ATTENTION_TOLERANCE = 0.03
"""The reference rounds scores to bfloat16 before the softmax."""

KV_FORMATS: tuple[KVFormat, ...] = ("bf16", "int8", "int4")

Batch = Sequence[tuple[int, int]]
"""(queries, context with them) of each request."""

CASES: dict[str, Batch] = {
    "decode, 1 of 512": [(1, 512)],
    "decode, 1 of 4,096": [(1, 4096)],
    "decode, 8 of 512": [(1, 512)] * 8,
    "decode, 32 of 512": [(1, 512)] * 32,
    "prefill, 512": [(512, 512)],
    "prefill, 512 behind 1,536": [(512, 2048)],
    "mixed, 16 decodes of 512 and 256 behind 256": [*[(1, 512)] * 16, (256, 512)],
}
_QUICK_CASES = ("decode, 8 of 512", "prefill, 512", "mixed, 16 decodes of 512 and 256 behind 256")


def attention_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """One for each batch and each format of K and V, because each has a cache of its own."""
    for kv_format in KV_FORMATS:
        for name, batch in CASES.items():
            if name in _QUICK_CASES or not quick:
                yield _attention_subject(config, kv_format, name, batch)


def _attention_subject(config: ModelConfig, kv_format: KVFormat, name: str, batch: Batch) -> Subject:
    spec = replace(config.layers[0].kv, window=None)
    heads, kv_heads, dim = config.layers[0].num_heads, spec.num_kv_heads, spec.head_dim
    shape = GroupShape(heads, spec, BLOCK_SIZE, BLOCK_SIZE * spec.bytes_per_token(kv_format), kv_format)
    generator = torch.Generator().manual_seed(len(batch))
    queries, contexts = (np.array(column, np.int32) for column in zip(*batch, strict=True))
    blocks = -(-contexts // BLOCK_SIZE)
    ends = np.cumsum(blocks)
    table = np.full((len(batch), blocks.max()), -1, np.int32)
    for row, (end, count) in enumerate(zip(ends, blocks, strict=True)):
        table[row, :count] = np.arange(end - count, end)
    context_qkv, step_qkv = (
        torch.randn(int(lens.sum()), heads + 2 * kv_heads, dim, generator=generator).to(_DTYPE)
        for lens in (contexts, queries)
    )

    def build(operators: Operators) -> Callable[[int], Tensor]:
        attention = operators.attention(heads, kv_heads, dim, _DTYPE, CPU)
        storage = torch.zeros(int(ends[-1]), 1, 2, kv_heads, BLOCK_SIZE * shape.slot_bytes, dtype=torch.uint8)
        scoring = Scoring(dim**-0.5)
        # the cache is filled by the operator itself: the order inside a block is its own
        attention(context_qkv, storage, attention.plan(shape, _starts(contexts), contexts, table), 0, scoring)
        plan = attention.plan(shape, _starts(queries), contexts, table)
        return lambda _: attention(step_qkv, storage, plan, 0, scoring)

    kv_bytes = int(contexts.sum()) * 2 * kv_heads * shape.slot_bytes
    # of a chunk's queries, the last sees all of the context and each one before it one key less
    pairs = sum(n * context - n * (n - 1) // 2 for n, context in batch)
    num_queries = int(queries.sum())
    num_bytes = kv_bytes + num_queries * (2 * heads + 2 * kv_heads) * dim * _DTYPE.itemsize
    return Subject(
        operator="attention",
        kind=f"{kv_format} KV",
        points=(Point(name, num_bytes, 4.0 * heads * dim * pairs),),
        constant_bytes=kv_bytes,
        product="bfloat16",
        build=build,
        error=against_reference(build, reference.operators()),
        tolerance=_ATTENTION_TOLERANCE,
    )


def _starts(lens: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
