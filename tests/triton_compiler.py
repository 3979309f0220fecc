"""Triton's compiler without a card: every launch is compiled to machine code for a given one, and nothing runs.

A process of its own (`python -m triton_compiler 9.0`, with TRITON_INTERPRET unset): what the interpreter accepts, the
compiler may not. It calls the package's own functions on tensors of the CPU, so the arguments are those of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class NoCard:
    """All that compiling asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: list[tuple[str, int, int]] = []
"""Of each launch: the program, bytes of shared memory, and registers that were spilled to memory (from the PTX: none)."""


def compile_only(program: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
    """In place of a launch."""

    def launch(*args: Any, **kwargs: Any) -> None:
        kernel = program.warmup(*args, grid=grid, **kwargs)
        compiled.append((program.__name__, kernel.metadata.shared, len(kernel.asm["cubin"])))

    return launch


def main() -> None:
    """Compiles what it is told for the capability it is told, and prints each program once."""
    capability = int(sys.argv[1].replace(".", ""))
    triton.runtime.driver.set_active(NoCard(capability))
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    torch.manual_seed(0)
    run_everything()
    for name, shared, size in compiled:
        print(f"{name} shared={shared} cubin={size}")


def run_everything() -> None:
    from twostroke.kernels.cuda import elementwise

    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(4, 4096, dtype=dtype)
        elementwise.rms_norm(x, x[0], 1e-6)
        elementwise.add_rms_norm(x, x, x[0], 1e-6)
        elementwise.silu_and_mul(x)
        heads = x.view(4, 32, 128)
        elementwise.rms_norm_(heads, torch.ones(32, 128, dtype=dtype), 1e-6)
        elementwise.rotate_heads_(heads, heads[:, :1].contiguous(), heads[:, :1].contiguous())
    attend_all()


def attend_all() -> None:
    import numpy as np

    from twostroke.config.kv_format import KV_FORMATS, slot_bytes
    from twostroke.kernels.cuda.attention import TritonAttention
    from twostroke.kernels.dispatch import GroupShape

    for kv_format in KV_FORMATS:
        dtype = torch.float32 if kv_format == "f32" else torch.float16 if kv_format == "f16" else torch.bfloat16
        for window in (None, 100):
            shape = GroupShape(32, 8, 128, 16, 2, window, kv_format)
            operator = TritonAttention(32, 8, torch.device("cpu"))
            starts, lens = np.array([0, 3, 4], np.int32), np.array([3, 600], np.int32)
            table = np.arange(80, dtype=np.int32).reshape(2, 40)
            masks = [np.tri(3, dtype=bool), None] if window else None
            plan = operator.plan(shape, starts, lens, table, masks)
            storage = torch.zeros(80, 2, 2, 8, 16 * slot_bytes(kv_format, 128), dtype=torch.uint8)
            operator(torch.zeros(4, 48, 128, dtype=dtype), storage, plan, 0, 0.1)


if __name__ == "__main__":
    main()
