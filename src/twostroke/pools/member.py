"""A member of a pool: a worker's last report, as frozen facts for routing and scaling."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from twostroke.config.checks import check_int, check_number


class Role(enum.StrEnum):
    """Kinds of work that a member takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Decodes, and computes prompts that are not worth a hand-over."""
    BOTH = "both"
    """Both: it also computes prompts for other members."""

    @property
    def prefills_for_others(self) -> bool:
        """Whether it may lend KV."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether it may decode streams."""
        return self is not Role.PREFILL


class Transport(enum.StrEnum):
    """Means by which KV leaves a member."""

    INPROC = "inproc"
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    NIXL = "nixl"

    @property
    def assumed_bytes_per_s(self) -> float:
        """Assumed bytes per second of a link that was not measured yet.

        Optimistic, near the best measured on two cores (one copy 20 GB/s, shared memory and process_vm_readv 10, a TCP
        connection 3, NIXL's copies 5). A link that is assumed fast is tried, and thereby measured; one that is assumed
        slow would never be.
        """
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
    """One worker: a scheduler and its KV blocks, on any number of devices.

    Raises:
        InvalidParameter: a value that cannot be used: too small, not finite, or more free blocks than blocks.
    """

    member_id: str
    role: Role
    epoch: int = 0
    """Epoch of its process; another value means that it was restarted and its cache is empty."""
    is_ready: bool = True
    """Whether it accepts requests: it is loaded and has reported lately."""
    is_draining: bool = False
    """Whether it only ends the requests that it has."""
    num_queued_prompt_tokens: int = 0
    """Prompt tokens of its requests that are not computed yet."""
    silent_s: float = 0.0
    """Seconds without a finished step although it has work. It may hang, so its queue counts as that much longer."""
    num_running: int = 0
    """Streams that decode."""
    num_waiting: int = 0
    """Sequences that wait for a slot."""
    max_num_seqs: int
    num_free_blocks: int
    """Free blocks, including those that only the prefix cache holds."""
    num_blocks: int
    block_size: int
    """Tokens of a block."""
    kv_bytes_per_token: int
    """KV bytes per token over all layers, as transferred."""
    num_layers: int = 1
    """Number of pieces in which KV is transferred."""
    prefill_tokens_per_s: float | None = None
    """Measured prefill rate; None while it has not prefilled: then the fastest measured rate of its kind is assumed."""
    kind: str = ""
    """Properties that determine its speed: device, formats, threads. Members of one kind are assumed equally fast until
    measured. Empty: unknown, and no other member's rate is assumed for it."""
    step_s: float = 0.0
    """Measured seconds of a decode step with its current streams; 0 while it has not decoded."""
    step_s_per_sequence: float | None = None
    """Seconds that one more stream adds to a step; None while not measured: then step_s / max_num_seqs is assumed."""
    transport: Transport = Transport.TCP
    numerics: str = ""
    """Numerics of its computation. KV of a member with other numerics is converted and cached under other hashes."""

    def __post_init__(self) -> None:
        """Check ranges: a member reports these values itself, and one bad value would distort every comparison."""
        for name in ("num_queued_prompt_tokens", "num_running", "num_waiting", "num_blocks"):
            check_int(name, getattr(self, name), 0)
        for name in ("max_num_seqs", "block_size", "kv_bytes_per_token", "num_layers"):
            check_int(name, getattr(self, name), 1)
        limit = f"at most num_blocks, {self.num_blocks}"
        check_int("num_free_blocks", self.num_free_blocks, 0, self.num_blocks, limit=limit)
        if self.prefill_tokens_per_s is not None:
            limit = "more than 0 tokens a second, or nothing while it is not measured"
            check_number("prefill_tokens_per_s", self.prefill_tokens_per_s, 0, _MOST, limit, low_open=True)
        for name in ("step_s", "silent_s"):
            check_number(name, getattr(self, name), 0, _MOST, "0 or more seconds")
        if self.step_s_per_sequence is not None:
            check_number("step_s_per_sequence", self.step_s_per_sequence, 0, _MOST, "0 or more seconds")

    @property
    def takes_requests(self) -> bool:
        """Whether it is ready and does not drain."""
        return self.is_ready and not self.is_draining
