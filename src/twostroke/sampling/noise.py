"""Gumbel noise without a generator: a pure function of (seed, sample index, position, token id).

Because nothing is consumed from a stream, a draw cannot depend on which requests share the batch, on how often a
request was preempted, or on how many tokens were drafted and thrown away.

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

_DOMAIN = b"twostroke gumbel"  # BLAKE2b's personalisation: 16 bytes that keep these keys apart from any other use


@dataclass(frozen=True, slots=True)
class NoiseStream:
    """The noise of one generated sequence."""

    seed: int
    sample_index: int = 0
    """Which of the n sequences of the request."""

    def key(self, position: int) -> int:
        """64 bits, as a signed integer, for the token that is drawn at this absolute position."""
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
        """Row keys. int64 [R]."""
        keys = [stream.key(position) for stream, position in zip(streams, positions, strict=True)]
        return send(np.array(keys, np.int64), self._token_offsets.device)

    def of_range(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Noise of the token ids start, …, stop - 1. keys: int64 [R]; float64 [R, stop - start]."""
        return _gumbel(splitmix64_(keys[:, None] + self._token_offsets[start:stop]))

    def of_tokens(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Noise of pairs of key and token, equal to the same entries of whole rows. All [N], int64 to float64."""
        return _gumbel(splitmix64_(self._token_offsets.index_select(0, token_ids).add_(keys)))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def splitmix64_(state: Tensor) -> Tensor:
    """SplitMix64's output function, in place. int64, any shape.

    torch has no logical right shift of 64-bit integers: the sign bits that the arithmetic one drags in are masked.
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
    """Standard Gumbel variates of 64-bit words; overwrites them. float64, same shape."""
    # 53 bits are what a float64 holds exactly. The lowest one set keeps u away from 0 and from 1, and its logarithms
    # finite: |noise| < 38.
    _shift_right(bits, 11, bits).bitwise_or_(1)
    uniform = bits.to(torch.float64).mul_(2.0**-53)
    return log_(log_(uniform).neg_()).neg_()
