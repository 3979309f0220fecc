"""Choice of a model's operators: one backend, by device, type and setting."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from twostroke.config.load import ActivationQuantization, Kernels
from twostroke.errors import SetupError
from twostroke.kernels.interface import Operators
from twostroke.log import get_logger

log = get_logger(__name__)


def dtype_for(
    checkpoint_dtype: str, device: torch.device, kernels: Kernels = "auto", *, multiplies_codes: bool = False
) -> str:
    """Return the default type to compute a checkpoint in.

    It is the checkpoint's own type, except where the native kernels run:

    - They compute in bfloat16 and float32. A float16 checkpoint gets bfloat16, which needs as much memory and has the
    wider range.
    - Where they multiply codes with codes, activations are float32. A residual in bfloat16 is rounded twice a layer,
    which adds as much error as the codes do (docs/decisions/051-float32-activations.md).

    Args:
        checkpoint_dtype: type of the checkpoint's floats, by name.
        device: where the model runs.
        kernels: as for `operators_for`.
        multiplies_codes: whether all matrices except routers are quantized, and their inputs too. False for a
            checkpoint that names a type itself.
    """
    from twostroke.kernels import native

    if device.type != "cpu" or kernels == "reference" or not native.is_built():
        return checkpoint_dtype
    if multiplies_codes:
        return "float32"
    return "bfloat16" if checkpoint_dtype == "float16" else checkpoint_dtype


def operators_for(
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels = "auto",
    activation_quantization: ActivationQuantization | None = None,
    *,
    batch_invariant: bool = True,
) -> Operators:
    """Return the backend for a device and a type.

    Args:
        device: where the model runs.
        dtype: type of its weights and activations.
        kernels: "auto" for the fastest available backend, or a backend by name.
        activation_quantization: type of the activations that quantized weights are multiplied with; None leaves it to
            the backend.
        batch_invariant: whether a row's bits may not depend on the other rows. Only the operators of torch and Triton
            have another mode.

    Raises:
        SetupError: the named backend cannot run here.
    """
    from twostroke.kernels import native, reference

    if kernels == "triton" or (kernels == "auto" and device.type == "cuda"):
        return _gpu_operators(device, kernels, activation_quantization, batch_invariant=batch_invariant)
    if kernels != "reference" and device.type == "cpu" and dtype in native.DTYPES and native.is_built():
        return native.operators(None if kernels in ("auto", "native") else kernels, activation_quantization or "int8")
    _refuse_int8_activations(activation_quantization, "torch's operators")
    if kernels == "reference":
        return reference.operators(batch_invariant=batch_invariant)
    if kernels != "auto":
        raise SetupError(
            f"kernels={kernels}: {native.why_not(device.type, str(dtype))}. Omit it to use torch's operators."
        )
    if device.type == "cpu":
        _warn_once(f"{native.why_not(device.type, str(dtype))}; using torch's own operators, which are slower")
    return reference.operators()


def _gpu_operators(
    device: torch.device,
    kernels: Kernels,
    activation_quantization: ActivationQuantization | None,
    *,
    batch_invariant: bool,
) -> Operators:
    """Return Triton's kernels, or torch's operators where Triton cannot run and was not required."""
    from twostroke.kernels import cuda, reference

    why_not = cuda.why_not(device)
    _refuse_int8_activations(activation_quantization, "torch's operators" if why_not else "Triton's kernels")
    if why_not is None:
        return cuda.operators(batch_invariant=batch_invariant)
    if kernels == "triton":
        raise SetupError(f"kernels=triton: {why_not}. Omit it to use the fastest available kernels.")
    _warn_once(f"{why_not}; using torch's own operators, which are slower")
    return reference.operators(batch_invariant=batch_invariant)


def operators_to_plan(
    kernels: Kernels, activation_quantization: ActivationQuantization | None, *, has_triton: bool
) -> Operators:
    """Return operators that count memory as on a GPU. They wrap torch's operators, and nothing runs on them.

    Args:
        kernels: as requested; the levels of the native kernels run only on processors.
        activation_quantization: as requested.
        has_triton: whether Triton's kernels run on that GPU.

    Raises:
        SetupError: the named backend does not run there.
    """
    from twostroke.kernels import reference
    from twostroke.kernels.cuda.sizes import Sizes

    if kernels not in ("auto", "triton", "reference"):
        raise SetupError(f"kernels={kernels}: these kernels run on processors, not on a GPU. Omit it.")
    _refuse_int8_activations(activation_quantization, "the kernels of a GPU")
    if kernels == "reference" or not has_triton:
        return reference.operators()
    return replace(reference.operators(), name="triton", packed_sizes=Sizes(), keeps_quantized=True)


def _refuse_int8_activations(activation_quantization: ActivationQuantization | None, operators_name: str) -> None:
    if activation_quantization == "int8":
        raise SetupError(
            f"activation_quantization=int8: {operators_name}, which are used here, multiply quantized weights with "
            "unquantized activations. Omit it."
        )


@cache
def _warn_once(line: str) -> None:
    """Log a warning once per process, however many engines and operators it applies to."""
    log.warning(line)
