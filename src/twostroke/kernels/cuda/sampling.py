"""Draws from large vocabularies on the card."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kernels.cuda import sampling_programs as programs
from twostroke.kernels.cuda.jit import NO_FP_FUSION, power_of_two

_SLICE = 4096


def gumbel_argmax(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Draw from whole rows (see GumbelArgmax)."""
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    num_rows, vocab_size = logits.shape
    slice_size = _slice_of(vocab_size)
    num_slices = -(-vocab_size // slice_size)
    bests, seconds = (torch.empty(num_rows, num_slices, dtype=torch.float64, device=logits.device) for _ in range(2))
    ids = torch.empty(num_rows, num_slices, dtype=torch.int64, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    programs.draw_in_slices[(num_rows, num_slices)](
        logits,
        logits.amax(dim=-1, keepdim=True),
        temperatures.contiguous(),
        keys,
        bests,
        seconds,
        ids,
        logits.stride(0),
        vocab_size,
        SLICE=slice_size,
        **NO_FP_FUSION,
    )
    programs.best_of_slices[(num_rows,)](
        bests, seconds, ids, out, num_slices, SLICES=power_of_two(num_slices), **NO_FP_FUSION
    )
    return out


def filtered_argmax(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    floors: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """Draw from filtered rows (see FilteredArgmax)."""
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        programs.draw_filtered[(num_rows,)](
            logits,
            logits.amax(dim=-1, keepdim=True),
            temperatures.contiguous(),
            keys,
            floors,
            top_k,
            top_p,
            out,
            logits.stride(0),
            vocab_size,
            SLICE=_slice_of(vocab_size),
            num_warps=8,
            **NO_FP_FUSION,
        )
    return out


def _slice_of(vocab_size: int) -> int:
    return min(_SLICE, max(16, power_of_two(vocab_size)))
