"""Operators to measure, each with its constants (a weight, a cache), at several sizes and on any backend.

linear       the products of a model at its real shapes: qkv, output, gate and up with their activation, down, head
attention    paged attention of one layer: decodes, a prompt, a chunk of a longer prompt, and a mixed batch
row-wise     operators on single rows: norm, rotary embedding, and sampling
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat
from twostroke.config.model import ModelConfig
from twostroke.kernels import reference
from twostroke.kernels.interface import GroupShape, Operators, Scoring, Weight
from twostroke.kernels.quantized_weight import SUPER_BLOCK, QuantizedWeight, quantize_in_groups, quantize_per_channel
from twostroke.layers.elementwise import Rotary
from twostroke.model.gguf.blocks import REPACKED
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState
from twostroke.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Point:
    """One size, with its memory traffic and operations."""

    shape: str
    num_bytes: float
    """Bytes read and written at least once: weights or KV as stored, inputs, results."""
    operations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Operator with its sizes, its check and its tolerance."""

    operator: str
    kind: str = "bf16"
    """Variant: the type of the weights, or the kind of input."""
    points: tuple[Point, ...]
    constant_bytes: int = 0
    """Bytes of constants that each run reads; copies of them keep the constants out of the caches."""
    product: str = "float32"
    """Type of product whose rate limits it: float32, bfloat16 or int8."""
    dtype: torch.dtype = torch.float32
    """Type of the activations."""
    build: Callable[[Operators], Callable[[int], Tensor]]
    """Builds a copy of the constants on a backend; returns a function that runs the point with a given index."""
    error: Callable[[int, Tensor], float]
    """Returns the error of a point's result; see `relative_error`."""
    tolerance: float = 0.01
    """Largest error that rounding explains."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected| over all elements, infinite if anything is not a number.

    >>> import torch
    >>> relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0]))
    0.08
    """
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    wide = expected.double()
    return round(float((found.double() - wide).norm() / wide.norm().clamp_min(1e-30)), 7)


def against_reference(build: Callable[[Operators], Callable[[int], Tensor]]) -> Callable[[int, Tensor], float]:
    """Return a function for the error against the reference backend.

    The reference is built on first use, and each of its points is computed once.
    """
    built: list[Callable[[int], Tensor]] = []
    expected: dict[int, Tensor] = {}

    def error(point: int, found: Tensor) -> float:
        if not built:
            built.append(build(reference.operators()))
        if point not in expected:
            expected[point] = built[0](point)
        return relative_error(found, expected[point])

    return error


KINDS = ("bf16", "f32", "int8", "int4")
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
FILE_KINDS = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""Types of GGUF files that are multiplied in the file's own bits, with float32 activations; for the largest matrix."""
FILE_ROWS = (1, 4, 8, 16, 32, 512)
_PRODUCTS = {"bf16": "bfloat16", "f32": "float32", "int8": "int8", "int4": "int8"}
_LINEAR_TOLERANCES = {"bf16": 0.01, "f32": 1e-5, "int8": 0.02, "int4": 0.02}
_FILE_TOLERANCE = 0.02
"""Tolerances: bfloat16 keeps 8 bits; inputs of quantized products are rounded to 8 bits in groups of 128."""


def linear_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """Yield a subject for each kind of weight and each matrix.

    Args:
        config: the model whose shapes are used.
        quick: whether to use only one matrix and few numbers of rows.
    """
    layer, hidden = config.layers[0], config.hidden_size
    q, kv, inner = layer.q_size, layer.kv_size, layer.intermediate_size
    matrices = {
        "gate_up": (2 * inner, hidden),
        "qkv": (q + 2 * kv, hidden),
        "output": (hidden, q),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
    }
    rows = (1, 8, 64) if quick else ROWS
    for kind in KINDS:
        for name, (n, k) in matrices.items():
            if name == "gate_up" or not quick:
                yield _linear_subject(kind, name, n, k, rows)
    n, k = matrices["gate_up"]
    for kind in () if quick or k % SUPER_BLOCK else FILE_KINDS:
        yield _linear_subject(kind, "gate_up", n, k, FILE_ROWS)


