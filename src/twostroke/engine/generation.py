"""Engine-side state of one sequence: its token ids, its stop conditions, and the hashes of its full blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from twostroke.batch import Commit, NewRequest, RequestResult
from twostroke.kv_cache.prefix_cache import hash_blocks
from twostroke.request import Arrival, FinishReason
from twostroke.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenStop:
    """The place in a step's new tokens where a generation ends."""

    num_tokens: int
    """New tokens that belong to the output, including the one that ended it."""
    finish_reason: FinishReason
    stop_reason: int | None = None
    """The stop token id; None for an end-of-text token or the length limit."""


def find_token_stop(
    new_token_ids: Sequence[int],
    num_output_tokens: int,
    params: SamplingParams,
    eos_token_ids: Collection[int],
) -> TokenStop | None:
    """Return where the new tokens end the generation, or None; the first min_tokens tokens never end it.

    Args:
        new_token_ids: tokens that a step generated.
        num_output_tokens: tokens generated before.
        params: sampling parameters, with max_tokens already cut to the remaining context.
        eos_token_ids: the model's own end-of-text tokens.
    """
    eos = () if params.ignore_eos else eos_token_ids
    for num_tokens, token_id in enumerate(new_token_ids, start=1):
        total = num_output_tokens + num_tokens
        if total > params.min_tokens:
            if token_id in eos:
                return TokenStop(num_tokens, FinishReason.STOP)
            if token_id in params.stop_token_ids:
                return TokenStop(num_tokens, FinishReason.STOP, token_id)
        if params.max_tokens is not None and total >= params.max_tokens:
            return TokenStop(num_tokens, FinishReason.LENGTH)
    return None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate, as it enters the engine: token ids only, already validated."""

    new_request: NewRequest
    arrival_time_s: float
    max_tokens: int
    """Most output tokens, already cut to the remaining context."""
    priority: int = 0
    cache_salt: str | None = None
    submitted_time_s: float | None = None
    """Time at which it was handed to the engine, if known separately from its arrival."""
    tenant: str = ""
    background: bool = False
    lend_as: int | None = None
    """Id of the hold that lends its blocks to the process where it continues, once it ends by itself."""
    lend_block_size: int = 0
    """Tokens per block of the borrower: only blocks full on both sides are lent; 0: same size as here."""
    import_id: int | None = None
    """Id of the import that fetches its prefix; the request waits until the import completes or fails."""

    @property
    def request_id(self) -> str:
        """Id of the sequence, unique among live requests."""
        return self.new_request.request_id


@dataclass(slots=True, eq=False)
class Generation:
    """A live sequence."""

    request: GenerationRequest
    block_size: int
    hashes_blocks: bool
    output_token_ids: list[int] = field(default_factory=list[int])
    scheduled_time_s: float | None = None
    """Time at which it first ran; None while it has only waited."""
    has_reported: bool = False
    """Whether an update has reported its state since its start, and since its last preemption."""
    _hashes: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        """Copy the output tokens known already, and hash the full blocks."""
        self.output_token_ids = list(self.request.new_request.output_token_ids)
        self._extend_hashes()

    @property
    def arrival(self) -> Arrival:
        """The request as the scheduler sees it; tokens generated elsewhere count as part of the prompt."""
        new = self.request.new_request
        return Arrival(
            request_id=new.request_id,
            arrival_time_s=self.request.arrival_time_s,
            num_prompt_tokens=len(new.prompt_token_ids) + len(new.output_token_ids),
            max_tokens=self.request.max_tokens - len(new.output_token_ids),
            priority=self.request.priority,
            block_hashes=tuple(self._hashes),
            reads_prefix_cache=new.params.prompt_logprobs is None,
            tenant=self.request.tenant,
            background=self.request.background,
            lend_as=self.request.lend_as,
            lend_block_size=self.request.lend_block_size,
            import_id=self.request.import_id,
        )

    def token_ids(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the ids of prompt and output from position `begin` up to but not including `end`."""
        prompt = self.request.new_request.prompt_token_ids
        generated = self.output_token_ids[max(0, begin - len(prompt)) : max(0, end - len(prompt))]
        return prompt[begin:end] + tuple(generated)

    def accept(self, result: RequestResult) -> tuple[Commit, int | None]:
        """Append a step's tokens, up to the first one that ends the sequence.

        Returns:
            The commit for the scheduler, and the id of the request's own stop token if one ended the sequence.
        """
        if result.error is not None:
            return Commit(self.request.request_id, 0, finish_reason=FinishReason.ERROR), None
        if result.hidden_state is not None:
            return Commit(self.request.request_id, 0, finish_reason=FinishReason.STOP), None
        new = self.request.new_request
        stop = find_token_stop(result.token_ids, len(self.output_token_ids), new.params, new.eos_token_ids)
        num_accepted = len(result.token_ids) if stop is None else stop.num_tokens
        if result.is_complete and num_accepted == len(result.token_ids) and (stop is None or stop.stop_reason is None):
            stop = TokenStop(num_accepted, FinishReason.STOP)  # even if max_tokens is reached too
        if stop is None and len(self.output_token_ids) + num_accepted >= self.request.max_tokens:
            stop = TokenStop(num_accepted, FinishReason.LENGTH)  # the limit here; the request may continue elsewhere
        self.output_token_ids.extend(result.token_ids[:num_accepted])
        commit = Commit(
            self.request.request_id,
            num_accepted,
            block_hashes=self._extend_hashes(),
            finish_reason=None if stop is None else stop.finish_reason,
            num_draft_tokens=result.num_draft_tokens,
        )
        return commit, None if stop is None else stop.stop_reason

    def _extend_hashes(self) -> tuple[bytes, ...]:
        """Hash the blocks filled since the last call, and return the new hashes."""
        num_tokens = len(self.request.new_request.prompt_token_ids) + len(self.output_token_ids)
        first = len(self._hashes)
        if not self.hashes_blocks or num_tokens // self.block_size <= first:
            return ()
        begin, end = first * self.block_size, num_tokens // self.block_size * self.block_size
        tokens = self.token_ids(begin, end)
        parent = self._hashes[-1] if self._hashes else None
        new = hash_blocks(tokens, self.block_size, salt=self.request.cache_salt, parent=parent)
        self._hashes.extend(new)
        return tuple(new)
