"""Load of an engine, from the requests sent to it and its event log, as frozen facts for admission.

It is kept on the sending side, so that a burst counts before the engine has received it. Its only clock is the
events'. Events and sent requests are stored in order, and counted when the load is read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twostroke.batch import Limit, ScheduledBatch, Stroke
from twostroke.event_codec import LazyEvents, PackedEvent
from twostroke.events import Event, KVBlockChecked, RequestFinishedByCaller, StepCommitted, StepScheduled

STEP_DECAY = 0.95
"""Weight of a step one step later: the figures follow about the last twenty."""
REQUEST_DECAY = 0.95
"""Weight of a finished request one request later."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load as one tenant sees it. Without fairness all requests belong to one tenant."""

    num_slots: int
    """Sequences that can run at once, as far as known: max_num_seqs, or fewer while the KV cache limits them."""
    num_running: int = 0
    num_running_tokens: int = 0
    """Tokens that running sequences still have to prefill."""
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Tokens that waiting sequences have to prefill."""
    num_own_waiting: int = 0
    """Waiting sequences of this tenant."""
    num_own_waiting_tokens: int = 0
    num_tenants: int = 1
    """Number of tenants with waiting sequences, including this one."""
    step_s: float = 0.0
    """Seconds of a step without prefills; 0 while nothing was measured."""
    prefill_s_per_token: float = 0.0
    """Additional seconds of a step per token that it prefills."""
    decode_step_s: float = 0.0
    """Seconds of a step without prefills and without sequences: the intercept of the fitted line. See has_decoded."""
    step_s_per_sequence: float = 0.0
    """Slope of that line; 0 where all steps had as many sequences."""
    num_output_tokens: float = 0.0
    """Average number of output tokens of a request."""
    num_own_generated: int = 0
    """Output tokens of this tenant since the engine was started."""

    @property
    def has_prefilled(self) -> bool:
        """Whether the time per prompt token was measured."""
        return self.prefill_s_per_token > 0

    @property
    def has_decoded(self) -> bool:
        """Whether a step without prefills was measured; the fitted line's intercept may still be 0."""
        return self.decode_step_s > 0 or self.step_s_per_sequence > 0


class StepTimeFit:
    """A fit of the times of the last steps: time of a step = base_s + s_per_unit x units of work.

    Least squares with exponential forgetting (Haykin, Adaptive Filter Theory, chapter 10), for one variable: five sums.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def add(self, num_units: int, time_s: float) -> None:
        """Add a step."""
        keep = STEP_DECAY
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + num_units
        self._xx = keep * self._xx + num_units * num_units
        self._y = keep * self._y + time_s
        self._xy = keep * self._xy + num_units * time_s

    @property
    def slope_s(self) -> float | None:
        """Seconds per unit; None if all steps had as many units."""
        spread = self._weight * self._xx - self._x * self._x
        if spread <= 1e-6 * self._weight * self._xx:
            return None
        return max(0.0, (self._weight * self._xy - self._x * self._y) / spread)

    @property
    def s_per_unit(self) -> float:
        """Seconds per unit; 0 without steps. If unit counts were equal, or more units took no longer, the whole time
        counts."""
        slope_s = self.slope_s
        if slope_s:
            return slope_s
        return self._xy / self._xx if self._xx else 0.0

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a step without work, and seconds per unit; neither is below 0. Both are 0 only without steps.

        If steps take ever longer with each unit, an unconstrained line would start below 0; this one starts at 0.
        """
        slope_s = self.slope_s or 0.0
        base_s = self.base_s(slope_s)
        if base_s > 0 or not self._xx:
            return base_s, slope_s
        return 0.0, self._xy / self._xx

    def base_s(self, s_per_unit: float) -> float:
        """Return the seconds of a step without work, given the slope."""
        return max(0.0, (self._y - s_per_unit * self._x) / self._weight) if self._weight else 0.0


@dataclass(slots=True)
class _Sequence:
    sequence_id: str
    owner: str
    tenant: str
    """Tenant in the queue; empty without fairness."""
    num_tokens: int
    """Tokens to prefill when it starts."""
    num_tokens_left: int
    max_tokens: int
    tier: _TierLoad
    is_waiting: bool = True
    num_output_tokens: int = 0


@dataclass(slots=True)
class _TierLoad:
    """The load of one service tier; the foreground does not wait for the background."""

    num_sequences: int = 0
    num_waiting: Counter[str] = field(default_factory=Counter[str])
    """Waiting sequences by tenant."""
    num_waiting_tokens: Counter[str] = field(default_factory=Counter[str])
    num_running_tokens: int = 0

    @property
    def num_running(self) -> int:
        return self.num_sequences - self.num_waiting.total()

    def wait(self, tenant: str, num_sequences: int, num_tokens: int) -> None:
        """Change the counts of a tenant's waiting sequences and tokens."""
        self.num_waiting[tenant] += num_sequences
        self.num_waiting_tokens[tenant] += num_tokens
        if not self.num_waiting[tenant]:
            del self.num_waiting[tenant], self.num_waiting_tokens[tenant]


