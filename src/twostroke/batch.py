"""What scheduler and runner agree on: the decision (ScheduledBatch) and its outcome (StepResult). Plain, frozen.

A step is one forward pass over a flat batch of tokens. Each scheduled request brings a range of its own tokens:

    request A, prefill        request B, decode      request C, verifying two drafts
    [..computed..|#########]  [....computed.....|#]  [....computed.....|#dd]
                  512 tokens                     1                      3

The batch says how many tokens, never which: the runner holds the values, including those it sampled a moment ago,
so the next batch may be decided before the last result is known.

What is made per request and step is a msgspec.Struct, which costs a fifth of a frozen dataclass to make, and travels
without its fields' names.
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
    """The two natures of work in a pass."""

    PREFILL = "prefill"  # tokens already known: the prompt, or after a preemption what was generated before it
    DECODE = "decode"  # the token sampled last, and drafts that follow it


class Limit(StrEnum):
    """What kept a batch from being larger."""

    TOKENS = "tokens"  # the token budget of the step is used up
    SEQS = "seqs"  # max_num_seqs requests are running
    KV = "kv"  # no free blocks for the next request
    NONE = "none"  # nobody is left waiting


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the runner has to know of a request, told once, before it is first scheduled."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Of the noise its tokens are drawn with."""
    sample_index: int = 0
    """Which of the prompt's `n` sequences it is."""
    output_token_ids: tuple[int, ...] = ()
    """Generated before, elsewhere: it goes on after these, and they count as output."""
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    """Of structured outputs, as grammar.backend.GrammarBackend compiled it."""
    wants_hidden_state: bool = False
    """It ends with the hidden state of its last token instead of a token that follows: an embedding."""


class BlockTableUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes one row of a KV group's block table: entries `start`, `start + 1`, … become `block_ids`.

    On (re-)admission start is 0 and all entries come; later only the blocks that were added. Without block_ids nothing
    changes. After a roll-back the entries from `start` on are replaced. Entries that a window has left behind are 0 on
    admission and stale later: no query of the group sees them.
    """

    start: int
    block_ids: tuple[int, ...]


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's share of a step."""

    request_id: str
    stroke: Stroke
    num_computed_tokens: int
    """KV valid before this step; also the position of the first token scheduled."""
    num_scheduled_tokens: int
    """Query tokens in this step, drafts included."""
    num_draft_tokens: int
    """How many of them, at the end, are for drafts to be verified; there may be fewer guesses than that."""
    samples_token: bool
    """False for all prefill chunks but the last."""
    block_tables: tuple[BlockTableUpdate, ...]
    """One per KV group; afterwards the row covers every token up to the end of this step."""

    @property
    def token_range(self) -> range:
        """Absolute positions of the query tokens."""
        return range(self.num_computed_tokens, self.num_computed_tokens + self.num_scheduled_tokens)


class CacheEnd(StrEnum):
    """Why a request's cached prefix is not longer."""

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
    """Known then: the prompt, and after a preemption what was generated before it."""
    num_cached_tokens: int
    """Of these, found in the prefix cache."""
    cache_end: CacheEnd


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that had to give its blocks back."""

    request_id: str
    by_request_id: str
    """Whose tokens needed a block; itself when it was the least urgent of all."""


class KVStore(msgspec.Struct, frozen=True, array_like=True):
    """A cached block whose memory is needed goes to a slot in host memory."""

    block_id: int
    slot: int


class KVLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a slot in host memory holds comes back into a block."""

    slot: int
    block_id: int
    group_id: int
    block_hash: bytes
    """The name that the content has in the KV group."""


@dataclass(frozen=True, slots=True)
class KVMoves:
    """What goes to host memory and comes from there with a step, in this order.

    ```
    stores ─► loads ─► the step's pass           in the order of the device
                └────► prefetches                beside the pass, whose requests touch none of their blocks; they are
                                                 done before the next step begins
    ```
    """

    stores: tuple[KVStore, ...] = ()
    loads: tuple[KVLoad, ...] = ()
    prefetches: tuple[KVLoad, ...] = ()


