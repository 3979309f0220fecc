"""How busy the engine is: what was sent to it and what its event log says, as frozen facts for who admits requests.

Kept on the side that sends, so that a burst is seen before the engine has heard of it. The only clock is the events'.
Events and what was sent are kept in their order, and counted when somebody asks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twostroke.batch import Limit, ScheduledBatch, Stroke
from twostroke.event_codec import PackedEvent, Unread
from twostroke.events import Event, KVBlockChecked, RequestFinishedByCaller, StepCommitted, StepScheduled

STEP_DECAY = 0.95
"""What a step weighs one step later: the figures follow about the last twenty."""
REQUEST_DECAY = 0.95
"""What a finished request weighs one request later."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What there is to do, as one tenant who asks sees it. Without fairness everybody is the same tenant."""

    num_slots: int
    """Sequences that can run at once, as far as one can tell: max_num_seqs, fewer while the KV cache holds more off."""
    num_running: int = 0
    num_running_tokens: int = 0
    """Tokens that the running ones have yet to prefill."""
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Tokens that the waiting ones have to prefill."""
    num_own_waiting: int = 0
    """Of num_waiting, the tenant's."""
    num_own_waiting_tokens: int = 0
    num_tenants: int = 1
    """Who have somebody waiting, the tenant who asks included."""
    step_s: float = 0.0
    """Of a step without prefills; 0 while nothing was measured."""
    prefill_s_per_token: float = 0.0
    """What a step takes longer for each token that it prefills."""
    decode_step_s: float = 0.0
    """Seconds of a step without prefills and without sequences: the intercept of the fitted line. See has_decoded."""
    step_s_per_sequence: float = 0.0
    """Its slope; 0 where all had as many sequences."""
    num_output_tokens: float = 0.0
    """What a request generates, on average."""
    num_own_generated: int = 0
    """Output tokens that the tenant has got since the engine was started."""

    @property
    def has_prefilled(self) -> bool:
        """Whether the time per prompt token was measured."""
        return self.prefill_s_per_token > 0

    @property
    def has_decoded(self) -> bool:
        """Whether a step without prefills was measured; the fitted line's intercept may still be 0."""
        return self.decode_step_s > 0 or self.step_s_per_sequence > 0


class StepTimeFit:
    """time of a step = base_s + s_per_unit x units of work, fitted to the last steps.

    Least squares with exponential forgetting (Haykin, Adaptive Filter Theory, chapter 10), for one variable: five sums.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def add(self, num_units: int, time_s: float) -> None:
        """Takes in a step."""
        keep = STEP_DECAY
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + num_units
        self._xx = keep * self._xx + num_units * num_units
        self._y = keep * self._y + time_s
        self._xy = keep * self._xy + num_units * time_s

    @property
    def slope_s(self) -> float | None:
        """Seconds a unit; None where all steps had as many."""
        spread = self._weight * self._xx - self._x * self._x
        if spread <= 1e-6 * self._weight * self._xx:
            return None
        return max(0.0, (self._weight * self._xy - self._x * self._y) / spread)

    @property
    def s_per_unit(self) -> float:
        """Seconds per unit, 0 without steps; the whole time if unit counts were equal, or if more units took no
        longer."""
        slope_s = self.slope_s
        if slope_s:
            return slope_s
        return self._xy / self._xx if self._xx else 0.0

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a step without work, and seconds per unit; neither is below 0. Both are 0 only without steps.

        Where steps take ever longer with each unit, an unconstrained line would start below 0; this one starts at 0.
        """
        slope_s = self.slope_s or 0.0
        base_s = self.base_s(slope_s)
        if base_s > 0 or not self._xx:
            return base_s, slope_s
        return 0.0, self._xy / self._xx

    def base_s(self, s_per_unit: float) -> float:
        """Of a step without work, with a slope from above."""
        return max(0.0, (self._y - s_per_unit * self._x) / self._weight) if self._weight else 0.0


@dataclass(slots=True)
class _Sequence:
    sequence_id: str
    owner: str
    tenant: str
    """As the queue sees the owner."""
    num_tokens: int
    """To prefill when it starts."""
    num_tokens_left: int
    max_tokens: int
    tier: _Tier
    is_waiting: bool = True
    num_output_tokens: int = 0


@dataclass(slots=True)
class _Tier:
    """What there is to do of one kind: the foreground's does not wait for the background's."""

    num_sequences: int = 0
    num_waiting: Counter[str] = field(default_factory=Counter[str])
    """By tenant."""
    num_waiting_tokens: Counter[str] = field(default_factory=Counter[str])
    num_running_tokens: int = 0

    @property
    def num_running(self) -> int:
        return self.num_sequences - self.num_waiting.total()

    def wait(self, tenant: str, num_sequences: int, num_tokens: int) -> None:
        """So many more of a tenant's wait."""
        self.num_waiting[tenant] += num_sequences
        self.num_waiting_tokens[tenant] += num_tokens
        if not self.num_waiting[tenant]:
            del self.num_waiting[tenant], self.num_waiting_tokens[tenant]


