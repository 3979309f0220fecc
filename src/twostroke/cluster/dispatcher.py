"""The journal of a pool: which worker computes what, and what of it was delivered. Pure: facts in, orders out.

```
request ──► prefill worker ──first token──► decode worker ──tokens──► delivered, and written down
                 │ its KV, layer by layer ───────►│
                 └── dies ──┐                     └── dies ──┐
                            ▼                                ▼
               another attempt, from what was delivered: prompt + tokens are its prompt, and the next token is drawn
               with the noise of its own position, so that nobody can tell

no decode worker left ──► a prefill worker computes and decodes, until a decode worker is back
```

What was delivered is the only truth. A worker names the attempt and the place of every token that it sends
(`TokenUpdate.request_id`, `TokenUpdate.start`); what belongs to another attempt, or to another place, comes too late
and is dropped, whoever sent it.
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
from twostroke.engine.handover_port import DropKV, FetchKV
from twostroke.engine.token_update import SequenceNews, TokenUpdate
from twostroke.kv_cache.prefix_cache import salt_of_drift
from twostroke.kv_transfer.transport import KVSource
from twostroke.outputs import NumericDrift, drift_words, merged_drift
from twostroke.pools.member import Role
from twostroke.request import FinishReason

MAX_ATTEMPTS = 4
"""Of a sequence that makes no progress: then it is the request that ends workers, not the other way round."""


class WorkerOrder(msgspec.Struct, frozen=True):
    """A command for a worker."""

    worker_id: str
    command: Command


@dataclass(slots=True)
class Dispatched:
    """What is to be done."""

    orders: list[WorkerOrder] = field(default_factory=list[WorkerOrder])
    updates: list[TokenUpdate] = field(default_factory=list[TokenUpdate])
    """To deliver, under the sequences' own names."""
    lost: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Sequences that are given up, and why."""
    drifted: list[tuple[str, NumericDrift]] = field(default_factory=list[tuple[str, NumericDrift]])
    """Sequences that workers of different numerics run, with the differing settings."""
    placed: list[tuple[str, Place]] = field(default_factory=list[tuple[str, Place]])
    """Attempts, by their names at workers, and where they run."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One line of the journal."""

    request: GenerationRequest
    token_ids: array[int]
    """Delivered, those it came with included; four bytes each."""
    attempt: int = -1
    place: Place | None = None
    """Of the attempt; None while it waits for a worker."""
    import_id: int | None = None
    """Under which its KV is on the way to the decode worker; None from that worker's first token on."""
    is_decoding: bool = False
    """The decode worker has been told to run it."""
    num_fruitless: int = 0
    """Deaths since something was delivered last: of attempts in a row that delivered nothing more."""
    numerics: NumericDrift = field(default_factory=dict[str, list[str]])
    """Numerics of all workers that have run the sequence: by name, the values in order of first use."""
    cache_salt: str | None = None
    """Cache salt of the attempt; differs from the request's where KV of other numerics is imported."""
    num_scored: int = 0
    """Prompt positions whose log-probabilities are delivered."""
    news: SequenceNews | None = None
    """The first that was said of it: what later attempts say of the cache is about their own doings."""

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def name_there(self) -> str:
        return attempt_name(self.request.request_id, self.attempt)

    @property
    def worker_id(self) -> str | None:
        """Whose tokens count now."""
        if self.place is None:
            return None
        return self.place.decode if self.is_decoding or self.place.prefill is None else self.place.prefill

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """All that the attempt still needs: who computes its prompt, or lends its KV, and who decodes."""
        if self.place is None:
            return ()
        if self.place.prefill is None or (self.is_decoding and self.import_id is None):
            return (self.place.decode,)
        return self.place.prefill, self.place.decode


def attempt_name(sequence_id: str, attempt: int) -> str:
    """What a sequence is called at a worker: its own name, and from the second attempt on which one it is.

    >>> attempt_name("a#1.0", 0), attempt_name("a#1.0", 2)
    ('a#1.0', 'a#1.0@2')
    """
    return f"{sequence_id}@{attempt}" if attempt else sequence_id


