"""Gumbel noise without a generator: a pure function of (seed, sample index, position, token id).

A draw consumes nothing from a stream. So it cannot depend on the other requests of the batch, on how often a request
was preempted, or on how many drafts were rejected.

row key    64 bits of BLAKE2b over the three integers (RFC 7693), once per row, on the host
per token  SplitMix64 of key and token id (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
           OOPSLA 2014, figure 16), top 53 bits, the lowest of them set: an odd multiple of 2**-53 in (0, 1)
noise      -log(-log(u)) in float64; argmax(logits + noise) then draws from softmax(logits)
           (Gumbel-max, see Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014, section 2)

The integers are the same on every machine; the two logarithms are those of the device.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twostroke.kernels.memory import send
from twostroke.sampling.rowwise import log_

_DOMAIN = b"twostroke gumbel"  # BLAKE2b's personalisation: 16 bytes that separate these keys from any other use


@dataclass(frozen=True, slots=True)
class NoiseStream:
    """Noise of one generated sequence."""

    seed: int
    sample_index: int = 0
    """Index among the n sequences of the request."""

    def key(self, position: int) -> int:
        """Return the key of the token drawn at this absolute position: 64 bits as a signed integer."""
        packed = struct.pack("<QQQ", self.seed, self.sample_index, position)
        digest = hashlib.blake2b(packed, digest_size=8, person=_DOMAIN).digest()
        return int.from_bytes(digest, "little", signed=True)


class GumbelNoise:
    """Noise for the tokens of one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        token_ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
        self._token_offsets = token_ids.mul_(_GOLDEN)  # int64 [V], wraps around as intended

    def keys(self, streams: Sequence[NoiseStream], positions: Sequence[int]) -> Tensor:
        """Return the keys of rows. int64 [R]."""
        keys = [stream.key(position) for stream, position in zip(streams, positions, strict=True)]
        return send(np.array(keys, np.int64), self._token_offsets.device)

    def of_range(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Return the noise of the token ids start, …, stop - 1. keys: int64 [R]; float64 [R, stop - start]."""
        return _gumbel(splitmix64_(keys[:, None] + self._token_offsets[start:stop]))

    def of_tokens(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Return the noise of pairs of key and token, equal to the entries of whole rows. All [N], int64 to float64."""
        return _gumbel(splitmix64_(self._token_offsets.index_select(0, token_ids).add_(keys)))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def splitmix64_(state: Tensor) -> Tensor:
    """Apply SplitMix64's output function, in place. int64, any shape.

    torch has no logical right shift of 64-bit integers, so the sign bits of the arithmetic shift are masked.
    """
    shifted = torch.empty_like(state)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        _shift_right(state, shift, shifted)
        state.bitwise_xor_(shifted).mul_(factor)
    _shift_right(state, 31, shifted)
    return state.bitwise_xor_(shifted)


def _shift_right(state: Tensor, shift: int, out: Tensor) -> Tensor:
    torch.bitwise_right_shift(state, shift, out=out)
    return out.bitwise_and_((1 << (64 - shift)) - 1)


def _gumbel(bits: Tensor) -> Tensor:
    """Return standard Gumbel variates of 64-bit words; overwrites the words. float64, same shape."""
    # A float64 holds 53 bits exactly. With the lowest one set, u is neither 0 nor 1, and its logarithms are finite:
    # |noise| < 38.
    _shift_right(bits, 11, bits).bitwise_or_(1)
    uniform = bits.to(torch.float64).mul_(2.0**-53)
    return log_(log_(uniform).neg_()).neg_()
