"""A request as the scheduler sees it: counts and states, no token ids and no text.

The engine keeps the token ids beside it (engine/generation.py), the runner keeps the ones it has to feed
(runner/input_batch.py). The scheduler decides from counts and block hashes alone, which is why an event log
that holds no text can replay it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class RequestStatus(StrEnum):
    """Where a request is in its life; LEGAL_MOVES says what may follow."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, its blocks given back; what it generated stays generated
    FINISHED = "finished"


LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    # to WAITING: what it was given was found corrupt before it made anything of it, and it begins anew
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class FinishReason(StrEnum):
    """Why a request ended; OpenAI's words, and two of ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it enters the scheduler; everything the decisions depend on, and nothing else."""

    request_id: str
    arrival_time_s: float
    num_prompt_tokens: int
    max_tokens: int
    """Most output tokens; already cut to what the context leaves."""
    priority: int = 0
    """Lower is served earlier."""
    block_hashes: tuple[bytes, ...] = ()
    """Chained hashes of the prompt's full blocks, salt included; see kv_cache/prefix_cache.py."""
    reads_prefix_cache: bool = True
    """False when every prompt token has to be computed anyway (prompt logprobs)."""
    tenant: str = ""
    """Whose it is, for a fair queue; empty where nobody is told apart."""
    background: bool = False
    """It takes what the others leave; see scheduler/background.py."""
    lend_as: int | None = None
    """When it ends by itself its blocks are on loan under this number, for the process where it goes on."""
    lend_block_size: int = 0
    """Where blocks of all KV groups end over there (KVLayout.prefix_tokens); what is in whole blocks of both sides is
    on loan. 0: as here."""
    import_id: int | None = None
    """Its prefix was fetched under this number, which ends when it runs or ends."""


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
    """Its place in both queues; see scheduler/policy.py."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_output_tokens: int = 0
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    """Tokens that were there when it was last admitted, samples in flight included: computing these is the first
    stroke, even where a preemption makes it compute its own output again."""
    num_cached_tokens: int = 0
    """Found in the prefix cache when it was first admitted."""
    num_draft_tokens: int = 0
    """Drafts that a step in flight verifies."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        """The hashes grow with the output; the arrival stays as it came."""
        self.block_hashes = list(self.arrival.block_hashes)

    @property
    def request_id(self) -> str:
        """Its name, unique among live requests."""
        return self.arrival.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens whose values are known: prompt and committed output."""
        return self.arrival.num_prompt_tokens + self.num_output_tokens

    @property
    def num_outputs_left(self) -> int:
        """Output tokens it may still get, beyond those in flight."""
        return self.arrival.max_tokens - self.num_output_tokens - self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Goes to another state; an illegal move is our own mistake."""
        assert status in LEGAL_MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status
