"""Twostroke's own kernels for CPUs (csrc/): weights packed once, one order of summation for every batch.

The module is built when the package is installed and a C++ compiler is available. Without it everything runs on torch's
operators (kernels/reference).
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType

import torch

from twostroke.config.load import ActivationQuantization
from twostroke.errors import SetupError
from twostroke.kernels.interface import Operators

DTYPES = (torch.float32, torch.bfloat16)


def _module() -> ModuleType | None:
    try:
        return importlib.import_module("twostroke.kernels.native._native")
    except ImportError:
        return None


def is_built() -> bool:
    """Return whether the native module was built for this Python."""
    return _module() is not None


def module_file() -> str:
    """Return the path of the native module; empty if it was not built."""
    module = _module()
    return "" if module is None or module.__file__ is None else module.__file__


def why_not(device: str, dtype: str) -> str:
    """Return the reason why the native kernels cannot be used, for a message."""
    if device != "cpu":
        return f"the native kernels run on the CPU, not on {device}"
    if not is_built():
        return "the native kernels were not built (no C++20 compiler when the package was installed)"
    return f"the native kernels compute in float32 and bfloat16 (--dtype), not in {dtype.removeprefix('torch.')}"


def levels() -> tuple[str, ...]:
    """Return the instruction levels that this processor can run, best last; empty if the module was not built."""
    module = _module()
    return () if module is None else tuple(module.levels())


def block_types() -> tuple[str, ...]:
    """Return ggml's types whose blocks `ggml_blocks.unpack_blocks` reads; empty if the module was not built."""
    module = _module()
    return () if module is None else tuple(module.ggml_types())


def operators(level: str | None = None, activation_quantization: ActivationQuantization = "int8") -> Operators:
    """Return the native backend.

    Args:
        level: one of `levels()`; None takes the best.
        activation_quantization: type of the activations that quantized weights are multiplied with.

    Raises:
        SetupError: this processor cannot run that level.
    """
    from twostroke.kernels.native import attention, experts, extension, linear
    from twostroke.kernels.native import attention as layer
    from twostroke.kernels.native import extension as sampling
    from twostroke.kernels.native.extension import Elementwise, Quantizer
    from twostroke.kernels.reference.split_linear import pack_gated, pack_linear

    if level is not None and level not in levels():
        raise SetupError(f"kernels={level}: this processor runs {', '.join(levels())}. Choose one of these, or 'auto'.")
    kernels = extension.native.kernels(level or levels()[-1])
    elementwise, quantizer = Elementwise(kernels), Quantizer(kernels)
    quantizes_inputs = activation_quantization == "int8"
    pack_part = partial(linear.NativeLinear, kernels, quantizes_inputs=quantizes_inputs)
    pack_whole = partial(linear.NativeGated, kernels, quantizes_inputs=quantizes_inputs)
    linear_of = partial(pack_linear, pack_part)
    gated_of = partial(pack_gated, pack_part, pack_whole)
    return Operators(
        name=f"native {kernels.level}",
        set_num_threads=extension.set_num_threads,
        pack_linear=linear_of,
        pack_gated=gated_of,
        route=experts.route,
        pack_gated_experts=partial(experts.pack_gated_experts, gated_of),
        pack_expert_linears=partial(experts.pack_expert_linears, linear_of),
        packed_sizes=linear.PanelSizes(),
        keeps_quantized=True,
        quantize_per_channel=quantizer.per_channel,
        quantize_in_groups=quantizer.in_groups,
        rms_norm=elementwise.rms_norm,
        rms_norm_=elementwise.rms_norm_,
        rotate_heads_=elementwise.rotate_heads_,
        attention=partial(attention.attention_operator, kernels),
        pin_threads=extension.pin_threads if sys.platform == "linux" else None,
        fused_layer=partial(layer.fused_layer, kernels),
        read_stream=extension.read_stream,
        argmax=partial(sampling.argmax, kernels),
        gumbel_argmax=partial(sampling.gumbel_argmax, kernels),
        filtered_argmax=partial(sampling.filtered_argmax, kernels),
        quantizations=("int8", "int4"),
        kv_formats=tuple(extension.KV_FORMAT_CODES),
        reduced_attention_dtype=torch.bfloat16,
    )
