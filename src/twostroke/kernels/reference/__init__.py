"""Torch's own operators, arranged so that rows do not know each other: slow, plain, and the measure of the others."""

from __future__ import annotations

from functools import partial

import torch

from twostroke.kernels import quantized_weight
from twostroke.kernels.dispatch import Operators
from twostroke.kernels.reference import attention, elementwise, linear
from twostroke.kernels.reference.split_linear import pack_gated, pack_linear


def operators() -> Operators:
    """Runs wherever torch does."""
    return Operators(
        name="reference",
        set_num_threads=torch.set_num_threads,
        pack_linear=partial(pack_linear, linear.PackedLinear),
        pack_gated=partial(pack_gated, linear.PackedLinear, linear.PackedGated),
        packed_sizes=linear.PlainSizes(),
        keeps_quantized=False,
        quantize_per_channel=quantized_weight.quantize_per_channel,
        quantize_in_groups=quantized_weight.quantize_in_groups,
        rms_norm=elementwise.rms_norm,
        rms_norm_=elementwise.rms_norm_,
        rotate_heads_=elementwise.rotate_heads_,
        attention=attention.PagedAttention,
    )