class Dispatcher:
    """Keeps every sequence running somewhere until it ends."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._members: dict[str, ReadyWorker] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._by_name_there: dict[str, _Sequence] = {}
        self._numbers = itertools.count(1)
        self.num_resumed = 0
        """Attempts that took over from another."""
        self.num_fenced = 0
        """Updates that came too late."""

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def has_delivered(self, sequence_id: str) -> bool:
        """Whether anything of a sequence was."""
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sequence.news is not None

    def live_on(self, worker_id: str) -> int:
        """Sequences that need a worker."""
        return sum(worker_id in sequence.worker_ids for sequence in self._sequences.values())

    def add(self, request: GenerationRequest) -> Dispatched:
        """A sequence to run."""
        assert request.request_id not in self._sequences, f"sequence {request.request_id!r} is not new"
        sequence = _Sequence(request, array("i", request.new_request.output_token_ids), cache_salt=request.cache_salt)
        self._sequences[sequence.name] = sequence
        outcome = Dispatched()
        self._begin(sequence, outcome)
        return outcome

    def finish(self, sequence_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> Dispatched:
        """A sequence ends from outside; unknown ones are ignored."""
        outcome = Dispatched()
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._withdraw(sequence, outcome, reason, num_output_tokens)
            self._forget(sequence)
        return outcome

    def worker_ready(self, member: ReadyWorker) -> Dispatched:
        """Note that a worker takes requests, and resume sequences that wait for one.

        A decode worker also takes over the sequences that prefill workers decoded for lack of one; their KV is lent as
        always.
        """
        self._members[member.worker_id] = member
        outcome = Dispatched()
        for sequence in [s for s in self._sequences.values() if s.place is None]:
            self._begin(sequence, outcome)
        if member.role is Role.DECODE:
            for sequence in [s for s in self._sequences.values() if self._is_on_a_stand_in(s)]:
                place = self._place(sequence)
                if place is None:  # it is too large for whoever has come: the stand-in goes on with it
                    continue
                self._withdraw(sequence, outcome, FinishReason.ABORT, None)
                self.num_resumed += 1
                self._begin(sequence, outcome, place)
        return outcome

    def worker_gone(self, worker_id: str, cause: str) -> Dispatched:
        """A worker is dead, or given up: what it had to do is done elsewhere."""
        self._members.pop(worker_id, None)
        outcome = Dispatched()
        for sequence in self._held_up_without(worker_id):
            self._withdraw(sequence, outcome, FinishReason.ABORT, None, but=worker_id)
            sequence.num_fruitless += 1
            if sequence.num_fruitless >= MAX_ATTEMPTS:
                outcome.lost.append((sequence.name, f"{cause}, {MAX_ATTEMPTS} times in a row with this request"))
                self._forget(sequence)
            else:
                self.num_resumed += 1
                self._begin(sequence, outcome)
        return outcome

    def retire(self, worker_id: str) -> None:
        """A worker takes no more sequences; those it has go on."""
        self._members.pop(worker_id, None)

    def migrate(self, worker_id: str) -> Dispatched:
        """What a retired worker still has to do goes on elsewhere, and it is told so."""
        outcome = Dispatched()
        for sequence in self._held_up_without(worker_id):
            self._withdraw(sequence, outcome, FinishReason.ABORT, None)
            self.num_resumed += 1
            self._begin(sequence, outcome)
        return outcome

    def give_up(self, cause: str) -> Dispatched:
        """Nobody will ever run them."""
        outcome = Dispatched()
        for sequence in list(self._sequences.values()):
            outcome.lost.append((sequence.name, cause))
            self._withdraw(sequence, outcome, FinishReason.ABORT, None)
            self._forget(sequence)
        return outcome

    def take_in(self, worker_id: str, updates: Iterable[TokenUpdate]) -> Dispatched:
        """What a step of a worker made."""
        outcome = Dispatched()
        for update in updates:
            sequence = self._by_name_there.get(update.request_id)
            if sequence is None or sequence.worker_id != worker_id or update.start != len(sequence.token_ids):
                self.num_fenced += 1
                continue
            self._deliver(sequence, update, outcome)
        return outcome

    def _is_on_a_stand_in(self, sequence: _Sequence) -> bool:
        """Return whether a prefill worker decodes it, and more than the token that a prefill ends with."""
        worker = None if sequence.place is None else self._members.get(sequence.place.decode)
        num_left = sequence.request.max_tokens - len(sequence.token_ids)
        return worker is not None and worker.role is Role.PREFILL and num_left > 1

    def _held_up_without(self, worker_id: str) -> list[_Sequence]:
        """Those that decode elsewhere are not: KV that does not come is computed there."""
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.worker_id == worker_id or (not sequence.is_decoding and worker_id in sequence.worker_ids)
        ]

    # ------------------------------------------------------------------ one sequence

    def _place(self, sequence: _Sequence) -> Place | None:
        """Return where an attempt from what was delivered runs; None: nowhere now."""
        token_ids = (*sequence.request.new_request.prompt_token_ids, *sequence.token_ids)
        return self._placer.place(sequence.request, token_ids, list(self._members.values()), self.live_on)

    def _begin(self, sequence: _Sequence, outcome: Dispatched, place: Place | None = None) -> None:
        """Begin another attempt, from what was delivered; it waits if nobody is there.

        Args:
            sequence: that runs nowhere.
            outcome: takes the orders.
            place: where it runs; None: wherever the placer puts it now.
        """
        place = place or self._place(sequence)
        if place is None:
            return
        if place.prefill is not None and sequence.request.max_tokens - len(sequence.token_ids) == 1:
            place = Place(place.prefill, reason=f"{place.prefill} computes the prompt, and its first token is its last")
        sequence.place = place
        drift = self._compare_numerics(sequence)
        if drift:
            outcome.drifted.append((sequence.name, drift))
        told = replace(place, reason=f"{place.reason}; numerics differ: {drift_words(drift)}") if drift else place
        outcome.placed.append((attempt_name(sequence.name, sequence.attempt + 1), told))
        sequence.cache_salt = self._cache_salt(sequence)
        sequence.attempt += 1
        sequence.is_decoding = place.prefill is None
        self._by_name_there[sequence.name_there] = sequence
        request = self._request_of(sequence)
        if place.prefill is None:
            outcome.orders.append(WorkerOrder(place.decode, Add(request)))
            return
        giver, taker = self._members[place.prefill], self._members[place.decode]
        lender = giver.lender
        assert lender is not None, f"{place.prefill} lends nothing"
        number = sequence.import_id = next(self._numbers)
        new = request.new_request
        source = KVSource(lender.address, lender.epoch, number, giver.block_size, giver.whole_tokens)
        max_tokens = len(sequence.token_ids) + 1
        here = replace(request, max_tokens=max_tokens, lend_as=number, lend_block_size=taker.whole_tokens)
        outcome.orders.append(WorkerOrder(place.prefill, Add(here)))
        fetch = FetchKV(
            number, request.request_id, new.prompt_token_ids + new.output_token_ids, sequence.cache_salt, source
        )
        outcome.orders.append(WorkerOrder(place.decode, fetch))

    def _compare_numerics(self, sequence: _Sequence) -> NumericDrift:
        """Note the numerics of the attempt's workers, and return where all that have run the sequence differ."""
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
        giver, taker = self._members[place.prefill], self._members[place.decode]
        return salt if giver.numerics == taker.numerics else salt_of_drift(salt, giver.numerics)

    def _request_of(self, sequence: _Sequence, import_id: int | None = None) -> GenerationRequest:
        """As the next worker is to run it."""
        request = sequence.request
        params = request.new_request.params
        if sequence.token_ids and params.prompt_logprobs is not None:  # all of them came before the first token
            params = replace(params, prompt_logprobs=None)
        new = replace(
            request.new_request,
            request_id=sequence.name_there,
            params=params,
            output_token_ids=tuple(sequence.token_ids),
        )
        return replace(request, new_request=new, import_id=import_id, cache_salt=sequence.cache_salt)

    def _deliver(self, sequence: _Sequence, update: TokenUpdate, outcome: Dispatched) -> None:
        if update.token_ids:
            sequence.num_fruitless = 0
            if sequence.is_decoding:
                sequence.import_id = None
        sequence.token_ids.extend(update.token_ids)
        news, ends = update.news, update.finish_reason is not None
        goes_on = (
            update.finish_reason is FinishReason.LENGTH
            and not sequence.is_decoding
            and len(sequence.token_ids) < sequence.request.max_tokens
        )
        if news is not None:
            news = self._news(sequence, msgspec.structs.replace(news, finish_reason=None) if goes_on else news)
        outcome.updates.append(msgspec.structs.replace(update, request_id=sequence.name, news=news))
        if goes_on:
            assert sequence.place is not None, f"{sequence.name} runs nowhere"
            sequence.is_decoding = True
            outcome.orders.append(
                WorkerOrder(sequence.place.decode, Add(self._request_of(sequence, import_id=sequence.import_id)))
            )
        elif ends:
            if not sequence.is_decoding and sequence.import_id is not None and sequence.place is not None:
                outcome.orders.append(WorkerOrder(sequence.place.decode, DropKV(sequence.import_id)))
            self._forget(sequence)

    @staticmethod
    def _news(sequence: _Sequence, news: SequenceNews) -> SequenceNews:
        """As one engine would have told it: nothing twice, and nothing of what was computed again."""
        if news.prompt_logprobs:
            first = max(news.prompt_logprobs_start, sequence.num_scored + 1)
            scored = news.prompt_logprobs[first - news.prompt_logprobs_start :]
            sequence.num_scored = max(sequence.num_scored, first + len(scored) - 1)
            news = msgspec.structs.replace(news, prompt_logprobs=scored, prompt_logprobs_start=first)
        if sequence.news is None:
            sequence.news = news
            return news
        return msgspec.structs.replace(
            news,
            scheduled_time_s=sequence.news.scheduled_time_s,
            num_cached_tokens=sequence.news.num_cached_tokens,
        )

    def _withdraw(
        self,
        sequence: _Sequence,
        outcome: Dispatched,
        reason: FinishReason,
        num_output_tokens: int | None,
        but: str | None = None,
    ) -> None:
        """Ends an attempt at every worker that has heard of it; all but one that cannot hear any more."""
        place = sequence.place
        if place is None:
            return
        name = sequence.name_there
        self._by_name_there.pop(name, None)
        if place.prefill is not None and not sequence.is_decoding and place.prefill != but:
            outcome.orders.append(WorkerOrder(place.prefill, Finish(name, reason, num_output_tokens)))
        if place.decode != but:
            if sequence.is_decoding:
                outcome.orders.append(WorkerOrder(place.decode, Finish(name, reason, num_output_tokens)))
            elif sequence.import_id is not None:
                outcome.orders.append(WorkerOrder(place.decode, DropKV(sequence.import_id)))
        sequence.place = sequence.import_id = None
        sequence.is_decoding = False

    def _forget(self, sequence: _Sequence) -> None:
        self._by_name_there.pop(sequence.name_there, None)
        del self._sequences[sequence.name]
