"""What a card's memory is for, byte by byte, and what of it is left for KV.

    |------------------------------------ total ----------------------------------------|
    |--------------- utilization x total: this process goes no further ---------------|
    | others | weights | drafts | largest step | recorded passes | reserve | KV blocks |

Drafts, recorded passes and the reserve are predicted; every other part is measured, once the weights are there and the
largest steps have run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LEAST_RESERVE_BYTES = 64 << 20
"""For what an allocator rounds up, and kernels that are first loaded while serving."""
RESERVED_SHARE_OF_STEP = 8
"""One byte more for so many of the largest step: steps of other shapes leave gaps that this one did not meet."""


def reserve_bytes(step_bytes: int) -> int:
    """What is kept free beside everything that was measured.

    >>> reserve_bytes(0) == LEAST_RESERVE_BYTES, reserve_bytes(1 << 30) == LEAST_RESERVE_BYTES + (1 << 27)
    (True, True)
    """
    return LEAST_RESERVE_BYTES + -(-step_bytes // RESERVED_SHARE_OF_STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Of one card, in bytes.

    >>> card = DeviceMemory(total_bytes=1000, utilization=0.9, others_bytes=50, weight_bytes=400, step_bytes=100,
    ...                     reserve_bytes=20)
    >>> card.default_bytes, card.usable_bytes
    (330, 430)
    >>> card.arithmetic
    'the card has 1,000 bytes - 50 that others hold - 400 of weights - 100 for the largest step - 20 kept in reserve'
    """

    total_bytes: int
    utilization: float
    """Share of it, above 0 and up to 1, that may be in use where no size of KV memory is given."""
    others_bytes: int
    """Other processes', and what this one holds beside its tensors: CUDA's context, code, NCCL's buffers."""
    weight_bytes: int
    """All tensors that stay: weights, rotary tables, tables of noise."""
    step_bytes: int
    """What the largest step takes beyond them."""
    reserve_bytes: int
    """See `reserve_bytes`."""
    recorded_bytes: int = 0
    """Of passes that are recorded while serving (runner/decode_graphs.py), predicted."""
    draft_bytes: int = 0
    """Of who drafts: weights, and what is remembered between steps."""

    @property
    def parts(self) -> tuple[tuple[int, str], ...]:
        """Everything beside KV: bytes, and what they are."""
        named = (
            (self.others_bytes, "that others hold"),
            (self.weight_bytes, "of weights"),
            (self.draft_bytes, "for drafts"),
            (self.step_bytes, "for the largest step"),
            (self.recorded_bytes, "for recorded passes"),
            (self.reserve_bytes, "kept in reserve"),
        )
        return tuple((num_bytes, words) for num_bytes, words in named if num_bytes)

    @property
    def usable_bytes(self) -> int:
        """For the KV cache, at most: of the whole card."""
        return max(0, self.total_bytes - self._taken_bytes)

    @property
    def default_bytes(self) -> int:
        """For the KV cache where no size is given: of the share that may be used."""
        return max(0, int(self.utilization * self.total_bytes) - self._taken_bytes)

    @property
    def arithmetic(self) -> str:
        """Where `usable_bytes` comes from."""
        return self._less_parts(f"the card has {self.total_bytes:,} bytes")

    @property
    def account(self) -> str:
        """Where `default_bytes` comes from, as a line for the log."""
        share = f"{self.utilization:g} x {self.total_bytes:,} bytes"
        return f"{self._less_parts(share)} = {self.default_bytes:,} for KV"

    @property
    def remedy(self) -> str:
        """What makes room, whatever the numbers are."""
        return "Raise --gpu-memory-utilization, or lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"

    def utilization_for(self, kv_bytes: int) -> float | None:
        """The least share, in hundredths, that leaves so much for KV; None: not even all of the card does.

        >>> card = DeviceMemory(total_bytes=1000, utilization=0.5, others_bytes=0, weight_bytes=600, step_bytes=0,
        ...                     reserve_bytes=0)
        >>> card.utilization_for(101), card.utilization_for(400), card.utilization_for(401)
        (0.71, 1.0, None)
        """
        # from one hundredth below: of 0.29 x 100 floats make 28.999...
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
