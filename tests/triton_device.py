"""Device of Triton's kernels in tests: a card if there is one, else the CPU through Triton's interpreter."""

from __future__ import annotations

import importlib.util

import torch


def why_not() -> str | None:
    """Return why the kernels cannot run in this process; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "not installed: triton (pip install --no-deps triton, the extra `triton`)"
    import triton

    if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
        return "no card, and not in Triton's interpreter: make test-triton"
    return None


def device() -> torch.device:
    """Return the device of the kernels' tensors. A card is used only without the interpreter."""
    import triton

    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