class DraftReason(StrEnum):
    """Why so many drafts are verified in a step."""

    PAYS = "pays"  # more tokens per second than without
    DOES_NOT_PAY = "does not pay"
    PROBE = "probe"  # a try, where they did not pay a while ago
    OWES = "owes"  # they have cost more time than they saved, which is to be made up first
    UNKNOWN = "unknown"  # steps of this size are timed without drafts first


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """What the gate decided for a step, and by which figures."""

    reason: DraftReason
    num_drafts: int
    """Wanted, over all requests."""
    expected_tokens: float
    """Of the best plan with drafts, over all requests that decode, whether or not it is taken; where steps are timed
    first, their tokens without any."""
    expected_s: float
    """Its time."""
    plain_s: float
    """The time without drafts, when every request gets one token."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One decided step."""

    step: int
    requests: tuple[ScheduledRequest, ...]
    limited_by: Limit
    preemptions: tuple[Preemption, ...] = ()
    finished_request_ids: tuple[str, ...] = ()
    """Ended since the last batch: the runner forgets them, if it has ever seen them. (One that was admitted may have
    had to give way in the same step.)"""
    num_waiting: int = 0
    wait_reason: str = ""
    """Why the head of the queue was not admitted; everyone behind it waits for it. Empty when nobody waits."""
    head_request_id: str | None = None
    """That head."""
    admitted: tuple[AdmittedRequest, ...] = ()
    num_running: int = 0
    """Requests that hold blocks, whether or not this step computes anything of them."""
    num_free_blocks: int = 0
    """Blocks that could still be given out: free ones, and cached ones by eviction."""
    kv_checks: tuple[KVCheck, ...] = ()
    """Blocks of the cached prefixes of this step to be computed again and compared, before the step."""
    drafts: DraftDecision | None = None
    """Why its requests verify as many drafts as they do; None where nothing was decided by measurement."""
    kv_moves: KVMoves | None = None
    """Blocks that go to host memory or come from there; None: none."""
    token_budget: int = 0
    """Query tokens that it might have had; fewer than max_num_batched_tokens by a limit of time. 0: not told."""

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return not self.requests

    @property
    def preempted_request_ids(self) -> tuple[str, ...]:
        """Who had to give way."""
        return tuple(preemption.request_id for preemption in self.preemptions)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the pass."""
        return sum(r.num_scheduled_tokens for r in self.requests)

    @property
    def num_prefill_tokens(self) -> int:
        """Of these, tokens of the first stroke."""
        return sum(r.num_scheduled_tokens for r in self.requests if r.stroke is Stroke.PREFILL)

    @property
    def num_decode_tokens(self) -> int:
        """Of these, tokens of the second stroke."""
        return self.num_tokens - self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution before any processing.

    `token_ids[0]` is the chosen (or prompt) token, the rest the most likely ones in falling order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    """Of the chosen token; 1 is the most likely."""


class RequestResult(NamedTuple):
    """What a step made for one request: a tuple, since one is made per request and step."""

    request_id: str
    token_ids: tuple[int, ...]
    """0 (a chunk that does not sample) to k + 1 tokens (k drafts accepted and one more)."""
    num_draft_tokens: int = 0
    """Drafts that were verified, so many as were guessed; at most as many as were scheduled."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For the prompt positions that this chunk predicted, when asked for."""
    prompt_logprobs_start: int = 1
    """Position in the prompt of the first of them."""
    error: str | None = None
    """Set when this request cannot go on (its logits are not finite); the others are untouched."""
    is_complete: bool = False
    """Whether it ends here, because nothing can follow in the form that was asked for."""
    hidden_state: bytes | None = None
    """Of its last token behind the final norm, where it wants that: float32 [hidden_size]. It ends here."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one ScheduledBatch; one entry per scheduled request, in its order."""

    step: int
    requests: tuple[RequestResult, ...]
    operator_time_s: float = 0.0
    """Time in the model's operators, measured by the runner; the rest of the step is the engine's own."""
    draft_time_s: float = 0.0
    """Time that guessing drafts took, before that."""


class StepSeconds(NamedTuple):
    """How long a step took."""

    step_s: float = 0.0
    """From the decision to the result; 0: nobody looked."""
    draft_s: float = 0.0
    """Of it, to guess drafts."""


UNTIMED = StepSeconds()


class StepTimer:
    """Times steps. One that is decided while another runs begins when that one ends.

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
        """A step was decided, of which the result will come."""
        self._decided_s[step] = time_s

    def ended(self, step: int, time_s: float, draft_s: float = 0.0) -> StepSeconds:
        """Its result has come; guessing its drafts took so long."""
        begin_s = max(self._decided_s.pop(step), self._ended_s)
        self._ended_s = time_s
        return StepSeconds(time_s - begin_s, draft_s)


class Commit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the engine tells the scheduler of one request's result: counts, hashes and an end, never token ids."""

    request_id: str
    num_tokens: int
    """Output tokens accepted, after everything that cuts them short."""
    block_hashes: tuple[bytes, ...] = ()
    """Of blocks that these tokens filled."""
    finish_reason: FinishReason | None = None
    num_draft_tokens: int = 0
    """Drafts that were verified: at most as many as were scheduled."""
