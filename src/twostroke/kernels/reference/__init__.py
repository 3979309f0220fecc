"""Torch's own operators with independent rows: slow and plain; all other backends are tested against them."""

from __future__ import annotations

from functools import partial

import torch

from twostroke.kernels import quantized_weight
from twostroke.kernels.interface import Operators
from twostroke.kernels.reference import attention, elementwise, experts, linear
from twostroke.kernels.reference.split_linear import pack_gated, pack_linear


def operators(*, batch_invariant: bool = True) -> Operators:
    """Return operators that run wherever torch does.

    Without `batch_invariant`, products take all rows at once, and rows are summed in torch's order.
    """
    pack_part = linear.PackedLinear if batch_invariant else linear.PlainLinear
    linear_of = partial(pack_linear, pack_part)
    gated_of = partial(pack_gated, pack_part, partial(linear.PackedGated, pack_part))
    return Operators(
        name="reference",
        is_batch_invariant=batch_invariant,
        set_num_threads=torch.set_num_threads,
        pack_linear=linear_of,
        pack_gated=gated_of,
        route=experts.route,
        pack_gated_experts=partial(experts.pack_gated_experts, gated_of),
        pack_expert_linears=partial(experts.pack_expert_linears, linear_of),
        packed_sizes=linear.PlainSizes(),
        keeps_quantized=False,
        quantize_per_channel=quantized_weight.quantize_per_channel,
        quantize_in_groups=quantized_weight.quantize_in_groups,
        rms_norm=elementwise.rms_norm,
        rms_norm_=elementwise.rms_norm_,
        rotate_heads_=elementwise.rotate_heads_,
        attention=attention.PagedAttention,
    )
