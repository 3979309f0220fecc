"""Operations on each token independently: norms and rotary position embedding.

Norms run over the last dimension. Rotary position embedding and its context extension methods match transformers 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from twostroke.config.rope import RopeConfig
from twostroke.kernels.interface import NormWeight, Operators


class Norm(Protocol):
    """An RMSNorm or a LayerNorm."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x [..., n] over the last dimension."""
        ...


class RMSNorm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, operators: Operators) -> None:
        """Store weight, which must broadcast to the normalized tensor."""
        self.weight, self.eps = weight, eps
        self._rms_norm, self._rms_norm_ = operators.rms_norm, operators.rms_norm_

    @property
    def bound(self) -> NormWeight:
        """Weight and eps, for a back end that binds the norm into a larger operator."""
        return NormWeight(self.weight, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x [..., n] over the last dimension."""
        return self._rms_norm(x, self.weight, self.eps)

    def apply_(self, x: Tensor) -> None:
        """Normalize x [..., n] in place."""
        self._rms_norm_(x, self.weight, self.eps)


class LayerNorm:
    """Layer norm over the last dimension (Ba et al. 2016, arXiv:1607.06450), in float32, by torch's operators."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """Convert weight and bias [n] to float32."""
        self._weight, self._eps = weight.float(), eps
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x [..., n]; the result is rounded once."""
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        scale = centred.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        normed = centred.mul_(scale).mul_(self._weight)
        return (normed if self._bias is None else normed.add_(self._bias)).to(x.dtype)


# ------------------------------------------------------------------ rotary position embedding


Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of a step's tokens, each [num_tokens, 1, head_dim], made by Rotary."""

_POSITIONS_PER_SLICE = 4096

MIN_POSITIONS = 128
"""Minimum number of positions in the tables: as many tokens are read to find key means (runner/key_means.py)."""


class Rotary:
    """Tables of cosines and sines for all positions, computed once."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, *, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Fill the tables for positions 0 to max_model_len - 1, or more.

        Dynamic NTK scaling is computed once for `rope.longest_request`. Scaling by the length of each request would
        make cached keys inconsistent with later queries. The same holds for longrope, whose factors change where a
        request exceeds the original context.

        If only part of a head is rotated, the rotated pairs come first in each half (model/rotary_order.py). The
        other dimensions are multiplied by 1.
        """
        num_positions = max(max_model_len, MIN_POSITIONS)
        frequencies, factor = inverse_frequencies(rope, rope.rotary_dim or head_dim)
        num_pairs, half = len(frequencies), head_dim // 2
        self._cos = torch.ones(num_positions, head_dim, dtype=dtype, device=device)
        self._signed_sin = torch.zeros_like(self._cos)
        self._query_scales: Tensor | None = None
        if rope.query_growth is not None:
            assert rope.original_max_position_embeddings is not None
            turns = torch.arange(num_positions) // rope.original_max_position_embeddings
            self._query_scales = (1 + rope.query_growth * torch.log(1.0 + turns)).to(device=device, dtype=dtype)
        # a slice at a time: float32 intermediates of all positions would take several times the tables' memory
        for begin in range(0, num_positions, _POSITIONS_PER_SLICE):
            positions = torch.arange(begin, min(begin + _POSITIONS_PER_SLICE, num_positions)).float()
            angles = positions[:, None] * frequencies  # [num_positions, num_pairs]
            cos, sin = angles.cos() * factor, angles.sin() * factor
            rows = slice(begin, begin + len(positions))
            first, second = slice(0, num_pairs), slice(half, half + num_pairs)
            self._cos[rows, first], self._cos[rows, second] = cos, cos
            self._signed_sin[rows, first], self._signed_sin[rows, second] = -sin, sin

    def query_scales(self, positions: Tensor) -> Tensor | None:
        """Return factors on the queries at positions [num_tokens] as [num_tokens, 1, 1]; None: no scaling."""
        return None if self._query_scales is None else self._query_scales[positions].view(-1, 1, 1)

    @staticmethod
    def bytes_for(head_dim: int, max_model_len: int, bytes_per_element: int) -> int:
        """Return the size of the tables in bytes."""
        return 2 * max(max_model_len, MIN_POSITIONS) * head_dim * bytes_per_element

    @property
    def nbytes(self) -> int:
        """Size of the allocated tables in bytes."""
        return self._cos.nbytes + self._signed_sin.nbytes

    def __call__(self, positions: Tensor) -> Rotation:
        """Return cos and signed sin [num_tokens, 1, head_dim] for positions [num_tokens], for `rotate_heads_`."""
        return self._cos[positions].unsqueeze(1), self._signed_sin[positions].unsqueeze(1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angular frequency of each pair [head_dim / 2], float32, and the factor on cos and sin.

    head_dim: number of rotated dimensions of a head.
    """
    frequencies, factor = _SCALINGS[rope.rope_type](rope, head_dim)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors)
    return frequencies, factor


def _plain(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))


def _default(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the original frequencies (Su et al. 2021, arXiv:2104.09864)."""
    return _plain(rope.theta, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return frequencies for position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return _plain(rope.theta, head_dim) / rope.factor, 1.0


def _dynamic(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return NTK-aware frequencies for the longest request; they are unscaled up to the original context length."""
    assert rope.original_max_position_embeddings is not None
    original = rope.original_max_position_embeddings
    stretch = rope.factor * max(rope.longest_request or original, original) / original - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim), 1.0


def _llama3(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return Llama 3.1 frequencies: long wavelengths stretched by `factor`, short ones kept, others blended."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert original is not None
    assert low is not None
    assert high is not None
    frequencies = _plain(rope.theta, head_dim)
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_between, blended, stretched), 1.0


def _yarn(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return YaRN frequencies (Peng et al. 2023, arXiv:2309.00071)."""
    assert rope.original_max_position_embeddings is not None
    original, factor = rope.original_max_position_embeddings, rope.factor

    def pair_at_rotations(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_at_rotations(rope.beta_fast or 32), pair_at_rotations(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2).float() - low) / (high - low), 0, 1)
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _longrope(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return LongRoPE frequencies (Ding et al. 2024, arXiv:2402.13753)."""
    original = rope.original_max_position_embeddings
    assert original is not None
    factors = rope.long_factors if (rope.longest_request or original) > original else rope.short_factors
    assert factors is not None
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    frequencies = 1.0 / (torch.tensor(factors) * powers)
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    return frequencies, 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))


def _proportional(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return Gemma 4 frequencies: the first pairs rotate as if all did, the remaining ones do not rotate."""
    frequencies = _plain(rope.theta, head_dim) / rope.factor
    frequencies[int(rope.rotating_share * head_dim // 2) :] = 0.0
    return frequencies, 1.0


_SCALINGS: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