def _linear_subject(kind: str, name: str, n: int, k: int, rows: Sequence[int]) -> Subject:
    generator = torch.Generator().manual_seed(n + k)
    dtype = torch.bfloat16 if kind in ("bf16", "int8", "int4") else torch.float32
    made: list[Tensor | QuantizedWeight] = []

    def weight() -> Weight:
        """Return the weight, created on first use; each call returns a separate copy."""
        if not made and kind in REPACKED:
            made.append(_random_weight(kind, n, k, generator))
        elif not made:
            plain = (torch.randn(n, k, generator=generator) / math.sqrt(k)).to(dtype)
            made.append(_QUANTIZE[kind](plain) if kind in _QUANTIZE else plain)
        return made[0] if isinstance(made[0], QuantizedWeight) else made[0].clone()

    inputs = [torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype) for m in rows]
    is_gated = name == "gate_up"

    def build(operators: Operators) -> Callable[[int], Tensor]:
        packed = operators.pack_gated(weight(), None, "silu") if is_gated else operators.pack_linear(weight(), None)
        return lambda point: packed(inputs[point])

    num_bytes = int(n * k * (_bytes_per_weight(kind) if kind in REPACKED else _BYTES_PER_WEIGHT[kind]))
    width = n // 2 if is_gated else n
    points = tuple(
        Point(f"{name} {n} x {k}, {m} rows", num_bytes + m * (k + width) * dtype.itemsize, 2.0 * m * n * k)
        for m in rows
    )
    return Subject(
        operator="linear",
        kind=kind,
        points=points,
        constant_bytes=num_bytes,
        product=_PRODUCTS.get(kind, "int8"),
        dtype=dtype,
        build=build,
        error=against_reference(build),
        tolerance=_LINEAR_TOLERANCES.get(kind, _FILE_TOLERANCE),
    )


def _random_weight(kind: str, n: int, k: int, generator: torch.Generator) -> QuantizedWeight:
    """Return random codes and scales in the format that a type of GGUF files becomes in memory."""
    weight = REPACKED[kind].room(n, k, torch.float32)
    weight.codes.random_(0, 1 << weight.bits, generator=generator)
    for part in (weight.scales, weight.mins):
        if part is not None and weight.super_scales is not None:
            part.random_(1, 16, generator=generator)  # whole numbers, which fit into 4 bits
        elif part is not None:
            part.uniform_(1e-3, 1e-2, generator=generator)
    for part in (weight.super_scales, weight.super_mins):
        if part is not None:
            part.uniform_(1e-4, 1e-3, generator=generator)
    return weight


def _bytes_per_weight(kind: str) -> float:
    """Return the bytes per weight of a type in memory: codes, scales and mins, and factors of super-blocks."""
    form = REPACKED[kind].format
    num_parts = 2 if form.has_mins else 1
    if not form.has_super_blocks:
        return form.bits / 8 + 2 * num_parts / form.group_size
    num_bytes = 1 if form.bits == 2 else num_parts  # a scale and a min of 4 bits share a byte
    return form.bits / 8 + num_bytes / form.group_size + 2 * num_parts / SUPER_BLOCK


_QUANTIZE: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int8": quantize_per_channel, "int4": quantize_in_groups}
_BYTES_PER_WEIGHT = {"bf16": 2.0, "f32": 4.0, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 32}
"""Bytes per weight, including its share of the group's float16 scale."""

BLOCK_SIZE = 16
CPU = torch.device("cpu")
_DTYPE = torch.bfloat16
_ATTENTION_TOLERANCE = 0.03
"""Tolerance of attention: the reference rounds scores to bfloat16 before the softmax."""

KV_FORMATS: tuple[KVFormat, ...] = ("bf16", "int8", "int4")

