"""Triton's compiler without a card: every launch is compiled to machine code for a given one, and nothing runs.

A process of its own (`python -m triton_compiler 9.0`, with TRITON_INTERPRET unset): what the interpreter accepts, the
compiler may not. It calls the package's own functions on tensors of the CPU, so the arguments are those of a run.
"""

from __future__ import annotations

import re
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


compiled: dict[tuple[str, str], int] = {}
"""By a program's name and what makes it another one: the bytes of shared memory that it needs."""


MEMORY = re.compile(r"\b(ld|st|red|atom)\.[\w.]*global|cp\.async\.(c[ag]|bulk\.tensor)")
"""Instructions that read or write the card's memory. Those that only prefetch are left out."""


def waits_first(ptx: str) -> bool:
    """Return whether a program waits for the kernels before it exactly once, before any memory access."""
    before, *behind = ptx.split("griddepcontrol.wait")
    return len(behind) == 1 and MEMORY.search(before) is None


def compile_only(program: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
    """Compile instead of launching."""

    def launch(*args: Any, **kwargs: Any) -> None:
        kernel = program.warmup(*args, grid=grid, **kwargs)
        assert not kwargs.get("OVERLAPS") or waits_first(kernel.asm["ptx"]), program.__name__
        compiled[program.__name__, kernel.hash] = kernel.metadata.shared

    return launch


def main() -> None:
    """Compile for the given capability; print each program, its shared memory and its number of variants."""
    from twostroke.kernels.cuda import jit

    capability = int(sys.argv[1].replace(".", ""))
    triton.runtime.driver.set_active(NoCard(capability))
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    launch_options = jit.pdl_options(capability >= 90)
    jit.pdl_options = lambda overlaps: launch_options  # the tensors are the CPU's, where nothing overlaps
    for run in (norm_and_rotate, multiply, multiply_floats, multiply_experts, attend, draw):
        run()
    for name in sorted({name for name, _ in compiled}):
        found = [shared for (other, _), shared in compiled.items() if other == name]
        sys.stdout.write(f"{name} {max(found)} {len(found)}\n")


def norm_and_rotate() -> None:
    from twostroke.kernels.cuda import elementwise

    x = torch.zeros(4, 4096, dtype=torch.bfloat16)
    elementwise.rms_norm(x, x[0], 1e-6)
    elementwise.rms_norm(x, x[0].float(), 1e-6)
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        elementwise.gate_and_mul(x, activation)
    heads = x.view(4, 32, 128)
    elementwise.rms_norm_(heads, torch.ones(32, 128, dtype=torch.bfloat16), 1e-6)
    elementwise.rotate_heads_(heads, heads[:, :1].contiguous(), heads[:, :1].contiguous())


def multiply() -> None:
    from twostroke.kernels.cuda.linear import QuantizedLinear
    from twostroke.kernels.quantized_weight import QuantizedWeight

    n, k = 256, 512
    for bits, group_size, mins, order, is_fp8 in (
        (8, 128, None, None, False),
        (8, 128, None, None, True),
        (4, 32, torch.zeros(n, 16).half(), torch.arange(k), False),
    ):
        codes, scales = torch.zeros(n, k, dtype=torch.uint8), torch.zeros(n, k // group_size).half()
        weight = QuantizedWeight(codes, scales, mins, bits, group_size, torch.bfloat16, order, is_fp8)
        x, residual = torch.zeros(16, k, dtype=torch.bfloat16), torch.zeros(16, n, dtype=torch.bfloat16)
        # which proves its heights, so that both are compiled for each kind of weight; how it ends, with a residual or
        # without, has nothing to do with the kind
        linear = QuantizedLinear(weight, weight, torch.zeros(n, dtype=torch.bfloat16) if mins is None else None)
        for num_rows in (1, 3, 16):
            linear(x[:num_rows])
        if mins is None and not is_fp8:
            linear.add_to(residual, x)


def multiply_floats() -> None:
    from twostroke.kernels.cuda import float_linear
    from twostroke.kernels.cuda.float_linear import FloatLinear

    float_linear.has_tma = lambda device: True
    for dtype in (torch.bfloat16, torch.float32):
        linear = FloatLinear(torch.zeros(256, 512, dtype=dtype), None)  # whose proof has tiles of both sizes
        for num_rows in (1, 3, 16):
            linear(torch.zeros(num_rows, 512, dtype=dtype))
    for num_rows in (300, 301):  # the copy engine's
        FloatLinear(torch.zeros(3072, 1024, dtype=torch.bfloat16), None)(
            torch.zeros(num_rows, 1024, dtype=torch.bfloat16)
        )
    x = torch.zeros(3, 512, dtype=torch.bfloat16)
    with_bias = FloatLinear(torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16))
    with_bias.add_to(x[:, :256], x)


def multiply_experts() -> None:
    """Steps of a few pairs, and of enough for high tiles."""
    from twostroke.config.experts import ExpertsSpec
    from twostroke.kernels import cuda
    from twostroke.kernels.cuda import float_linear
    from twostroke.kernels.expert_operators import ExpertRouter

    operators, dtype = cuda.operators(), torch.bfloat16
    float_linear.FloatLinear._proven_heights = lambda self: (64, 128)  # type: ignore[method-assign]
    router = ExpertRouter(ExpertsSpec(num_experts=4, num_chosen=2, intermediate_size=2048), None)
    inner = operators.pack_gated_experts([torch.zeros(4096, 256, dtype=dtype)] * 4, None, "silu")
    down = operators.pack_expert_linears([torch.zeros(256, 2048, dtype=dtype)] * 4, torch.zeros(4, 256, dtype=dtype))
    for num_tokens in (1, 3, 16, 160):
        routing = operators.route(torch.zeros(num_tokens, 4), router)
        down(inner(torch.zeros(num_tokens, 256, dtype=dtype), routing), routing)


def attend() -> None:
    """Steps of all sizes: arrays that begin anywhere, tables of one block and of many."""
    import numpy as np

    from twostroke.config.kv_format import KVFormat, is_quantized, slot_bytes
    from twostroke.config.layer_spec import KVSpec
    from twostroke.kernels.cuda.attention import TritonAttention
    from twostroke.kernels.interface import GroupShape, QKNormRope, Scoring

    formats: list[KVFormat] = ["bf16", "fp8", "int8", "int4"]
    heads = torch.zeros(40, 128, dtype=torch.bfloat16)
    for kv_format in formats:
        kv = KVSpec(num_kv_heads=8, head_dim=128)
        shape = GroupShape(32, kv, 16, 2 * 16 * kv.bytes_per_token(kv_format), kv_format)
        operator = TritonAttention(32, 8, torch.device("cpu"))
        storage = torch.zeros(80, 2, 2, 8, 16 * slot_bytes(kv_format, 128), dtype=torch.uint8)
        for lens, is_tree in (([3, 600], kv_format == "bf16"), ([600], False), ([16, 300, 7], False), ([1], False)):
            queries = [min(3, length) for length in lens]
            starts, table = np.cumsum([0, *queries]), np.arange(len(lens) * 40).reshape(len(lens), 40)
            trees = [np.tri(3, dtype=bool), None] if is_tree else None
            plan = operator.plan(
                shape,
                starts.astype(np.int32),
                np.array(lens, np.int32),
                table[:, : -(-max(lens) // 16)].astype(np.int32),
                trees,
            )
            qkv = torch.zeros(sum(queries), 48, 128, dtype=torch.bfloat16)
            mean = torch.zeros(8, 128, dtype=torch.bfloat16) if is_quantized(kv_format) else None
            qk_norm_rope = QKNormRope(*torch.zeros(2, sum(queries), 1, 128, dtype=torch.bfloat16), heads, 1e-6, mean)
            operator(qkv, storage, plan, 0, Scoring(0.1), qk_norm_rope)
            of_heads = torch.zeros(32)
            if kv_format == "fp8":
                operator(qkv, storage, plan, 0, Scoring(0.1, sinks=of_heads), qk_norm_rope)
            if kv_format == "int8":
                operator(qkv, storage, plan, 0, Scoring(0.1, slopes=of_heads), qk_norm_rope)


def draw() -> None:
    from twostroke.kernels.cuda import sampling

    columns = torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)
    logits = torch.zeros(2, 151_936)
    sampling.gumbel_argmax(logits, *columns)
    filters = torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    sampling.filtered_argmax(logits, *columns, *filters)


if __name__ == "__main__":
    main()
