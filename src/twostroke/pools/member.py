"""A member of a pool: what a worker last said of itself, as frozen facts for who routes and scales."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from twostroke.config.checks import number, whole_number


class Role(enum.StrEnum):
    """Which strokes a member takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Decodes, and prefills what is not worth a hand-over."""
    BOTH = "both"
    """Either: it computes prompts for others, too."""

    @property
    def prefills_for_others(self) -> bool:
        """Whether it may lend KV."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether a stream may live there."""
        return self is not Role.PREFILL


class Transport(enum.StrEnum):
    """How KV leaves a member."""

    INPROC = "inproc"
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    NIXL = "nixl"

    @property
    def assumed_bytes_per_s(self) -> float:
        """Of a link that was not measured yet. Optimistic, near the best that was seen on two cores (one copy 20 GB/s,
        shared memory and process_vm_readv 10, a TCP connection 3, NIXL's copies 5): a link that is taken for fast is
        tried, and measured by that; one that is taken for slow never would be."""
        return _ASSUMED_BYTES_PER_S[self]


_ASSUMED_BYTES_PER_S = {
    Transport.INPROC: 20e9,
    Transport.SHARED_MEMORY: 10e9,
    Transport.TCP: 3e9,
    Transport.NIXL: 5e9,
}

_MOST = float(1 << 53)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker: a scheduler and its KV blocks, on however many devices.

    Raises:
        InvalidParameter: a figure that nothing can be computed with: below its least, not finite, or more blocks free
            than there are.
    """

    member_id: str
    role: Role
    epoch: int = 0
    """Of its process: another one means that it has started again, and its cache is empty."""
    is_ready: bool = True
    """It takes requests: loaded, heard of lately."""
    is_draining: bool = False
    """It ends what it has and takes nothing new."""
    num_queued_prompt_tokens: int = 0
    """Not computed yet, of requests that it has taken."""
    silent_s: float = 0.0
    """Seconds without a finished step although it has work. It may hang, so its queue counts as that much longer."""
    num_running: int = 0
    """Streams that decode."""
    num_waiting: int = 0
    """Sequences that wait for a slot."""
    max_num_seqs: int
    num_free_blocks: int
    """Held by nobody; blocks that only the prefix cache holds are free."""
    num_blocks: int
    block_size: int
    """Tokens of a block."""
    kv_bytes_per_token: int
    """Of all layers, on the wire."""
    num_layers: int = 1
    """That KV travels in pieces of."""
    prefill_tokens_per_s: float | None = None
    """Measured; None while it has not prefilled: then the fastest measured rate of its kind is assumed."""
    kind: str = ""
    """What decides how fast it computes: device, formats, threads. Members of one kind are assumed equally fast until
    they are measured. Empty: not known, and no other member's rate stands for its own."""
    step_s: float = 0.0
    """Measured, of a decode step with the streams it has; 0 while it has not decoded."""
    step_s_per_sequence: float | None = None
    """What one stream more adds to a step; None while not measured: then step_s / max_num_seqs is taken."""
    transport: Transport = Transport.TCP
    numerics: str = ""
    """Numerics of its computation. KV of a member with other numerics is converted and cached under other hashes."""

    def __post_init__(self) -> None:
        """Checks ranges: a member says this of itself, and one bad figure would turn every comparison."""
        for name in ("num_queued_prompt_tokens", "num_running", "num_waiting", "num_blocks"):
            whole_number(name, getattr(self, name), 0)
        for name in ("max_num_seqs", "block_size", "kv_bytes_per_token", "num_layers"):
            whole_number(name, getattr(self, name), 1)
        limit = f"at most num_blocks, {self.num_blocks}"
        whole_number("num_free_blocks", self.num_free_blocks, 0, self.num_blocks, limit=limit)
        if self.prefill_tokens_per_s is not None:
            limit = "more than 0 tokens a second, or nothing while it is not measured"
            number("prefill_tokens_per_s", self.prefill_tokens_per_s, 0, _MOST, limit, low_open=True)
        for name in ("step_s", "silent_s"):
            number(name, getattr(self, name), 0, _MOST, "0 or more seconds")
        if self.step_s_per_sequence is not None:
            number("step_s_per_sequence", self.step_s_per_sequence, 0, _MOST, "0 or more seconds")

    @property
    def takes_requests(self) -> bool:
        """Ready, and to stay."""
        return self.is_ready and not self.is_draining
