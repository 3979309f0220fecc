"""The dispatcher of a pool: records which worker computes what, and what was delivered. Pure: facts in, orders out.

```
request ──► prefill worker ──first token──► decode worker ──tokens──► delivered, and recorded
                 │ its KV, layer by layer ───────►│
                 └── dies ──┐                     └── dies ──┐
                            ▼                                ▼
               another attempt, from what was delivered: prompt + tokens are its prompt, and the next token is drawn
               with the noise of its own position, so the output does not change

no decode worker left ──► a prefill worker computes and decodes, until a decode worker is back
```

Only what was delivered counts. A worker labels every token with the attempt and the position
(`TokenUpdate.request_id`, `TokenUpdate.start`). Tokens of another attempt or position are late, and are dropped
whichever worker sent them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from twostroke.cluster.messages import Add, Command, Finish
from twostroke.cluster.routed_placer import Place, Placer, ReadyWorker
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import DropKV, FetchKV
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.kv_cache.prefix_cache import drift_salt
from twostroke.kv_transfer.transport import KVSource
from twostroke.outputs import NumericDrift, drift_description, merged_drift
from twostroke.pools.member import Role
from twostroke.request import FinishReason

MAX_ATTEMPTS = 4
"""Most attempts of a sequence without progress; after these the request probably crashes its workers."""


class WorkerCommand(msgspec.Struct, frozen=True):
    """A command for a worker."""

    worker_id: str
    command: Command


@dataclass(slots=True)
class DispatchResult:
    """Results of a decision: commands to send and updates to deliver."""

    commands: list[WorkerCommand] = field(default_factory=list[WorkerCommand])
    updates: list[TokenUpdate] = field(default_factory=list[TokenUpdate])
    """Updates to deliver, with the sequences' own ids."""
    lost: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Sequences that are given up, with the cause."""
    drifted: list[tuple[str, NumericDrift]] = field(default_factory=list[tuple[str, NumericDrift]])
    """Sequences that workers of different numerics run, with the differing settings."""
    placed: list[tuple[str, Place]] = field(default_factory=list[tuple[str, Place]])
    """New attempts, by their ids at the workers, with their places."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """The record of one sequence."""

    request: GenerationRequest
    token_ids: array[int]
    """Token ids delivered, including those it arrived with; four bytes each."""
    attempt: int = -1
    place: Place | None = None
    """Workers of the attempt; None while it waits for a worker."""
    import_id: int | None = None
    """Id of the import of its KV by the decode worker; None from that worker's first token on."""
    is_decoding: bool = False
    """Whether the decode worker was told to run it."""
    num_deaths_without_progress: int = 0
    """Number of worker deaths in a row without a token delivered in between."""
    numerics: NumericDrift = field(default_factory=dict[str, list[str]])
    """Numerics of all workers that have run the sequence: by name, the values in order of first use."""
    cache_salt: str | None = None
    """Cache salt of the attempt; differs from the request's where KV of other numerics is imported."""
    num_scored: int = 0
    """Prompt positions whose log-probabilities are delivered."""
    status: SequenceStatus | None = None
    """First status delivered; cache figures of later attempts would count recomputed tokens."""

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def attempt_id(self) -> str:
        return attempt_id_of(self.request.request_id, self.attempt)

    @property
    def worker_id(self) -> str | None:
        """Worker whose tokens count now."""
        if self.place is None:
            return None
        return self.place.decode if self.is_decoding or self.place.prefill is None else self.place.prefill

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """All workers that the attempt still needs: to compute its prompt, lend its KV, or decode."""
        if self.place is None:
            return ()
        if self.place.prefill is None or (self.is_decoding and self.import_id is None):
            return (self.place.decode,)
        return self.place.prefill, self.place.decode


def attempt_id_of(sequence_id: str, attempt: int) -> str:
    """Return a sequence's id at a worker: its own, with the attempt's number from the second attempt on.

    >>> attempt_id_of("a#1.0", 0), attempt_id_of("a#1.0", 2)
    ('a#1.0', 'a#1.0@2')
    """
    return f"{sequence_id}@{attempt}" if attempt else sequence_id


