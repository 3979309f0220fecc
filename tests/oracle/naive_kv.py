"""K and V as stored, from the definition in config/kv_format.py and nothing else; numpy, one vector at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat

LEVELS = {"int8": 255, "int4": 15}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Codes:
    """One vector, quantized."""

    codes: npt.NDArray[np.uint8]
    scale: np.float16
    zero: np.float16

    def values(self) -> npt.NDArray[np.float32]:
        return np.float32(self.zero) + np.float32(self.scale) * self.codes.astype(np.float32)


def quantize(x: npt.NDArray[np.float32], kv_format: KVFormat) -> Codes:
    """A vector of finite numbers."""
    levels = np.float32(LEVELS[kv_format])
    zero = np.float16(np.clip(x.min() + np.float32(0), -65504, 65504))
    scale = np.float16(np.clip((x.max() - np.float32(zero)) / levels, 0, 65504) + np.float32(0))
    if scale == 0:
        return Codes(np.zeros(len(x), np.uint8), scale, zero)
    steps = (x - np.float32(zero)) * (np.float32(1) / np.float32(scale))
    return Codes(np.rint(np.clip(steps, 0, levels)).astype(np.uint8), scale, zero)


def stored(x: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """What reads as x [..., head_dim] once it was stored, in the type that is computed with."""
    if kv_format in DTYPES:
        return x.to(DTYPES[kv_format]).to(dtype)
    rows = x.float().reshape(-1, x.shape[-1]).numpy()
    if not np.isfinite(rows).all():
        return torch.full_like(x, float("nan"))
    values = np.stack([quantize(row, kv_format).values() for row in rows])
    return torch.from_numpy(values).view(x.shape).to(dtype)
