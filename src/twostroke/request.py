"""A request as the scheduler sees it: counts and states, no token ids and no text.

The engine keeps the token ids (engine/generation.py), and the runner keeps those that it has to compute
(runner/input_batch.py). The scheduler decides from counts and block hashes alone. Therefore an event log without text
can replay it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class RequestStatus(StrEnum):
    """State of a request; LEGAL_MOVES has the possible transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, its blocks freed; its output is kept
    FINISHED = "finished"


LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    # to WAITING: a block that it read was found corrupt before it had output, and it restarts
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class FinishReason(StrEnum):
    """Reason why a request ended; OpenAI's words, and two of ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it enters the scheduler; everything that decisions depend on, and nothing else."""

    request_id: str
    arrival_time_s: float
    num_prompt_tokens: int
    max_tokens: int
    """Most output tokens, already limited to the rest of the context."""
    priority: int = 0
    """Priority; lower is served earlier."""
    block_hashes: tuple[bytes, ...] = ()
    """Chained hashes of the prompt's full blocks, salt included; see kv_cache/prefix_cache.py."""
    reads_prefix_cache: bool = True
    """Whether the prefix cache is used; False if every prompt token has to be computed (prompt logprobs)."""
    tenant: str = ""
    """Tenant, for a fair queue; empty if tenants are not distinguished."""
    background: bool = False
    """Whether it is background work, as in scheduler/background.py."""
    lend_as: int | None = None
    """Number under which its blocks are on loan after a normal end, for the process where it continues."""
    lend_block_size: int = 0
    """KVLayout.prefix_tokens of the receiving process; blocks that are full on both sides are on loan. 0: as here."""
    import_id: int | None = None
    """Number under which its prefix was fetched; the import ends when the request runs or ends."""


Key = tuple[float, int]
"""Urgency in seconds, smaller is more urgent; then the number of the arrival, so that keys are unique."""


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's account of one request.

    ```
    0 ........ num_computed_tokens ........ num_tokens
    [ KV valid |      to compute          ]            num_tokens = num_prompt_tokens + num_output_tokens
    ```

    `num_computed_tokens` runs ahead of `update()`: it counts tokens of steps that are decided, in their order.
    `num_pending_tokens` are samples of such steps whose values are not known here yet.
    """

    arrival: Arrival
    key: Key = (0.0, 0)
    """Place in both queues, by scheduler/policy.py."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_output_tokens: int = 0
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    """Tokens at its last admission, samples in flight included. Computing these is prefill, even if they include its
    own output after a preemption."""
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache at its first admission."""
    num_draft_tokens: int = 0
    """Drafts that a step in flight verifies."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        """Copy the hashes, which grow with the output; the arrival never changes."""
        self.block_hashes = list(self.arrival.block_hashes)

    @property
    def request_id(self) -> str:
        """Id, unique among live requests."""
        return self.arrival.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens whose values are known: prompt and committed output."""
        return self.arrival.num_prompt_tokens + self.num_output_tokens

    @property
    def num_outputs_left(self) -> int:
        """Output tokens that it may still get, beyond those in flight."""
        return self.arrival.max_tokens - self.num_output_tokens - self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Move to another state; assert that the move is legal."""
        assert status in LEGAL_MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status
