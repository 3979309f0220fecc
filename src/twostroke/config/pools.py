"""Settings of a server whose engine is several processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from twostroke.config.checks import number, one_of, switch, whole_number
from twostroke.errors import InvalidParameter

KVTransport = Literal["shm", "tcp"]
MAX_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How many processes there are, and how they hand KV over."""

    prefill: int = 0
    """Processes that compute prompts and hand their KV over; 0: whoever decodes computes its prompts itself."""
    decode: int = 0
    """Processes that decode; 0, without prefill processes: one process does everything."""
    kv_transport: KVTransport = "shm"
    """How KV goes from one process to another: 'shm' reads shared memory, 'tcp' sends it."""
    allow_numeric_drift: bool = False
    """Hand KV over between processes whose kernels, versions or devices differ; tokens may differ then, too."""
    heartbeat_timeout_s: float = 2.0
    """A process that says nothing for so long is ended, and what it did goes on elsewhere."""

    def __post_init__(self) -> None:
        """Checks ranges, and that somebody decodes."""
        whole_number("prefill", self.prefill, 0, MAX_WORKERS)
        whole_number("decode", self.decode, 0, MAX_WORKERS)
        one_of("kv_transport", self.kv_transport, get_args(KVTransport))
        switch("allow_numeric_drift", self.allow_numeric_drift)
        number("heartbeat_timeout_s", self.heartbeat_timeout_s, 0.2, 600, "0.2 to 600 (seconds)")
        if self.prefill and not self.decode:
            raise InvalidParameter("prefill", self.prefill, "needs somebody who decodes", "Add --decode 1.")
        unused = PoolConfig.__dataclass_fields__
        if not self.decode:
            for name in ("kv_transport", "allow_numeric_drift", "heartbeat_timeout_s"):
                if getattr(self, name) != unused[name].default:
                    remedy = "Add --prefill 1 --decode 1, or leave it out."
                    raise InvalidParameter(name, getattr(self, name), "needs more than one process", remedy)

    @property
    def num_workers(self) -> int:
        """Processes in all; 0: no pools."""
        return self.prefill + self.decode