Batch = Sequence[tuple[int, int]]
"""Requests as (query tokens, context length including them)."""

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
    """Yield a subject for each batch and each KV format, because each has its own cache."""
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
        # the operator itself fills the cache, since the layout inside a block is its own
        attention(context_qkv, storage, attention.plan(shape, _starts(contexts), contexts, table), 0, scoring)
        plan = attention.plan(shape, _starts(queries), contexts, table)
        return lambda _: attention(step_qkv, storage, plan, 0, scoring)

    kv_bytes = int(contexts.sum()) * 2 * kv_heads * shape.slot_bytes
    # the last query of a chunk attends to the whole context, and each earlier one to one key less
    pairs = sum(n * context - n * (n - 1) // 2 for n, context in batch)
    num_queries = int(queries.sum())
    num_bytes = kv_bytes + num_queries * (2 * heads + 2 * kv_heads) * dim * _DTYPE.itemsize
    return Subject(
        operator="attention",
        kind=f"{kv_format} KV",
        points=(Point(name, num_bytes, 4.0 * heads * dim * pairs),),
        constant_bytes=kv_bytes,
        product="bfloat16",
        dtype=_DTYPE,
        build=build,
        error=against_reference(build),
        tolerance=_ATTENTION_TOLERANCE,
    )


def _starts(lens: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)


_ROWS, _QUICK_ROWS = (1, 32, 512), (32,)
_TOP_K = 50


def norm_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """Yield RMSNorm over the model's hidden states."""
    rows, n = _QUICK_ROWS if quick else _ROWS, config.hidden_size
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(m, n, generator=generator).to(_DTYPE) for m in rows]
    weight = torch.randn(n, generator=generator).to(_DTYPE)

    def build(operators: Operators) -> Callable[[int], Tensor]:
        return lambda point: operators.rms_norm(inputs[point], weight, config.norm_eps)

    points = tuple(Point(f"{m} rows of {n}", 2 * m * n * _DTYPE.itemsize, 4.0 * m * n) for m in rows)
    yield Subject(operator="rms_norm", points=points, build=build, error=against_reference(build))


def rotate_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """Yield the in-place rotary embedding of each token's q and k heads."""
    layer = config.fixed_for(None).layers[0]
    rows, heads, dim = _QUICK_ROWS if quick else _ROWS, layer.num_heads + layer.kv.num_kv_heads, layer.kv.head_dim
    rotary = Rotary(config.ropes[0][0], dim, max_model_len=max(rows), dtype=_DTYPE, device=CPU)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(m, heads, dim, generator=generator).to(_DTYPE) for m in rows]
    tables = [rotary(torch.arange(m)) for m in rows]

    def build(operators: Operators) -> Callable[[int], Tensor]:
        # repeated rotations keep the magnitude of the values; only the first result is checked
        copies = [x.clone() for x in inputs]

        def rotate(point: int) -> Tensor:
            operators.rotate_heads_(copies[point], *tables[point])
            return copies[point]

        return rotate

    size = heads * dim
    points = tuple(Point(f"{m} tokens, {heads} heads", 2 * m * size * _DTYPE.itemsize, 3.0 * m * size) for m in rows)
    yield Subject(operator="rotate", points=points, build=build, error=against_reference(build))


def sampling_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """Yield greedy, temperature and filtered sampling by the engine's sampler, with the backend's own kernels if it has
    any.

    Tokens are a function of the seed, so every backend must draw the same tokens as the reference.
    """
    rows = _QUICK_ROWS if quick else (1, 32)
    reference_sampler = Sampler(config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(m, config.vocab_size, generator=generator) * 3 for m in rows]
    kinds = {
        "greedy": (SamplingParams(temperature=0.0), 1),
        "temperature": (SamplingParams(temperature=0.8), config.vocab_size),
        "top-k, top-p": (SamplingParams(temperature=0.8, top_k=_TOP_K, top_p=0.95), _TOP_K),
    }
    for kind, (params, most) in kinds.items():
        rules = reference_sampler.rules(params)
        states = [SamplingState(rules, NoiseStream(row, 0), ()) for row in range(max(rows))]

        def build(operators: Operators, states: list[SamplingState] = states) -> Callable[[int], Tensor]:
            sampler = Sampler(
                config.vocab_size,
                gumbel_argmax=operators.gumbel_argmax,
                filtered_argmax=operators.filtered_argmax,
                argmax=operators.argmax,
            )
            copies = [some.clone() for some in logits]
            return lambda point: sampler.sample(copies[point], states[: rows[point]]).token_ids

        def error(point: int, found: Tensor, most: int = most, states: list[SamplingState] = states) -> float:
            """Return the share of rows whose token differs from the reference's or is not among the `most` largest."""
            expected = reference_sampler.sample(logits[point], states[: rows[point]]).token_ids
            ranks = (logits[point] > logits[point].gather(-1, found[:, None])).sum(-1)
            return float(((found != expected) | (ranks >= most)).double().mean())

        points = tuple(Point(f"{m} rows of {config.vocab_size}", 4.0 * m * config.vocab_size, 0.0) for m in rows)
        yield Subject(
            operator="sampling",
            kind=kind,
            points=points,
            constant_bytes=int(points[-1].num_bytes),
            build=build,
            error=error,
            tolerance=0.0,
        )
