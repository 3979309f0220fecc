"""How K and V are stored: the choice of a user, what it comes to for a model, and the bytes of it.

The numbers of a float format are stored as they are; those of fp8 (float8_e4m3fn) have scale 1, are rounded to the
nearest, ties to even, and cut off at 448, and one that is not finite is NaN. int8 and int4 are asymmetric, with a scale
and a zero (both float16) for each token and KV head, of K and of V apart; over the head_dim numbers x of one such
vector

    int8    zero = float16(min x)              scale = float16((max x - zero) / 255)
    int4    zero = float16(min x + span / 32)  scale = float16(span / 16)              span = max x - min x

    code = round((x - zero) / scale), within 0 to 255 or 15     stands for   zero + scale * code

so int8 has the ends of the range among its levels, and int4 has the middles of 16 equal cells. In int8 a constant
vector has scale 0 and costs no accuracy but that of its zero, and a vector of bfloat16 has an exact zero wherever
float16 reaches (6e-5 to 65504; what lies beyond is cut off). A product of a scale and a code needs at most 19 bits:
every backend reads the same numbers, to the last bit, with or without fused operations. A vector with a NaN or an
infinity has a NaN for its zero.

What int4 stores of K and V is not the vector but its Hadamard transform H, in blocks of `hadamard_block` numbers, so
that one large number becomes many small ones and the range is that of all:

    stored = H(x / a)        x = H(stored) / b        a b = the numbers of a block, both powers of two, a <= b

in float32, with additions of neighbours first, then of numbers 2 apart, 4 apart and so on. The products of H(q) / b
with stored keys are those of q with keys, so attention transforms q and its result, and no key or value.

int8 and int4 store each rotated key less the mean of its KV head (layers/attention.py): what all keys of a head share
moves all scores of a query alike, and the softmax does not see it.
"""

from __future__ import annotations

from typing import Literal, get_args

KVCacheDType = Literal["auto", "bf16", "bfloat16", "f32", "float32", "fp8", "fp8_e4m3", "int8", "int4"]
"""What may be asked for; 'auto' is the model's own type."""

KVFormat = Literal["f32", "f16", "bf16", "fp8", "int8", "int4"]
"""What it comes to."""

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
"""Rise of perplexity with KV in int4 over KV in the model's type, on SmolLM2-135M-Instruct (Q4_1) and 2,048 tokens of
this repository's LICENSE: benchmarks/results/quality-kv-smollm2.json, `against_float32`."""
INT8_PERPLEXITY_RISE = -0.0031
"""The same with KV in int8."""
INT4_PERPLEXITY_RISE_OF_CODER = 0.0198
"""The same with KV in int4 on Qwen2.5-Coder-1.5B (Q4_K_M) and 400 tokens: quality-kv-qwen-coder.json beside it."""
INT8_PERPLEXITY_RISE_OF_CODER = -0.0062
"""The same with KV in int8."""
INT4_PERPLEXITY_RISE_OF_GEMMA = 0.0809
"""Rise of perplexity of Gemma 3 270M (Q4_K_M) with KV in int4, on 2,048 tokens: quality-kv-gemma3-270m.json."""
INT8_PERPLEXITY_RISE_OF_GEMMA = 0.0039
"""Rise of its perplexity with KV in int8, from the same file."""


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
        f"quality-kv-qwen-coder.json). int8 costs less."
    )


def resolve_kv_format(requested: KVCacheDType, model_dtype: str) -> KVFormat:
    """The format for a model.

    >>> [resolve_kv_format(requested, "bfloat16") for requested in ("auto", "float32", "fp8_e4m3")]
    ['bf16', 'f32', 'fp8']
    """
    wanted = model_dtype if requested == "auto" else requested
    return _OF_NAME[wanted]


def is_quantized(kv_format: KVFormat) -> bool:
    """Whether numbers are stored as codes, with a scale and a zero."""
    return kv_format in ("int8", "int4")


def levels_of(kv_format: KVFormat) -> int:
    """The largest code of a quantized format."""
    assert is_quantized(kv_format), kv_format
    return (1 << _BITS[kv_format]) - 1


def hadamard_block(head_dim: int) -> int:
    """Numbers of a vector that int4 transforms together: all, or as many as are a power of two and divide both halves.

    >>> [hadamard_block(head_dim) for head_dim in (64, 80, 96, 128, 8)]
    [64, 8, 16, 128, 4]
    """
    half = head_dim // 2
    return head_dim if head_dim >= 16 and head_dim & (head_dim - 1) == 0 else max(1, half & -half)


def hadamard_divisors(block: int) -> tuple[int, int]:
    """What a vector is divided by when it is stored, and what it is divided by when it is read again.

    >>> [hadamard_divisors(block) for block in (64, 128, 1)]
    [(8, 8), (8, 16), (1, 1)]
    """
    stages = block.bit_length() - 1
    return 1 << stages // 2, 1 << (stages - stages // 2)


def slot_bytes(kv_format: KVFormat, head_dim: int) -> int:
    """Bytes that K (and as many that V) of one token takes in one KV head.

    >>> [slot_bytes(kv_format, 128) for kv_format in ("bf16", "fp8", "int8", "int4")]
    [256, 128, 132, 68]
    """
    codes = -(-head_dim * _BITS[kv_format] // 8)
    return codes + (_SCALE_AND_ZERO_BYTES if is_quantized(kv_format) else 0)
