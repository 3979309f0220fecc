"""float8_e4m3fn by its bits: 1 sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, and 0x7F is NaN.

It uses only integers and exact sums, so that the interpreter and cards without that type give the same codes.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.jit import jit

NAN = tl.constexpr(0x7F)
LARGEST = tl.constexpr(0x7E)
"""Code of 448."""
FIRST_NORMAL = tl.constexpr(121 << 23)
"""Bits of 2^-6 in float32; below, codes are multiples of 2^-9."""
REBIAS = tl.constexpr(120)
"""Difference to the exponents of float32 (bias 127)."""
ROUNDER = tl.constexpr(16384.0)
"""2^14: the last place of a float32 there is 2^-9."""


@jit
def to_e4m3(x):
    """Convert float32 to codes, uint8: to the nearest, ties to even, clamped at 448. Non-finite numbers become NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    nearest = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = tl.minimum(nearest - REBIAS * 8, LARGEST)
    shifted = tl.where(magnitude < FIRST_NORMAL, tl.abs(x), 0.0) + ROUNDER
    small = shifted.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < FIRST_NORMAL, small, normal)
    return (sign | tl.where(magnitude >= 0x7F800000, NAN, code)).to(tl.uint8)


@jit
def from_e4m3(codes):
    """Convert codes, uint8, to float32; float16 and bfloat16 hold all of them, too."""
    wide = codes.to(tl.int32)
    magnitude = wide & 0x7F
    normal = ((magnitude << 20) + (REBIAS << 23)).to(tl.float32, bitcast=True)
    found = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # 2^-9
    found = tl.where(magnitude == NAN, float("nan"), found)
    return tl.where(wide >= 0x80, -found, found)