class Dispatcher:
    """The dispatcher of a pool: keeps every sequence running on some worker until it ends."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._members: dict[str, ReadyWorker] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._by_attempt_id: dict[str, _Sequence] = {}
        self._numbers = itertools.count(1)
        self.num_resumed = 0
        """Number of attempts that resumed another."""
        self.num_late_updates = 0
        """Number of updates dropped because they were late."""

    @property
    def num_live(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._sequences)

    def has_delivered(self, sequence_id: str) -> bool:
        """Return whether any update of a sequence was delivered."""
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sequence.status is not None

    def live_on(self, worker_id: str) -> int:
        """Return the number of sequences that need a worker."""
        return sum(worker_id in sequence.worker_ids for sequence in self._sequences.values())

    def add(self, request: GenerationRequest) -> DispatchResult:
        """Add a sequence to run."""
        assert request.request_id not in self._sequences, f"sequence {request.request_id!r} is not new"
        sequence = _Sequence(request, array("i", request.new_request.output_token_ids), cache_salt=request.cache_salt)
        self._sequences[sequence.name] = sequence
        outcome = DispatchResult()
        self._begin(sequence, outcome)
        return outcome

    def finish(self, sequence_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> DispatchResult:
        """End a sequence from outside; unknown ones are ignored."""
        outcome = DispatchResult()
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end_attempt(sequence, outcome, reason, num_output_tokens)
            self._forget(sequence)
        return outcome

    def worker_ready(self, member: ReadyWorker) -> DispatchResult:
        """Add a worker that accepts requests, and resume sequences that wait for one.

        A decode worker also takes over the sequences that prefill workers decode for lack of one; their KV is lent
        as usual.
        """
        self._members[member.worker_id] = member
        outcome = DispatchResult()
        for sequence in [s for s in self._sequences.values() if s.place is None]:
            self._begin(sequence, outcome)
        if member.role is Role.DECODE:
            for sequence in [s for s in self._sequences.values() if self._decodes_on_prefill_worker(s)]:
                place = self._place(sequence)
                if place is None:  # too large for the decode workers: the prefill worker keeps it
                    continue
                self._end_attempt(sequence, outcome, FinishReason.ABORT, None)
                self.num_resumed += 1
                self._begin(sequence, outcome, place)
        return outcome

    def worker_gone(self, worker_id: str, cause: str) -> DispatchResult:
        """Remove a worker that has died or was given up, and resume its sequences elsewhere."""
        self._members.pop(worker_id, None)
        outcome = DispatchResult()
        for sequence in self._sequences_needing(worker_id):
            self._end_attempt(sequence, outcome, FinishReason.ABORT, None, except_worker=worker_id)
            sequence.num_deaths_without_progress += 1
            if sequence.num_deaths_without_progress >= MAX_ATTEMPTS:
                outcome.lost.append((sequence.name, f"{cause}, {MAX_ATTEMPTS} times in a row with this request"))
                self._forget(sequence)
            else:
                self.num_resumed += 1
                self._begin(sequence, outcome)
        return outcome

    def retire(self, worker_id: str) -> None:
        """Give a worker no more sequences; those it has continue."""
        self._members.pop(worker_id, None)

    def migrate(self, worker_id: str) -> DispatchResult:
        """Withdraw a retired worker's remaining sequences, and resume them elsewhere."""
        outcome = DispatchResult()
        for sequence in self._sequences_needing(worker_id):
            self._end_attempt(sequence, outcome, FinishReason.ABORT, None)
            self.num_resumed += 1
            self._begin(sequence, outcome)
        return outcome

    def end_all(self, cause: str) -> DispatchResult:
        """Give up all sequences, because no worker will run them."""
        outcome = DispatchResult()
        for sequence in list(self._sequences.values()):
            outcome.lost.append((sequence.name, cause))
            self._end_attempt(sequence, outcome, FinishReason.ABORT, None)
            self._forget(sequence)
        return outcome

    def process_updates(self, worker_id: str, updates: Iterable[TokenUpdate]) -> DispatchResult:
        """Process the updates of a worker's step; drop late ones."""
        outcome = DispatchResult()
        for update in updates:
            sequence = self._by_attempt_id.get(update.request_id)
            if sequence is None or sequence.worker_id != worker_id or update.start != len(sequence.token_ids):
                self.num_late_updates += 1
                continue
            self._deliver(sequence, update, outcome)
        return outcome

    def _decodes_on_prefill_worker(self, sequence: _Sequence) -> bool:
        """Return whether a prefill worker decodes the sequence, beyond the token that a prefill ends with."""
        worker = None if sequence.place is None else self._members.get(sequence.place.decode)
        num_left = sequence.request.max_tokens - len(sequence.token_ids)
        return worker is not None and worker.role is Role.PREFILL and num_left > 1

    def _sequences_needing(self, worker_id: str) -> list[_Sequence]:
        """Return the sequences that cannot continue without a worker.

        Sequences that already decode on another worker can: it computes KV that does not arrive.
        """
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.worker_id == worker_id or (not sequence.is_decoding and worker_id in sequence.worker_ids)
        ]

    # ------------------------------------------------------------------ one sequence

    def _place(self, sequence: _Sequence) -> Place | None:
        """Return where an attempt from what was delivered runs; None: no worker can take it now."""
        token_ids = (*sequence.request.new_request.prompt_token_ids, *sequence.token_ids)
        return self._placer.place(sequence.request, token_ids, list(self._members.values()), self.live_on)

    def _begin(self, sequence: _Sequence, outcome: DispatchResult, place: Place | None = None) -> None:
        """Start another attempt from what was delivered; the sequence waits if no worker can take it.

        Args:
            sequence: sequence that runs nowhere.
            outcome: receives the orders.
            place: workers to use; None: the placer chooses.
        """
        place = place or self._place(sequence)
        if place is None:
            return
        if place.prefill is not None and sequence.request.max_tokens - len(sequence.token_ids) == 1:
            place = Place(place.prefill, reason=f"{place.prefill} computes the prompt and the only token left")
        sequence.place = place
        drift = self._compare_numerics(sequence)
        if drift:
            outcome.drifted.append((sequence.name, drift))
        told = replace(place, reason=f"{place.reason}; numerics differ: {drift_description(drift)}") if drift else place
        outcome.placed.append((attempt_id_of(sequence.name, sequence.attempt + 1), told))
        sequence.cache_salt = self._cache_salt(sequence)
        sequence.attempt += 1
        sequence.is_decoding = place.prefill is None
        self._by_attempt_id[sequence.attempt_id] = sequence
        request = self._request_of(sequence)
        if place.prefill is None:
            outcome.commands.append(WorkerCommand(place.decode, Add(request)))
            return
        prefill_member, decode_member = self._members[place.prefill], self._members[place.decode]
        lender = prefill_member.lender
        assert lender is not None, f"{place.prefill} lends nothing"
        number = sequence.import_id = next(self._numbers)
        new = request.new_request
        source = KVSource(lender.address, lender.epoch, number, prefill_member.block_size, prefill_member.whole_tokens)
        max_tokens = len(sequence.token_ids) + 1
        here = replace(request, max_tokens=max_tokens, lend_as=number, lend_block_size=decode_member.whole_tokens)
        outcome.commands.append(WorkerCommand(place.prefill, Add(here)))
        fetch = FetchKV(
            number, request.request_id, new.prompt_token_ids + new.output_token_ids, sequence.cache_salt, source
        )
        outcome.commands.append(WorkerCommand(place.decode, fetch))

    def _compare_numerics(self, sequence: _Sequence) -> NumericDrift:
        """Record the numerics of the attempt's workers; return those that differ among all workers of the sequence."""
        for worker_id in sequence.worker_ids:
            numerics = self._members[worker_id].numerics
            sequence.numerics = merged_drift(sequence.numerics, {name: [value] for name, value in numerics.items()})
        return {name: values for name, values in sequence.numerics.items() if len(values) > 1}

    def _cache_salt(self, sequence: _Sequence) -> str | None:
        """Return the cache salt under which the attempt's workers keep its KV.

        A decode worker that imports KV of other numerics must not find it later under the hashes of its own KV.
        """
        place, salt = sequence.place, sequence.request.cache_salt
        if place is None or place.prefill is None:
            return salt
        prefill_member, decode_member = self._members[place.prefill], self._members[place.decode]
        return salt if prefill_member.numerics == decode_member.numerics else drift_salt(salt, prefill_member.numerics)

    def _request_of(self, sequence: _Sequence, import_id: int | None = None) -> GenerationRequest:
        """Return the request as the next worker runs it."""
        request = sequence.request
        params = request.new_request.params
        if sequence.token_ids and params.prompt_logprobs is not None:  # they were delivered before the first token
            params = replace(params, prompt_logprobs=None)
        new = replace(
            request.new_request,
            request_id=sequence.attempt_id,
            params=params,
            output_token_ids=tuple(sequence.token_ids),
        )
        return replace(request, new_request=new, import_id=import_id, cache_salt=sequence.cache_salt)

    def _deliver(self, sequence: _Sequence, update: TokenUpdate, outcome: DispatchResult) -> None:
        if update.token_ids:
            sequence.num_deaths_without_progress = 0
            if sequence.is_decoding:
                sequence.import_id = None
        sequence.token_ids.extend(update.token_ids)
        status, ends = update.status, update.finish_reason is not None
        goes_on = (
            update.finish_reason is FinishReason.LENGTH
            and not sequence.is_decoding
            and len(sequence.token_ids) < sequence.request.max_tokens
        )
        if status is not None:
            status = self._with_new_scores(
                sequence, msgspec.structs.replace(status, finish_reason=None) if goes_on else status
            )
        outcome.updates.append(msgspec.structs.replace(update, request_id=sequence.name, status=status))
        if goes_on:
            assert sequence.place is not None, f"{sequence.name} runs nowhere"
            sequence.is_decoding = True
            outcome.commands.append(
                WorkerCommand(sequence.place.decode, Add(self._request_of(sequence, import_id=sequence.import_id)))
            )
        elif ends:
            if not sequence.is_decoding and sequence.import_id is not None and sequence.place is not None:
                outcome.commands.append(WorkerCommand(sequence.place.decode, DropKV(sequence.import_id)))
            self._forget(sequence)

    @staticmethod
    def _with_new_scores(sequence: _Sequence, status: SequenceStatus) -> SequenceStatus:
        """Remove from a status what was delivered before or was computed again, as if one engine had sent it."""
        if status.prompt_logprobs:
            first = max(status.prompt_logprobs_start, sequence.num_scored + 1)
            scored = status.prompt_logprobs[first - status.prompt_logprobs_start :]
            sequence.num_scored = max(sequence.num_scored, first + len(scored) - 1)
            status = msgspec.structs.replace(status, prompt_logprobs=scored, prompt_logprobs_start=first)
        if sequence.status is None:
            sequence.status = status
            return status
        return msgspec.structs.replace(
            status,
            scheduled_time_s=sequence.status.scheduled_time_s,
            num_cached_tokens=sequence.status.num_cached_tokens,
        )

    def _end_attempt(
        self,
        sequence: _Sequence,
        outcome: DispatchResult,
        reason: FinishReason,
        num_output_tokens: int | None,
        except_worker: str | None = None,
    ) -> None:
        """End an attempt at every worker that knows it, except the dead worker `except_worker`."""
        place = sequence.place
        if place is None:
            return
        name = sequence.attempt_id
        self._by_attempt_id.pop(name, None)
        if place.prefill is not None and not sequence.is_decoding and place.prefill != except_worker:
            outcome.commands.append(WorkerCommand(place.prefill, Finish(name, reason, num_output_tokens)))
        if place.decode != except_worker:
            if sequence.is_decoding:
                outcome.commands.append(WorkerCommand(place.decode, Finish(name, reason, num_output_tokens)))
            elif sequence.import_id is not None:
                outcome.commands.append(WorkerCommand(place.decode, DropKV(sequence.import_id)))
        sequence.place = sequence.import_id = None
        sequence.is_decoding = False

    def _forget(self, sequence: _Sequence) -> None:
        self._by_attempt_id.pop(sequence.attempt_id, None)
        del self._sequences[sequence.name]
