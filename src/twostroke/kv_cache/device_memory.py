"""Division of a card's memory, in bytes, and the part that remains for KV.

    |------------------------------------ total ----------------------------------------|
    |--------------- utilization x total: limit for this process ---------------------|
    | others | weights | drafts | largest step | recorded passes | reserve | KV blocks |

Drafts, CUDA graphs ("recorded passes") and the reserve are predicted; every other part is measured, after the weights
are loaded and the largest steps have run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MIN_RESERVE_BYTES = 64 << 20
"""Least reserve, for allocator rounding, and for kernels that are first loaded while serving."""
RESERVED_SHARE_OF_STEP = 8
"""Divisor of the largest step's bytes for an additional reserve: steps of other shapes leave other gaps."""


def reserve_bytes(step_bytes: int) -> int:
    """Return the bytes to keep free in addition to all that was measured.

    >>> reserve_bytes(0) == MIN_RESERVE_BYTES, reserve_bytes(1 << 30) == MIN_RESERVE_BYTES + (1 << 27)
    (True, True)
    """
    return MIN_RESERVE_BYTES + -(-step_bytes // RESERVED_SHARE_OF_STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one card, in bytes.

    >>> card = DeviceMemory(total_bytes=1000, utilization=0.9, others_bytes=50, weight_bytes=400, step_bytes=100,
    ...                     reserve_bytes=20)
    >>> card.default_bytes, card.usable_bytes
    (330, 430)
    >>> card.arithmetic
    'the card has 1,000 bytes - 50 that others hold - 400 of weights - 100 for the largest step - 20 kept in reserve'
    """

    total_bytes: int
    utilization: float
    """Share of the memory, above 0 and up to 1, that may be in use if no size of KV memory is given."""
    others_bytes: int
    """Memory of other processes, and of this one apart from its tensors: CUDA's context, code, NCCL's buffers."""
    weight_bytes: int
    """All permanent tensors: weights, rotary tables, tables of noise."""
    step_bytes: int
    """Memory of the largest step's temporary tensors."""
    reserve_bytes: int
    """Reserve, as computed by `reserve_bytes`."""
    recorded_bytes: int = 0
    """Predicted memory of the CUDA graphs that are recorded while serving (runner/decode_graphs.py)."""
    draft_bytes: int = 0
    """Memory of the drafter: weights, and its state between steps."""

    @property
    def parts(self) -> tuple[tuple[int, str], ...]:
        """Everything except KV: bytes, and a description."""
        named = (
            (self.others_bytes, "that others hold"),
            (self.weight_bytes, "of weights"),
            (self.draft_bytes, "for drafts"),
            (self.step_bytes, "for the largest step"),
            (self.recorded_bytes, "for CUDA graphs"),
            (self.reserve_bytes, "kept in reserve"),
        )
        return tuple((num_bytes, words) for num_bytes, words in named if num_bytes)

    @property
    def usable_bytes(self) -> int:
        """Most bytes for the KV cache, from the whole card."""
        return max(0, self.total_bytes - self._taken_bytes)

    @property
    def default_bytes(self) -> int:
        """Bytes for the KV cache if no size is given, from the share that may be used."""
        return max(0, int(self.utilization * self.total_bytes) - self._taken_bytes)

    @property
    def arithmetic(self) -> str:
        """Derivation of `usable_bytes`, for messages."""
        return self._less_parts(f"the card has {self.total_bytes:,} bytes")

    @property
    def account(self) -> str:
        """Derivation of `default_bytes`, as a log line."""
        share = f"{self.utilization:g} x {self.total_bytes:,} bytes"
        return f"{self._less_parts(share)} = {self.default_bytes:,} for KV"

    @property
    def remedy(self) -> str:
        """Advice that frees memory, whatever the numbers are."""
        return "Raise --gpu-memory-utilization, or lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"

    def utilization_for(self, kv_bytes: int) -> float | None:
        """Return the least share, in hundredths, that leaves `kv_bytes` for KV; None: not even the whole card does.

        >>> card = DeviceMemory(total_bytes=1000, utilization=0.5, others_bytes=0, weight_bytes=600, step_bytes=0,
        ...                     reserve_bytes=0)
        >>> card.utilization_for(101), card.utilization_for(400), card.utilization_for(401)
        (0.71, 1.0, None)
        """
        # start one hundredth lower: in floats 0.29 x 100 is 28.999...
        first = max(1, math.ceil(100 * (self._taken_bytes + kv_bytes) / self.total_bytes) - 1)
        for hundredths in range(first, 101):
            if replace(self, utilization=hundredths / 100).default_bytes >= kv_bytes:
                return hundredths / 100
        return None

    @property
    def _taken_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.parts)

    def _less_parts(self, beginning: str) -> str:
        return " - ".join((beginning, *(f"{num_bytes:,} {words}" for num_bytes, words in self.parts)))
