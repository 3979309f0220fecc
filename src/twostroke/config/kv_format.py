"""Storage formats of K and V: the user's choice, the resulting format for a model, and its size in bytes.

Float formats store numbers as they are. fp8 (float8_e4m3fn) has scale 1: numbers are rounded to nearest, ties to even,
and clipped at 448; a number that is not finite becomes NaN. int8 and int4 are asymmetric, with a scale and a zero
(both float16) for each token and KV head, separately for K and V. For the head_dim numbers x of one such vector:

    int8    zero = float16(min x)              scale = float16((max x - zero) / 255)
    int4    zero = float16(min x + span / 32)  scale = float16(span / 16)              span = max x - min x

    code = round((x - zero) / scale), within 0 to 255 or 15     decodes to   zero + scale * code

So the levels of int8 include both ends of the range; those of int4 are the middles of 16 equal cells. In int8 a
constant vector has scale 0 and loses only the accuracy of its zero. A vector of bfloat16 has an exact zero within the
range of float16 (6e-5 to 65504; numbers beyond are clipped). The product of a scale and a code needs at most 19 bits,
so every backend decodes the same numbers, to the last bit, with or without fused operations. A vector with a NaN or an
infinity has NaN as its zero.

int4 does not store the vectors of K and V but their Hadamard transform H, in blocks of `hadamard_block` numbers. This
spreads one large number over the block and narrows the range:

    stored = H(x / a)        x = H(stored) / b        a b = the numbers of a block, both powers of two, a <= b

in float32, with additions of neighbours first, then of numbers 2 apart, 4 apart and so on. The products of H(q) / b
with stored keys equal those of q with keys, so attention transforms q and its result, and no key or value.

int8 and int4 store each rotated key less the mean of its KV head (layers/attention.py): a part shared by all keys of a
head shifts all scores of a query alike, and does not change the softmax.
"""

from __future__ import annotations

from typing import Literal, get_args

KVCacheDType = Literal["auto", "bf16", "bfloat16", "f32", "float32", "fp8", "fp8_e4m3", "int8", "int4"]
"""Formats that a user may request; 'auto' is the model's own type."""

KVFormat = Literal["f32", "f16", "bf16", "fp8", "int8", "int4"]
"""Formats after 'auto' and aliases are resolved."""

KV_FORMATS: tuple[KVFormat, ...] = get_args(KVFormat)

_OF_NAME: dict[str, KVFormat] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    **{name: name for name in KV_FORMATS},
}
_BITS: dict[KVFormat, int] = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
_SCALE_AND_ZERO_BYTES = 4

INT4_PERPLEXITY_RISE = 0.0426
"""Relative rise of perplexity with int4 KV over KV in the model's type, on SmolLM2-135M-Instruct (Q4_1) and 2,048
tokens of this repository's LICENSE: benchmarks/results/quality-kv-smollm2.json, `against_float32`."""
INT8_PERPLEXITY_RISE = -0.0031
"""Relative rise of perplexity with int8 KV, from the same file."""
INT4_PERPLEXITY_RISE_OF_CODER = 0.0338
"""Relative rise of perplexity with int4 KV on Qwen2.5-Coder-1.5B (Q4_K_M) and 2,048 tokens, from
benchmarks/results/quality-qwen-coder.json."""
INT8_PERPLEXITY_RISE_OF_CODER = -0.0012
"""Relative rise of perplexity with int8 KV, from the same file."""
INT4_PERPLEXITY_RISE_OF_GEMMA = 0.0809
"""Relative rise of perplexity with int4 KV on Gemma 3 270M (Q4_K_M) and 2,048 tokens: quality-kv-gemma3-270m.json."""
INT8_PERPLEXITY_RISE_OF_GEMMA = 0.0039
"""Relative rise of perplexity with int8 KV, from the same file."""


def kv_format_warning(kv_format: KVFormat) -> str | None:
    """Return the warning about a KV format; None for formats that cost little quality."""
    if kv_format != "int4":
        return None
    return (
        f"kv_cache_dtype=int4: one scale for each token and head costs small models quality; on the first 2,048 tokens "
        f"of our LICENSE, perplexity rose by {INT4_PERPLEXITY_RISE_OF_GEMMA:.1%} on Gemma 3 270M (int8: "
        f"{INT8_PERPLEXITY_RISE_OF_GEMMA:.1%}; quality-kv-gemma3-270m.json), by {INT4_PERPLEXITY_RISE:.1%} on "
        f"SmolLM2-135M-Instruct (int8: {INT8_PERPLEXITY_RISE:.1%}; quality-kv-smollm2.json) and by "
        f"{INT4_PERPLEXITY_RISE_OF_CODER:.1%} on Qwen2.5-Coder-1.5B (int8: {INT8_PERPLEXITY_RISE_OF_CODER:.1%}; "
        f"quality-qwen-coder.json). int8 costs less."
    )


def resolve_kv_format(requested: KVCacheDType, model_dtype: str) -> KVFormat:
    """Return the storage format for a model of this type.

    >>> [resolve_kv_format(requested, "bfloat16") for requested in ("auto", "float32", "fp8_e4m3")]
    ['bf16', 'f32', 'fp8']
    """
    wanted = model_dtype if requested == "auto" else requested
    return _OF_NAME[wanted]


def is_quantized(kv_format: KVFormat) -> bool:
    """Return whether numbers are stored as codes with a scale and a zero."""
    return kv_format in ("int8", "int4")


def levels_of(kv_format: KVFormat) -> int:
    """Return the largest code of a quantized format."""
    assert is_quantized(kv_format), kv_format
    return (1 << _BITS[kv_format]) - 1


def hadamard_block(head_dim: int) -> int:
    """Return the block length of int4's transform: head_dim, or the largest power of two that divides both halves.

    >>> [hadamard_block(head_dim) for head_dim in (64, 80, 96, 128, 8)]
    [64, 8, 16, 128, 4]
    """
    half = head_dim // 2
    return head_dim if head_dim >= 16 and head_dim & (head_dim - 1) == 0 else max(1, half & -half)


def hadamard_divisors(block: int) -> tuple[int, int]:
    """Return the divisors of a vector when it is stored and when it is read.

    >>> [hadamard_divisors(block) for block in (64, 128, 1)]
    [(8, 8), (8, 16), (1, 1)]
    """
    stages = block.bit_length() - 1
    return 1 << stages // 2, 1 << (stages - stages // 2)


def slot_bytes(kv_format: KVFormat, head_dim: int) -> int:
    """Return the bytes that K takes for one token and KV head; V takes the same.

    >>> [slot_bytes(kv_format, 128) for kv_format in ("bf16", "fp8", "int8", "int4")]
    [256, 128, 132, 68]
    """
    codes = -(-head_dim * _BITS[kv_format] // 8)
    return codes + (_SCALE_AND_ZERO_BYTES if is_quantized(kv_format) else 0)
