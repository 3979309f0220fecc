"""Draws from large vocabularies (csrc/kernels/sampling.hpp, csrc/kernels/filtered_sampling.hpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.kernels.native.extension import Kernels


def argmax(kernels: Kernels, logits: Tensor) -> Tensor:
    """Find the largest logit of each row; see Argmax."""
    return _winners(kernels.argmax, logits)


def gumbel_argmax(kernels: Kernels, logits: Tensor, *columns: Tensor) -> Tensor:
    """Draw from whole rows; see GumbelArgmax, whose temperatures and keys are the columns."""
    return _winners(kernels.gumbel_argmax, logits, *columns)


def filtered_argmax(kernels: Kernels, logits: Tensor, *columns: Tensor) -> Tensor:
    """Draw from what filters leave of rows; see FilteredArgmax, whose arguments behind the logits are the columns."""
    return _winners(kernels.filtered_argmax, logits, *columns)


def _winners(draw: Callable[..., None], logits: Tensor, *columns: Tensor) -> Tensor:
    """Return what a kernel draws: logits float32 [R, V] and columns of R numbers -> int64 [R]."""
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    winners = torch.empty(len(logits), dtype=torch.int64)
    kept = [column.contiguous() for column in columns]  # until the kernel has read them
    draw(logits.data_ptr(), logits.stride(0), *logits.shape, *(one.data_ptr() for one in kept), winners.data_ptr())
    return winners
