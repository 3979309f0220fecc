"""Conversion of K and V between numbers and bytes, in any format of config/kv_format.py.

A KV head of a block is `block_size` vectors of floats (for fp8: bytes, see kernels/cuda/fp8.py). A quantized one holds
the codes of all its tokens and then a float16 scale and a float16 zero for each token:

    int8, int4      [block_size, code bytes] [block_size, 2]        4 bits: the even dimension low

So codes start at whole vectors of 16 bytes; a slot of the plain order is 4 bytes larger than such a multiple. int4
stores transformed vectors (`hadamard`), and attention transforms q and its result.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.fp8 import from_e4m3, to_e4m3
from twostroke.kernels.cuda.jit import jit, jit_unspecialized, round_trip, rounded, wait_for_inputs

LARGEST_HALF = tl.constexpr(65504.0)
ROUNDER = tl.constexpr(8388608.0)
"""2^23: adding it to a float32 from 0 to 2^23 removes the fraction, rounded to even."""


@jit
def bounded(x, limit):
    """Clamp x to the range from -limit to limit; a NaN stays."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@jit
def hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Apply an unnormalized Hadamard transform to each 2^STAGES numbers of vectors [ROWS, WIDTH]; neighbours are
    combined first."""
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(x, (ROWS, WIDTH >> (stage + 1), 2, 1 << stage)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(pairs, (ROWS, WIDTH))
    return x


@jit
def hadamard_back(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Invert the transform of stored vectors [ROWS, WIDTH]; also applied to queries where keys are stored
    transformed."""
    return hadamard(x, ROWS, WIDTH, STAGES) * (1.0 / (1 << (STAGES + 1) // 2))


@jit
def quantized(x, inside, LEVELS: tl.constexpr):
    """Return codes, and scales and zeros in float16, of vectors [n, WIDTH]: kernels/reference/kv_codec.py, step by
    step."""
    poison = tl.sum(tl.where(inside, x * 0.0, 0.0), axis=1)  # NaN where a number is not finite
    lowest = tl.min(tl.where(inside, x, float("inf")), axis=1)
    highest = tl.max(tl.where(inside, x, float("-inf")), axis=1)
    is_finite = poison == 0.0
    span = highest - lowest
    if LEVELS == 15:
        lowest += span * (1.0 / 32)
    zero = bounded(tl.where(is_finite, lowest + 0.0, poison), LARGEST_HALF).to(tl.float16)
    scale = span * (1.0 / 16) if LEVELS == 15 else tl.div_rn(highest - zero.to(tl.float32), LEVELS * 1.0)
    scale = tl.where(is_finite & (scale > 0.0), tl.minimum(scale, LARGEST_HALF), 0.0).to(tl.float16)
    divisor = tl.where(scale > 0.0, scale.to(tl.float32), 1.0)
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, divisor), 0.0)
    offset = tl.where(is_finite, zero.to(tl.float32), 0.0)
    steps = (tl.where(inside & is_finite[:, None], x, 0.0) - offset[:, None]) * inverse[:, None]
    steps = tl.minimum(tl.maximum(steps, 0.0), LEVELS * 1.0)
    return ((steps + ROUNDER) - ROUNDER).to(tl.uint8), scale, zero


