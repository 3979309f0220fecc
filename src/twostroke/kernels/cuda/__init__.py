"""Twostroke's own kernels for NVIDIA GPUs, in Triton. Without batch invariance, dense products are cuBLAS's.

They need the package Triton, which torch's CUDA builds include. Without it, or on a card that Triton does not support,
torch's operators are used (kernels/reference). With Triton's interpreter (TRITON_INTERPRET=1) they also run on the CPU,
number by number; the tests use that.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial

import torch

from twostroke.kernels import quantized_weight
from twostroke.kernels.interface import Operators

LOWEST_CAPABILITY = (8, 0)
"""Lowest compute capability of a card: bfloat16 in the matrix units, and what Triton supports."""


def has_triton() -> bool:
    """Return whether the package can be imported."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        importlib.import_module("triton.language")
    except ImportError:  # an incomplete installation, or another package of that name
        return False
    return True


def why_not(device: torch.device) -> str | None:
    """Return the reason why these kernels cannot run on the device, for a message; None if they can."""
    if not has_triton():
        return "Triton is not installed (pip install triton)"
    from twostroke.kernels.cuda.jit import INTERPRETED

    if device.type != "cuda":
        return None if INTERPRETED.value else f"Triton's kernels run on a GPU (--device cuda), not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        return (
            f"Triton's kernels need a GPU of compute capability {'.'.join(map(str, LOWEST_CAPABILITY))}, and "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
        )
    return None


def operators(*, batch_invariant: bool = True) -> Operators:
    """Return the backend for a device where `why_not` returns None. Without `batch_invariant`, dense products are
    cuBLAS's."""
    from twostroke.kernels.cuda import attention, elementwise, experts, linear, sampling, sizes
    from twostroke.kernels.reference.experts import route
    from twostroke.kernels.reference.split_linear import pack_gated, pack_linear

    pack_part = partial(linear.pack_linear, batch_invariant=batch_invariant)
    pack_whole = partial(linear.pack_gated, batch_invariant=batch_invariant)
    linear_of = partial(pack_linear, pack_part)
    gated_of = partial(pack_gated, pack_part, pack_whole)
    return Operators(
        name="triton",
        is_batch_invariant=batch_invariant,
        set_num_threads=torch.set_num_threads,
        pack_linear=linear_of,
        pack_gated=gated_of,
        route=route,
        pack_gated_experts=partial(experts.pack_gated_experts, linear_of),
        pack_expert_linears=partial(experts.pack_expert_linears, linear_of),
        packed_sizes=sizes.Sizes(),
        keeps_quantized=True,
        quantize_per_channel=quantized_weight.quantize_per_channel,
        quantize_in_groups=quantized_weight.quantize_in_groups,
        rms_norm=elementwise.rms_norm,
        rms_norm_=elementwise.rms_norm_,
        rotate_heads_=elementwise.rotate_heads_,
        attention=attention.attention_operator,
        gumbel_argmax=sampling.gumbel_argmax,
        filtered_argmax=sampling.filtered_argmax,
    )
