"""Draws from large vocabularies (csrc/kernels/sampling.hpp, csrc/kernels/filtered_sampling.hpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kernels.native.extension import Kernels


def argmax(kernels: Kernels, values: Tensor) -> Tensor:
    """See Argmax."""
    assert values.dtype is torch.float32, values.dtype
    assert values.stride(1) == 1, values.stride()
    num_rows, num_columns = values.shape
    winners = torch.empty(num_rows, dtype=torch.int64)
    kernels.argmax(values.data_ptr(), values.stride(0), num_rows, num_columns, winners.data_ptr())
    return winners


def gumbel_argmax(kernels: Kernels, logits: Tensor, peaks: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """See GumbelArgmax."""
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    num_rows, vocab_size = logits.shape
    winners = torch.empty(num_rows, dtype=torch.int64)
    kernels.gumbel_argmax(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        peaks.contiguous().data_ptr(),
        temperatures.contiguous().data_ptr(),
        keys.contiguous().data_ptr(),
        winners.data_ptr(),
    )
    return winners


def filtered_argmax(
    kernels: Kernels, logits: Tensor, peaks: Tensor, temperatures: Tensor, keys: Tensor, *filters: Tensor
) -> Tensor:
    """See FilteredArgmax, whose floors, top_k and top_p are the filters."""
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    num_rows, vocab_size = logits.shape
    winners = torch.empty(num_rows, dtype=torch.int64)
    floors, top_k, top_p = (values.contiguous() for values in filters)
    kernels.filtered_argmax(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        peaks.contiguous().data_ptr(),
        temperatures.contiguous().data_ptr(),
        keys.contiguous().data_ptr(),
        floors.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        winners.data_ptr(),
    )
    return winners
