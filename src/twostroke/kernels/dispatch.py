"""Choose the operators of a model: one backend, by device, type and wish."""

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
    """Return the type to compute a checkpoint in where nobody asked for one.

    It is the checkpoint's own, except where the native kernels serve:

    - They compute in bfloat16 and float32. For float16 they take bfloat16, which needs as much memory and has the
      wider range.
    - Where they multiply codes with codes, activations are float32: a residual in bfloat16 is rounded twice a layer,
      which is as much of an error as that of the codes (docs/decisions/051-float32-activations.md).

    Args:
        checkpoint_dtype: name of the type of its floats.
        device: where the model runs.
        kernels: as for `operators_for`.
        multiplies_codes: whether all matrices but routers are quantized, and so are their inputs. False for a
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
    """The backend of a device and a type.

    Args:
        device: where the model runs.
        dtype: of its weights and activations.
        kernels: "auto" takes the fastest there is; or one by its name.
        activation_quantization: what quantized weights are multiplied with; None leaves it to the backend.
        batch_invariant: whether a row's bits may not depend on the others; only torch's and Triton's operators have
            another mode.

    Raises:
        SetupError: the one that was named cannot run here.
    """
    from twostroke.kernels import native, reference

    if kernels == "triton" or (kernels == "auto" and device.type == "cuda"):
        return _of_card(device, kernels, activation_quantization, batch_invariant=batch_invariant)
    if kernels != "reference" and device.type == "cpu" and dtype in native.DTYPES and native.is_built():
        return native.operators(None if kernels in ("auto", "native") else kernels, activation_quantization or "int8")
    _refuse_int8_activations(activation_quantization, "torch's operators")
    if kernels == "reference":
        return reference.operators(batch_invariant=batch_invariant)
    if kernels != "auto":
        raise SetupError(
            f"kernels={kernels}: {native.why_not(device.type, str(dtype))}. Leave it out, and torch's operators serve."
        )
    if device.type == "cpu":
        _warn_once(f"{native.why_not(device.type, str(dtype))}; torch's own operators serve, slower")
    return reference.operators()


def _of_card(
    device: torch.device,
    kernels: Kernels,
    activation_quantization: ActivationQuantization | None,
    *,
    batch_invariant: bool,
) -> Operators:
    """Triton's kernels, or torch's where these cannot run and nobody insists."""
    from twostroke.kernels import cuda, reference

    why_not = cuda.why_not(device)
    _refuse_int8_activations(activation_quantization, "torch's operators" if why_not else "Triton's kernels")
    if why_not is None:
        return cuda.operators(batch_invariant=batch_invariant)
    if kernels == "triton":
        raise SetupError(f"kernels=triton: {why_not}. Leave it out, and the best that there is serves.")
    _warn_once(f"{why_not}; torch's own operators serve, slower")
    return reference.operators(batch_invariant=batch_invariant)


def operators_to_plan(
    kernels: Kernels, activation_quantization: ActivationQuantization | None, *, has_triton: bool
) -> Operators:
    """Return operators that count memory as on a GPU. They wrap torch's operators, and nothing runs on them.

    Args:
        kernels: as asked for; levels of the native kernels run on processors alone.
        activation_quantization: as asked for.
        has_triton: whether Triton's kernels run on that GPU.

    Raises:
        SetupError: what was named does not run there.
    """
    from twostroke.kernels import reference
    from twostroke.kernels.cuda.sizes import Sizes

    if kernels not in ("auto", "triton", "reference"):
        raise SetupError(f"kernels={kernels}: they run on processors, not on a GPU. Leave it out.")
    _refuse_int8_activations(activation_quantization, "the kernels of a GPU")
    if kernels == "reference" or not has_triton:
        return reference.operators()
    return replace(reference.operators(), name="triton", packed_sizes=Sizes(), keeps_quantized=True)


def _refuse_int8_activations(activation_quantization: ActivationQuantization | None, who: str) -> None:
    if activation_quantization == "int8":
        raise SetupError(
            f"activation_quantization=int8: {who}, which serve here, multiply quantized weights with the "
            "activations as they are. Leave it out."
        )


@cache
def _warn_once(line: str) -> None:
    """Several operators and engines of a process have the same to say, and nobody asked for any of them to be slow."""
    log.warning(line)