class LoadMeter:
    """Counts what is on its way and measures how fast it goes.

    Args:
        max_num_seqs: of the scheduler.
        is_fair: whether the scheduler tells tenants apart.
    """

    def __init__(self, max_num_seqs: int, *, is_fair: bool) -> None:
        self._max_num_seqs = max_num_seqs
        self._is_fair = is_fair
        self._unread: Unread[Event | _Sequence | str] = Unread(self._read)
        """Events, sequences that were sent, and ids of those that ended here."""
        self._sequences: dict[str, _Sequence] = {}
        self._foreground = _Tier()
        self._background = _Tier()
        self._num_slots = max_num_seqs
        self._num_generated: defaultdict[str, int] = defaultdict(int)
        """By tenant. No Counter, whose items are set by a method that is looked up each time."""
        self._times = StepTimeFit()
        """By tokens prefilled."""
        self._decode_times = StepTimeFit()
        """By sequences, of steps that prefill nothing."""
        self._in_flight: dict[int, tuple[float, int, int]] = {}
        """When a step was decided, the tokens it prefills, and its sequences."""
        self._committed_s = 0.0
        self._idle = True
        """Whether at some time since the last step was committed nothing ran: a pause is no part of a step."""
        self._max_tokens = 0
        """Of all sequences that have not ended, together."""
        self._finished_weight = self._finished_tokens = 0.0

    def sent(
        self, sequence_id: str, tenant: str, *, num_tokens: int, max_tokens: int, background: bool = False
    ) -> None:
        """A sequence was sent to the engine and waits there."""
        queue = tenant if self._is_fair else ""
        tier = self._background if background else self._foreground
        self._unread.note(_Sequence(sequence_id, tenant, queue, num_tokens, num_tokens, max_tokens, tier))

    def ended(self, sequence_id: str) -> None:
        """It is over, however it ended; a second time does nothing."""
        self._unread.note(sequence_id)

    def append(self, event: Event) -> None:
        """One of the engine's events, in order."""
        self._unread.note(event)

    def keep(self, events: Iterable[PackedEvent]) -> None:
        """Take in the engine's events as they came, in order."""
        for event in events:
            self._unread.append(event)

    def _sent(self, sequence: _Sequence) -> None:
        self._sequences[sequence.sequence_id] = sequence
        self._max_tokens += sequence.max_tokens
        sequence.tier.num_sequences += 1
        sequence.tier.wait(sequence.tenant, 1, sequence.num_tokens)

    def _ended(self, sequence_id: str) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self._max_tokens -= sequence.max_tokens
        sequence.tier.num_sequences -= 1
        if sequence.is_waiting:
            sequence.tier.wait(sequence.tenant, -1, -sequence.num_tokens)
        else:
            sequence.tier.num_running_tokens -= sequence.num_tokens_left
        self._idle = self._idle or not self._num_running

    @property
    def num_sequences(self) -> int:
        """Number of sequences, of both tiers, that were sent and have not ended."""
        self._unread.catch_up()
        return len(self._sequences)

    def knows(self, sequence_id: str) -> bool:
        """Whether it was sent and has not ended."""
        self._unread.catch_up()
        return sequence_id in self._sequences

    def is_waiting(self, sequence_id: str) -> bool:
        """Whether it has not begun, or was preempted."""
        self._unread.catch_up()
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sequence.is_waiting

    def _read(self, event: Event | _Sequence | str) -> None:
        match event:
            case _Sequence():
                self._sent(event)
            case str():
                self._ended(event)
            case StepScheduled():
                self._scheduled(event.batch, event.time_s)
            case StepCommitted():
                self._step_ended(event)
            case RequestFinishedByCaller():
                self._ended(event.request_id)
            case KVBlockChecked():
                for sequence_id in event.suspects.ended:
                    self._ended(sequence_id)
                for sequence_id in event.suspects.started_over:
                    self._give_way(sequence_id)
            case _:
                pass

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """The facts as they are now, of the foreground, or of the background alone."""
        self._unread.catch_up()
        owner, tenant = tenant, tenant if self._is_fair else ""
        tier = self._background if background else self._foreground
        prefill_s, (decode_step_s, decode_s) = self._times.s_per_unit, self._decode_times.line
        return EngineLoad(
            num_slots=self._num_slots,
            num_running=tier.num_running,
            num_running_tokens=tier.num_running_tokens,
            num_waiting=tier.num_waiting.total(),
            num_waiting_tokens=tier.num_waiting_tokens.total(),
            num_own_waiting=tier.num_waiting[tenant],
            num_own_waiting_tokens=tier.num_waiting_tokens[tenant],
            num_tenants=len(tier.num_waiting) + (tenant not in tier.num_waiting),
            step_s=self._times.base_s(prefill_s),
            prefill_s_per_token=prefill_s,
            decode_step_s=decode_step_s,
            step_s_per_sequence=decode_s,
            num_output_tokens=self._mean_output_tokens(),
            num_own_generated=self._num_generated.get(owner, 0),
        )

    @property
    def _num_running(self) -> int:
        return self._foreground.num_running + self._background.num_running

    def _mean_output_tokens(self) -> float:
        """Of those that finished; before any has, what is asked for at most."""
        if self._finished_weight:
            return self._finished_tokens / self._finished_weight
        return self._max_tokens / len(self._sequences) if self._sequences else 0.0

    def _scheduled(self, batch: ScheduledBatch, time_s: float) -> None:
        num_prefill_tokens, prefill = 0, Stroke.PREFILL  # looked up once: an enum's member takes as long as a call
        for scheduled in batch.requests:
            if scheduled.stroke is not prefill:
                continue
            num_prefill_tokens += scheduled.num_scheduled_tokens
            sequence = self._sequences.get(scheduled.request_id)
            if sequence is not None:
                self._begin(sequence)
                num_left = sequence.num_tokens - scheduled.token_range.stop
                sequence.tier.num_running_tokens += num_left - sequence.num_tokens_left
                sequence.num_tokens_left = num_left
        for sequence_id in batch.preempted_request_ids:
            self._give_way(sequence_id)
        if batch.requests:
            self._in_flight[batch.step] = time_s, num_prefill_tokens, len(batch.requests)
        head = self._sequences.get(batch.head_request_id or "")
        # the foreground takes from the background what it lacks
        is_held_by_kv = batch.limited_by is Limit.KV and head is not None and head.tier is self._foreground
        self._num_slots = max(1, self._foreground.num_running) if is_held_by_kv else self._max_num_seqs

    def _begin(self, sequence: _Sequence) -> None:
        if sequence.is_waiting:
            sequence.is_waiting = False
            sequence.tier.wait(sequence.tenant, -1, -sequence.num_tokens)
            sequence.tier.num_running_tokens += sequence.num_tokens_left

    def _give_way(self, sequence_id: str) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and not sequence.is_waiting:
            sequence.tier.num_running_tokens -= sequence.num_tokens_left
            sequence.is_waiting = True
            sequence.num_tokens = sequence.num_tokens_left = sequence.num_tokens + sequence.num_output_tokens
            sequence.tier.wait(sequence.tenant, 1, sequence.num_tokens)

    def _step_ended(self, event: StepCommitted) -> None:
        scheduled_s, num_prefill_tokens, num_sequences = self._in_flight.pop(event.step, (event.time_s, 0, 0))
        # without a pause it began when the one before it had ended: what the engine does between two steps counts, too
        took_s = event.time_s - (scheduled_s if self._idle else self._committed_s)
        self._times.add(num_prefill_tokens, took_s)
        if not num_prefill_tokens:
            self._decode_times.add(num_sequences, took_s)
        sequences, generated = self._sequences, self._num_generated
        for commit in event.commits:
            sequence = sequences.get(commit.request_id)
            if sequence is not None:
                sequence.num_output_tokens += commit.num_tokens
                generated[sequence.owner] += commit.num_tokens
                if commit.finish_reason is not None:
                    self._finished(sequence, commit.request_id)
        self._committed_s = event.time_s
        self._idle = not self._num_running

    def _finished(self, sequence: _Sequence, sequence_id: str) -> None:
        self._finished_weight = REQUEST_DECAY * self._finished_weight + 1.0
        self._finished_tokens = REQUEST_DECAY * self._finished_tokens + sequence.num_output_tokens
        self._ended(sequence_id)