@jit
def norm_and_rotate(
    a,
    b,
    norm_weight,
    cos,
    signed_sin,
    token,
    head,
    column,
    inside,
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return both halves [n, HALF_WIDTH] of heads of q and k, as float32, after the norm (HAS_NORM) and the rotary
    embedding.

    token, head: of each vector [n]; column: [HALF_WIDTH]. Rounded to `dtype` wherever kernels/reference rounds.
    """
    half: tl.constexpr = HEAD_DIM // 2
    if HAS_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
        of_head = norm_weight + (head * HEAD_DIM)[:, None] + column[None, :]
        wide: tl.constexpr = norm_weight.dtype.element_ty
        a = round_trip(round_trip(a * scale, wide) * tl.load(of_head, mask=inside, other=0.0).to(tl.float32), dtype)
        b = round_trip(
            round_trip(b * scale, wide) * tl.load(of_head + half, mask=inside, other=0.0).to(tl.float32), dtype
        )
    angle = (token * HEAD_DIM)[:, None] + column[None, :]
    cos_a = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(signed_sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(signed_sin + angle + half, mask=inside, other=0.0).to(tl.float32)
    # each product is rounded before they are added, as torch's operators do
    rotated_a = round_trip(round_trip(a * cos_a, dtype) + round_trip(b * sin_a, dtype), dtype)
    rotated_b = round_trip(round_trip(b * cos_b, dtype) + round_trip(a * sin_b, dtype), dtype)
    return rotated_a, rotated_b


@jit_unspecialized("token_blocks", "token_offsets", "token_unused", "num_vectors")
def write_slots(
    qkv,
    values,
    halves,
    token_blocks,
    token_offsets,
    token_unused,
    norm_weight,
    cos,
    signed_sin,
    key_mean,
    eps,
    qkv_stride,
    block_stride,
    layer_offset,
    head_stride,
    num_vectors,
    first_head,
    token_heads,
    num_query_heads,
    num_kv_heads,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_QK_NORM_ROPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write K and V of ROWS vectors into their slots, and zeros into the unused slots after them, in program (ROWS
    vectors).

    Vectors are counted through the tokens. Each token has the heads of q, then of k, then of v, or those of q alone
    (token_heads in all), from first_head on. With HAS_QK_NORM_ROPE those of q and k are normed (HAS_NORM) and rotated
    on the way, and k is reduced by its mean (HAS_MEAN): first_head is 0 then, and q is written back in place. A thread
    has the same place of both halves of a head, since each half needs the other's old value.

    Strides and the offset count elements of `values`: bytes where LEVELS is not 0 and K and V are quantized, and then
    `halves` is the same memory in float16; bytes without LEVELS are fp8. HALF_WIDTH is half of HEAD_DIM, rounded up to
    a power of two. int4 transforms 2^STAGES numbers together. A token whose block is -1 is padding.
    """
    wait_for_inputs(OVERLAPS)
    vector = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_vector = vector < num_vectors
    half: tl.constexpr = HEAD_DIM // 2
    num_heads = token_heads - first_head
    token, head, column = vector // num_heads, vector % num_heads + first_head, tl.arange(0, HALF_WIDTH)
    at = qkv + (token * qkv_stride + head * HEAD_DIM)[:, None] + column[None, :]
    inside = is_vector[:, None] & (column < half)[None, :]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_QK_NORM_ROPE:
        is_qk = head < num_query_heads + num_kv_heads
        inside_qk = inside & is_qk[:, None]
        rotated_a, rotated_b = norm_and_rotate(
            a, b, norm_weight, cos, signed_sin, token, head, column, inside_qk, eps, HEAD_DIM, HAS_NORM,
            qkv.dtype.element_ty,
        )  # fmt: skip
        a, b = tl.where(is_qk[:, None], rotated_a, a), tl.where(is_qk[:, None], rotated_b, b)
        if HAS_MEAN:
            of_key = inside_qk & (head >= num_query_heads)[:, None]
            mean_at = key_mean + ((head - num_query_heads) * HEAD_DIM)[:, None] + column[None, :]
            mean_a = tl.load(mean_at, mask=of_key, other=0.0).to(tl.float32)
            mean_b = tl.load(mean_at + half, mask=of_key, other=0.0).to(tl.float32)
            a, b = round_trip(a - mean_a, qkv.dtype.element_ty), round_trip(b - mean_b, qkv.dtype.element_ty)
        of_query = inside & (head < num_query_heads)[:, None]
        tl.store(at, rounded(a, qkv.dtype.element_ty), mask=of_query)
        tl.store(at + half, rounded(b, qkv.dtype.element_ty), mask=of_query)
    x = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (ROWS, 2 * HALF_WIDTH))
    place = tl.arange(0, 2 * HALF_WIDTH)
    dim = place // HALF_WIDTH * half + place % HALF_WIDTH
    is_dim = place % HALF_WIDTH < half

    block = tl.load(token_blocks + token, mask=is_vector, other=-1).to(tl.int64)
    is_written = is_vector & (head >= num_query_heads) & (block >= 0)
    inside = is_written[:, None] & is_dim[None, :]
    slot = tl.load(token_offsets + token, mask=is_written, other=0)
    unused = tl.load(token_unused + token, mask=is_written, other=0)
    begins = block * block_stride + layer_offset + (head - num_query_heads) * head_stride
    if LEVELS == 0:
        numbers = to_e4m3(x) if values.dtype.element_ty == tl.uint8 else rounded(x, values.dtype.element_ty)
        tl.store(values + (begins + slot * HEAD_DIM)[:, None] + dim[None, :], numbers, mask=inside)
        for behind in range(1, tl.max(unused, axis=0) + 1):
            behind_it = values + (begins + (slot + behind) * HEAD_DIM)[:, None] + dim[None, :]
            tl.store(behind_it, tl.zeros_like(numbers), mask=inside & (behind <= unused)[:, None])
    else:
        if LEVELS == 15:
            x = hadamard(x * (1.0 / (1 << STAGES // 2)), ROWS, 2 * HALF_WIDTH, STAGES)
        codes, scale, zero = quantized(x, inside, LEVELS)
        code_bytes: tl.constexpr = HEAD_DIM if LEVELS == 255 else HEAD_DIM // 2
        byte, is_byte = dim, is_dim
        if LEVELS == 15:  # halves of a head are even, so no pair spans both
            low, high = tl.split(tl.reshape(codes, (ROWS, HALF_WIDTH, 2)))
            codes = low | (high << 4)
            pair = tl.arange(0, HALF_WIDTH)
            byte = pair // (HALF_WIDTH // 2) * (half // 2) + pair % (HALF_WIDTH // 2)
            is_byte = pair % (HALF_WIDTH // 2) < half // 2
        is_code = is_written[:, None] & is_byte[None, :]
        scales = halves + begins // 2 + BLOCK_SIZE * code_bytes // 2
        tl.store(values + (begins + slot * code_bytes)[:, None] + byte[None, :], codes, mask=is_code)
        tl.store(scales + slot * 2, scale, mask=is_written)
        tl.store(scales + slot * 2 + 1, zero, mask=is_written)
        for behind in range(1, tl.max(unused, axis=0) + 1):
            is_unused = is_written & (behind <= unused)
            behind_it = values + (begins + (slot + behind) * code_bytes)[:, None] + byte[None, :]
            tl.store(behind_it, tl.zeros_like(codes), mask=is_code & is_unused[:, None])
            tl.store(scales + (slot + behind) * 2, tl.zeros_like(scale), mask=is_unused)
            tl.store(scales + (slot + behind) * 2 + 1, tl.zeros_like(scale), mask=is_unused)


@jit
def read_slots(
    values,
    halves,
    begins,
    slots,
    inside,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return vectors of one head, as numbers of `dtype` [n, WIDTH]; those that are not inside are 0 and never read.

    begins: int64 [n], start of the head in each vector's block, as in write_slots; slots: int32 [n].
    """
    column = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (column < HEAD_DIM)
    if LEVELS == 0:
        found = tl.load(values + (begins + slots * HEAD_DIM)[:, None] + column, mask=mask, other=0)
        if values.dtype.element_ty == tl.uint8:
            found = from_e4m3(found).to(dtype)  # exact: every dtype holds all fp8 numbers
        elif values.dtype.element_ty != dtype:
            found = rounded(found.to(tl.float32), dtype)
    else:
        code_bytes: tl.constexpr = HEAD_DIM if LEVELS == 255 else HEAD_DIM // 2
        if LEVELS == 255:
            codes = tl.load(values + (begins + slots * code_bytes)[:, None] + column, mask=mask, other=0)
        else:
            pairs = tl.load(values + (begins + slots * code_bytes)[:, None] + column // 2, mask=mask, other=0)
            codes = (pairs >> ((column % 2) * 4).to(tl.uint8)) & 15
        at = begins // 2 + BLOCK_SIZE * code_bytes // 2 + slots * 2
        scale = tl.load(halves + at, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(halves + at + 1, mask=inside, other=0.0).to(tl.float32)
        # the product is exact (11 and 8 bits), so it does not matter whether it is fused with the sum
        numbers = codes.to(tl.float32) * scale[:, None] + zero[:, None]
        found = rounded(tl.where(mask, numbers, 0.0), dtype)
    return found
