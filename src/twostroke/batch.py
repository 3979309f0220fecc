"""Interface between scheduler and runner: the decision (ScheduledBatch) and its outcome (StepResult), plain and frozen.

A step is one forward pass over a flat batch of tokens. Each scheduled request brings a range of its own tokens:

    request A, prefill        request B, decode      request C, verifying two drafts
    [..computed..|#########]  [....computed.....|#]  [....computed.....|#dd]
                  512 tokens                     1                      3

The batch has numbers of tokens, never their ids: the runner holds the ids, including those it has just sampled,
so the next batch may be decided before the last result is known.

Objects that are made per request and step are msgspec.Structs: making one takes a fifth of the time of a frozen
dataclass, and it is serialized without its fields' names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from twostroke.kv_check import KVCheck
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams


class Stroke(StrEnum):
    """The two kinds of work in a pass."""

    PREFILL = "prefill"  # known tokens: the prompt, and after a preemption the output generated before it
    DECODE = "decode"  # the token sampled last, and drafts that follow it


class Limit(StrEnum):
    """Limit that kept a batch from being larger."""

    TOKENS = "tokens"  # the token budget of the step is used up
    SEQS = "seqs"  # max_num_seqs requests are running
    KV = "kv"  # no free blocks for the next request
    NONE = "none"  # no request is left waiting


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request for the runner, sent once, before it is first scheduled."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Seed of the noise that its tokens are sampled with."""
    sample_index: int = 0
    """Index of the sequence among the prompt's `n`."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens generated earlier, elsewhere: generation continues after these, and they count as output."""
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    """Grammar of structured outputs, as compiled by grammar.backend.GrammarBackend."""
    wants_hidden_state: bool = False
    """Whether it ends with the hidden state of its last token, an embedding, instead of a sampled token."""


class BlockTableUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Change of one row of a KV group's block table: entries `start`, `start + 1`, … become `block_ids`.

    On (re-)admission start is 0 and all entries are sent; later only the blocks that were added. Without block_ids
    nothing changes. After a roll-back the entries from `start` on are replaced. Entries that left a window are 0 on
    admission and stale later: no query of the group sees them.
    """

    start: int
    block_ids: tuple[int, ...]


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's share of a step."""

    request_id: str
    stroke: Stroke
    num_computed_tokens: int
    """Tokens with valid KV before this step; also the position of the first scheduled token."""
    num_scheduled_tokens: int
    """Query tokens in this step, drafts included."""
    num_draft_tokens: int
    """Scheduled tokens, at the end, for drafts to verify; fewer drafts may be proposed."""
    samples_token: bool
    """Whether a token is sampled: False for all prefill chunks but the last."""
    block_tables: tuple[BlockTableUpdate, ...]
    """One update per KV group; afterwards the row covers every token up to the end of this step."""

    @property
    def token_range(self) -> range:
        """Absolute positions of the query tokens."""
        return range(self.num_computed_tokens, self.num_computed_tokens + self.num_scheduled_tokens)


class CacheEnd(StrEnum):
    """Reason why a request's cached prefix is not longer."""

    COMPLETE = "complete"  # all of it: only whole blocks are shared, and the last token is computed in any case
    UNKNOWN = "unknown"  # the next block's tokens were never computed here, or too long ago to remember
    EVICTED = "evicted"  # the next block was here, and its memory was needed
    NOT_READ = "not read"  # the request wants every prompt token computed (prompt logprobs)
    DISABLED = "disabled"  # nothing is cached at all


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that left the queue in this step."""

    request_id: str
    num_tokens: int
    """Tokens known at admission: the prompt, and after a preemption the output generated before it."""
    num_cached_tokens: int
    """Known tokens that were found in the prefix cache."""
    cache_end: CacheEnd


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request whose blocks were freed for another one."""

    request_id: str
    by_request_id: str
    """Id of the request that needed a block; the request itself if it was the least urgent of all."""


class KVStore(msgspec.Struct, frozen=True, array_like=True):
    """Copy of a cached block, whose memory is needed, to a slot in host memory."""

    block_id: int
    slot: int


class KVLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy of a slot in host memory back into a block."""

    slot: int
    block_id: int
    group_id: int
    block_hash: bytes
    """Hash of the content in the KV group."""


@dataclass(frozen=True, slots=True)
class KVMoves:
    """Copies to and from host memory that go with a step, in this order.

    ```
    stores ─► loads ─► the step's pass           in the order of the device
                └────► prefetches                during the pass, whose requests use none of their blocks;
                                                 done before the next step begins
    ```
    """

    stores: tuple[KVStore, ...] = ()
    loads: tuple[KVLoad, ...] = ()
    prefetches: tuple[KVLoad, ...] = ()


class DraftReason(StrEnum):
    """Reason for the number of drafts in a step."""

    PAYS = "pays"  # more tokens per second than without
    DOES_NOT_PAY = "does not pay"
    PROBE = "probe"  # a try, although they did not pay before
    OWES = "owes"  # drafts have cost more time than they saved, which has to be regained first
    UNKNOWN = "unknown"  # steps of this size are timed without drafts first


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """Number of drafts for a step, with the figures behind it."""

    reason: DraftReason
    num_drafts: int
    """Wanted drafts, over all requests."""
    expected_tokens: float
    """Expected tokens of the best plan with drafts, over all decoding requests, taken or not; while steps are first
    timed, their tokens without drafts."""
    expected_s: float
    """Expected seconds of that plan."""
    plain_s: float
    """Expected seconds without drafts, for one token per request."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One decided step."""

    step: int
    requests: tuple[ScheduledRequest, ...]
    limited_by: Limit
    preemptions: tuple[Preemption, ...] = ()
    finished_request_ids: tuple[str, ...] = ()
    """Requests that ended since the last batch: the runner forgets them, if it knows them. (A request may be admitted
    and preempted in the same step.)"""
    num_waiting: int = 0
    wait_reason: str = ""
    """Reason why the head of the queue was not admitted; all requests behind it wait for it. Empty if none waits."""
    head_request_id: str | None = None
    """Id of the head of the queue."""
    admitted: tuple[AdmittedRequest, ...] = ()
    num_running: int = 0
    """Requests that hold blocks, whether or not this step computes any of their tokens."""
    num_free_blocks: int = 0
    """Blocks that could still be allocated: free ones, and cached ones by eviction."""
    kv_checks: tuple[KVCheck, ...] = ()
    """Blocks of this step's cached prefixes to recompute and compare before the step."""
    drafts: DraftDecision | None = None
    """Reason for the number of drafts; None if it was not decided by measurement."""
    kv_moves: KVMoves | None = None
    """Blocks that go to host memory or come from there; None: none."""
    token_budget: int = 0
    """Token budget of the step; a time limit may put it below max_num_batched_tokens. 0: not recorded."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.requests

    @property
    def preempted_request_ids(self) -> tuple[str, ...]:
        """Ids of the preempted requests."""
        return tuple(preemption.request_id for preemption in self.preemptions)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the pass."""
        return sum(r.num_scheduled_tokens for r in self.requests)

    @property
    def num_prefill_tokens(self) -> int:
        """Query tokens of prefills."""
        return sum(r.num_scheduled_tokens for r in self.requests if r.stroke is Stroke.PREFILL)

    @property
    def num_decode_tokens(self) -> int:
        """Query tokens of decodes, drafts included."""
        return self.num_tokens - self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution before any processing.

    `token_ids[0]` is the chosen (or prompt) token, the rest the most likely ones in falling order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    """Rank of the chosen token; 1 is the most likely."""


class RequestResult(NamedTuple):
    """Result of a step for one request: a tuple, since one is made per request and step."""

    request_id: str
    token_ids: tuple[int, ...]
    """0 tokens (a chunk that does not sample) to k + 1 tokens (k accepted drafts and one more)."""
    num_draft_tokens: int = 0
    """Verified drafts: as many as were proposed, at most as many as were scheduled."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Entries for the prompt positions that this chunk predicted, if requested."""
    prompt_logprobs_start: int = 1
    """Position in the prompt of the first of them."""
    error: str | None = None
    """Message if this request cannot continue (its logits are not finite); other requests are not affected."""
    is_complete: bool = False
    """Whether it ends here, because the structured output is complete."""
    hidden_state: bytes | None = None
    """Hidden state of its last token after the final norm, float32 [hidden_size], if requested. The request ends
    here."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one ScheduledBatch; one entry per scheduled request, in its order."""

    step: int
    requests: tuple[RequestResult, ...]
    operator_time_s: float = 0.0
    """Time in the model's operators, measured by the runner; the rest of the step is the engine's own."""
    draft_time_s: float = 0.0
    """Time of drafting, before the pass."""


class StepDurations(NamedTuple):
    """Duration of a step."""

    step_s: float = 0.0
    """Seconds from the decision to the result; 0: not measured."""
    draft_s: float = 0.0
    """Seconds of it for drafting."""


NOT_TIMED = StepDurations()


class StepTimer:
    """Timer of steps. A step that is decided while another runs begins when that one ends.

    >>> timer = StepTimer()
    >>> timer.decided(0, 1.0), timer.decided(1, 1.5)
    (None, None)
    >>> timer.ended(0, 3.0).step_s, timer.ended(1, 4.0).step_s
    (2.0, 1.0)
    """

    def __init__(self) -> None:
        self._decided_s: dict[int, float] = {}
        self._ended_s = 0.0

    def decided(self, step: int, time_s: float) -> None:
        """Record that a step was decided, whose result will come."""
        self._decided_s[step] = time_s

    def ended(self, step: int, time_s: float, draft_s: float = 0.0) -> StepDurations:
        """Return the duration of a step whose result has come; `draft_s` is the time of its drafting."""
        begin_s = max(self._decided_s.pop(step), self._ended_s)
        self._ended_s = time_s
        return StepDurations(time_s - begin_s, draft_s)


class Commit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's result as the scheduler sees it: counts, hashes and a finish reason, never token ids."""

    request_id: str
    num_tokens: int
    """Output tokens accepted, after every cut."""
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of blocks that these tokens filled."""
    finish_reason: FinishReason | None = None
    num_draft_tokens: int = 0
    """Verified drafts: at most as many as were scheduled."""
