"""The compiled module, with what every caller of it needs. Importing this fails where it was not built."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat
from twostroke.kernels.native import _native as native

Kernels = native.Kernels

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""As csrc/kernels/table.hpp numbers them."""

KV_FORMAT_CODES: dict[KVFormat, int] = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3}
"""The same."""


def set_num_threads(count: int) -> None:
    """Computes on that many threads; torch itself goes down to one.

    Its threads look for work for a while after each operator, on the cores that ours need.
    """
    native.set_num_threads(count, [])
    torch.set_num_threads(1)


def pin_threads(cpus: Sequence[int]) -> None:
    """See Operators."""
    native.set_num_threads(len(cpus), list(cpus))
    torch.set_num_threads(1)


def address(tensor: Tensor | None) -> int:
    """Where a tensor begins; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