class LoadMeter:
    """A meter of an engine's load and speed.

    Args:
        max_num_seqs: of the scheduler.
        is_fair: whether the scheduler shares slots among tenants.
    """

    def __init__(self, max_num_seqs: int, *, is_fair: bool) -> None:
        self._max_num_seqs = max_num_seqs
        self._is_fair = is_fair
        self._unread: LazyEvents[Event | _Sequence | str] = LazyEvents(self._read)
        """Events, sent sequences, and ids of sequences that ended here, not yet counted."""
        self._sequences: dict[str, _Sequence] = {}
        self._foreground = _TierLoad()
        self._background = _TierLoad()
        self._num_slots = max_num_seqs
        self._num_generated: defaultdict[str, int] = defaultdict(int)
        """Output tokens by tenant. A Counter would be slower: it looks up the method that sets an item each time."""
        self._times = StepTimeFit()
        """Step times by the number of tokens prefilled."""
        self._decode_times = StepTimeFit()
        """Step times by the number of sequences, for steps without prefills."""
        self._in_flight: dict[int, tuple[float, int, int]] = {}
        """Time of the decision, tokens to prefill, and number of sequences of each step in progress."""
        self._committed_s = 0.0
        self._idle = True
        """Whether nothing ran at some time since the last commit; such a pause is not part of the next step's time."""
        self._max_tokens = 0
        """Sum over all sequences that have not ended."""
        self._finished_weight = self._finished_tokens = 0.0

    def sent(
        self, sequence_id: str, tenant: str, *, num_tokens: int, max_tokens: int, background: bool = False
    ) -> None:
        """Record that a sequence was sent to the engine and waits there."""
        queue = tenant if self._is_fair else ""
        tier = self._background if background else self._foreground
        self._unread.note(_Sequence(sequence_id, tenant, queue, num_tokens, num_tokens, max_tokens, tier))

    def ended(self, sequence_id: str) -> None:
        """Record that a sequence has ended, for any reason; a second call does nothing."""
        self._unread.note(sequence_id)

    def append(self, event: Event) -> None:
        """Add one of the engine's events, in order."""
        self._unread.note(event)

    def keep(self, events: Iterable[PackedEvent]) -> None:
        """Add the engine's packed events, in order."""
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
        """Return whether a sequence was sent and has not ended."""
        self._unread.catch_up()
        return sequence_id in self._sequences

    def is_waiting(self, sequence_id: str) -> bool:
        """Return whether a sequence has not begun, or was preempted."""
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
                    self._preempted(sequence_id)
            case _:
                pass

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """Return the current load of the foreground, or of the background."""
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
        """Return the average of finished sequences; before the first has finished, the average of their limits."""
        if self._finished_weight:
            return self._finished_tokens / self._finished_weight
        return self._max_tokens / len(self._sequences) if self._sequences else 0.0

    def _scheduled(self, batch: ScheduledBatch, time_s: float) -> None:
        num_prefill_tokens, prefill = 0, Stroke.PREFILL  # looked up once: an enum member costs as much as a call
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
            self._preempted(sequence_id)
        if batch.requests:
            self._in_flight[batch.step] = time_s, num_prefill_tokens, len(batch.requests)
        head = self._sequences.get(batch.head_request_id or "")
        # background work does not limit the foreground, which preempts it
        is_held_by_kv = batch.limited_by is Limit.KV and head is not None and head.tier is self._foreground
        self._num_slots = max(1, self._foreground.num_running) if is_held_by_kv else self._max_num_seqs

    def _begin(self, sequence: _Sequence) -> None:
        if sequence.is_waiting:
            sequence.is_waiting = False
            sequence.tier.wait(sequence.tenant, -1, -sequence.num_tokens)
            sequence.tier.num_running_tokens += sequence.num_tokens_left

    def _preempted(self, sequence_id: str) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and not sequence.is_waiting:
            sequence.tier.num_running_tokens -= sequence.num_tokens_left
            sequence.is_waiting = True
            sequence.num_tokens = sequence.num_tokens_left = sequence.num_tokens + sequence.num_output_tokens
            sequence.tier.wait(sequence.tenant, 1, sequence.num_tokens)

    def _step_ended(self, event: StepCommitted) -> None:
        scheduled_s, num_prefill_tokens, num_sequences = self._in_flight.pop(event.step, (event.time_s, 0, 0))
        # without a pause it began at the end of the step before it, so the time between two steps counts too
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
    """Return the load of several workers as if they were one engine: amounts of work and rates are added.

    Args:
        prefills: loads of the workers that compute prompts; empty if those that decode do so themselves.
        decodes: loads of the workers that decode.
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