def combined(prefills: Sequence[EngineLoad], decodes: Sequence[EngineLoad]) -> EngineLoad:
    """Of pools as if they were one engine: work is added up, and who shares it does it so much faster.

    Args:
        prefills: of the workers that compute prompts; empty where those that decode do so themselves.
        decodes: of the workers that decode.
    """
    loads = [*prefills, *decodes]
    readers = prefills or decodes
    steps = [load.step_s for load in decodes if load.step_s] or [0.0]
    lines = [load for load in decodes if load.has_decoded] or [EngineLoad(0)]
    rates = [1 / load.prefill_s_per_token for load in readers if load.prefill_s_per_token]
    outputs = [load.num_output_tokens for load in decodes if load.num_output_tokens] or [0.0]
    return EngineLoad(
        num_slots=max(1, sum(load.num_slots for load in decodes)),
        num_running=sum(load.num_running for load in decodes),
        num_running_tokens=sum(load.num_running_tokens for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_waiting_tokens=sum(load.num_waiting_tokens for load in loads),
        num_own_waiting=sum(load.num_own_waiting for load in loads),
        num_own_waiting_tokens=sum(load.num_own_waiting_tokens for load in loads),
        num_tenants=max((load.num_tenants for load in loads), default=1),
        step_s=sum(steps) / len(steps),
        prefill_s_per_token=1 / sum(rates) if rates else 0.0,
        decode_step_s=sum(load.decode_step_s for load in lines) / len(lines),
        step_s_per_sequence=sum(load.step_s_per_sequence for load in lines) / len(lines),
        num_output_tokens=sum(outputs) / len(outputs),
        num_own_generated=sum(load.num_own_generated for load in decodes),
    )
