"""What it costs that rows do not know each other: the operators against torch's own, which do not promise it.

Linear layers: all products of one layer, in proven tiles (kernels/reference/row_tiles.py) beside one plain
`F.linear` each, by number of rows. Attention: paged, in partitions of 128 keys, beside one
`scaled_dot_product_attention` over K and V that lie contiguous already, which no paged engine has; so its ratio holds
the price of paging as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.config.kv_format import KVFormat
from twostroke.config.model import ModelConfig
from twostroke.kernels.dispatch import GroupShape, Scoring
from twostroke.kernels.reference.attention import PagedAttention
from twostroke.kernels.reference.linear import PackedLinear
from twostroke.measure.figure import MEASURED, bar_chart
from twostroke.measure.report import median
from twostroke.model.model_files import find_model

ROWS = (1, 3, 8, 32, 33, 64, 200, 512)
"""One decode; a few; a ladder height; just beyond one; batches; a chunk of a prompt that fits no height; a budget."""
CONTEXTS = ((1, 1, 512), (8, 1, 512), (32, 1, 512), (1, 512, 512))
"""(requests, queries of each, context of each)"""
CPU = torch.device("cpu")

Operator = Callable[[], Tensor]


def reproduce_invariance(options: ReproduceOptions) -> Reproduction:
    """Both in turn, A B A B, medians of ratios."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    config = find_model(options.model).config()
    dtype = torch.bfloat16 if config.dtype != "float32" else torch.float32
    repeats = 60 if options.full else 6
    with torch.inference_mode():
        linear = {rows: _linear(config, dtype, rows, repeats) for rows in ROWS}
        attention = {case: _attention(config, dtype, *case, repeats) for case in CONTEXTS}
    claims = [
        Claim.reported(f"linear layers, {rows} rows: time / torch's own", case["ratio"])
        for rows, case in linear.items()
    ]
    claims += [
        Claim.reported(f"attention, {_name(shape)}: time / torch's own over contiguous K, V", case["ratio"])
        for shape, case in attention.items()
    ]
    return Reproduction(
        claims=tuple(claims),
        config={"model": options.model_name, "dtype": str(dtype), "threads": torch.get_num_threads()},
        workload={"rows": ROWS, "attention (requests, queries, context)": CONTEXTS, "block_size": BLOCK_SIZE},
        details={
            "linear": {str(rows): case for rows, case in linear.items()},
            "attention": {_attention_name(shape): case for shape, case in attention.items()},
        },
        repeats=repeats,
        draw=bar_chart(
            [str(rows) for rows in linear],
            {"tiled / plain": ([case["ratio"] for case in linear.values()], MEASURED)},
            "time of a layer's products, tiled / plain",
            "rows",
            lines=(1.0,),
        ),
    )


def _linear(config: ModelConfig, dtype: torch.dtype, num_rows: int, repeats: int) -> dict[str, float]:
    """All products of one decoder layer."""
    layer, hidden = config.layers[0], config.hidden_size
    q, kv, inner = layer.q_size, layer.kv_size, layer.intermediate_size
    shapes = ((hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner), (inner, hidden))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, k, generator=generator).to(dtype) / math.sqrt(k) for k, n in shapes]
    inputs = [torch.randn(num_rows, k, generator=generator).to(dtype) for k, _ in shapes]
    packed = [PackedLinear(weight, None) for weight in weights]

    def tiled() -> Tensor:
        return [linear(x) for linear, x in zip(packed, inputs, strict=True)][-1]

    def plain() -> Tensor:
        return [F.linear(x, weight) for weight, x in zip(weights, inputs, strict=True)][-1]

    return _side_by_side(tiled, plain, repeats)


def _attention(
    config: ModelConfig, dtype: torch.dtype, num_seqs: int, num_queries: int, context: int, repeats: int
) -> dict[str, float]:
    """One layer."""
    spec = replace(config.layers[0].kv, window=None)
    heads, kv_heads, dim = config.layers[0].num_heads, spec.num_kv_heads, spec.head_dim
    generator = torch.Generator().manual_seed(0)
    blocks_each = -(-context // BLOCK_SIZE)
    storage = torch.randn(num_seqs * blocks_each, 1, 2, kv_heads, BLOCK_SIZE * dim, generator=generator).to(dtype)
    qkv = torch.randn(num_seqs * num_queries, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    attention = PagedAttention(heads, kv_heads, dim, dtype, CPU)
    kv_format: KVFormat = "f32" if dtype is torch.float32 else "bf16"
    plan = attention.plan(
        GroupShape(heads, spec, BLOCK_SIZE, BLOCK_SIZE * spec.bytes_per_token(kv_format), kv_format),
        np.arange(num_seqs + 1, dtype=np.int32) * num_queries,
        np.full(num_seqs, context, np.int32),
        np.arange(len(storage), dtype=np.int32).reshape(num_seqs, blocks_each),
    )
    q = torch.randn(num_seqs, heads, num_queries, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, num_seqs, kv_heads, context, dim, generator=generator).to(dtype)

    def paged() -> Tensor:
        return attention(qkv, storage.view(torch.uint8), plan, 0, Scoring(dim**-0.5))

    def contiguous() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, enable_gqa=True)

    return _side_by_side(paged, contiguous, repeats)


def _side_by_side(ours: Operator, plain: Operator, repeats: int) -> dict[str, float]:
    """Median milliseconds of both, and the median of their ratios."""
    ours_s: list[float] = []
    plain_s: list[float] = []
    for repeat in range(repeats + 2):
        for operator, times in ((ours, ours_s), (plain, plain_s)):
            start_s = time.perf_counter()
            operator()
            if repeat >= 2:  # the first ones warm up
                times.append(time.perf_counter() - start_s)
    ratios = [ours / plain for ours, plain in zip(ours_s, plain_s, strict=True)]
    return {"ms": 1000 * median(ours_s), "plain_ms": 1000 * median(plain_s), "ratio": median(ratios)}


def _attention_name(shape: tuple[int, int, int]) -> str:
    num_seqs, num_queries, context = shape
    return f"{num_seqs} x {num_queries} queries over {context}"
