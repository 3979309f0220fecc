"""Compilation, launch options and arithmetic that all Triton programs share.

Nothing outside of this package imports Triton, and its __init__ does not either. So `kernels.cuda.why_not` works where
Triton is missing.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether programs run in Triton's interpreter, on the CPU, as in the tests. It differs from a card in two ways that
programs must handle (docs/decisions/031-triton-kernels.md has the whole list): float32 becomes bfloat16 by truncation,
and a product of bfloat16 matrices is garbage."""


class Program(Protocol):
    """Compiled kernel, launched on a grid or called by another kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that launches it on a grid."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it from inside another program."""
        ...


def jit(function: Callable[..., Any]) -> Program:
    """Apply triton.jit, and give the result a static type."""
    return triton.jit(function)


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Any]], Program]:
    """Apply triton.jit without specializing on arguments of these names.

    Triton specializes on numbers that are 1 or even, and on addresses of whole vectors. Arguments that change from step
    to step are named here, since compiling takes a second.
    """

    def decorate(function: Callable[..., Any]) -> Program:
        missing = set(names) - set(inspect.signature(function).parameters)
        assert not missing, f"{function.__name__} has no {missing}, and Triton would not say so"
        return triton.jit(function, do_not_specialize=names)

    return decorate


NO_FP_FUSION = {"enable_fp_fusion": False}
"""Option of every launch: products and sums are fused where a program says `fma` and nowhere else. A compiler that may
choose may choose differently for the same line elsewhere."""
_OVERLAPPING = (9, 0)
"""First capability of cards on which a kernel can start before the previous one has ended."""


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Return launch options of programs that begin with `wait_for_inputs`.

    Where the card supports it, such a kernel starts while the previous one still runs (programmatic dependent
    launch).
    """
    return NO_FP_FUSION | pdl_options(
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OVERLAPPING
    )


def pdl_options(overlaps: bool) -> dict[str, Any]:
    """Return the part of `launch_options` that depends on the card.

    >>> pdl_options(True)
    {'OVERLAPS': True, 'launch_pdl': True}
    """
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}


def as_tensor_descriptor(matrix: Tensor, block: tuple[int, int]) -> Any:
    """Return a descriptor by which the card's copy engine reads a matrix in blocks."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], list(block))


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n; Triton's block sizes must be powers of two.

    >>> [power_of_two(n) for n in (1, 5, 64, 65)]
    [1, 8, 64, 128]
    """
    return 1 << max(0, n - 1).bit_length()


@jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to `dtype`, to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@jit
def round_trip(x, dtype: tl.constexpr):
    """Round float32 to `dtype` and convert back."""
    return rounded(x, dtype).to(tl.float32)


@jit
def product(a, b, acc):
    """Return acc + a b of matrices of one float type, summed in float32; float32 inputs are not truncated to TF32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Allow the next kernel to start, and wait for the kernels before to end.

    Only data that no kernel writes, which is the weights, may be touched before this call. The next kernel waits here
    too, so that it ends after this one. Every program of a chain must call this.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@jit
def prefetch_rows(address, num_bytes):
    """Prefetch `num_bytes` from each address into the L2 cache; both must be multiples of 16."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
