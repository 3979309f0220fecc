"""Timeline of one sequence, built from the engine's events in order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from twostroke.batch import AdmittedRequest, Commit, DraftReason, Stroke
from twostroke.events import (
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain import causes
from twostroke.explain.causes import (
    Cause,
    KVTransferPath,
    handover_causes,
    pending_transfer_cause,
    resume_cause,
    transfer_cause,
)
from twostroke.explain.merging import NO_WORK, Span, Work, drafts_of, merged
from twostroke.explain.names import sequence_of
from twostroke.explain.run_state import PlaceState
from twostroke.explain.segments import Label, Lane
from twostroke.explain.step import DecidedStep
from twostroke.outputs import DraftTally
from twostroke.plain_words import counted
from twostroke.request import FinishReason, RequestStatus


class LaneBuilder:
    """Builder of the lane of one sequence, from where the history begins to know it.

    Time is cut at results. The time between two results of steps that the sequence took part in belongs to the
    second of those steps, including the engine's own time before it. While the sequence is in the queue, time is cut
    at decisions, because each decision has a new reason for its wait.

        arrival   handed over   taken in   decision   decision = admission     result        result
           | prepare  |  wait: step  | wait: … |   wait: …     |   prefill 1 of 2  | prefill 2 of 2 | decode …

    A sequence may leave a process and go on in another. It is between them from its last cut in the first until its
    arrival in the second; all counts continue.

        last result        arrival at the other
        … prefill | transfer  |  wait: step  | decode …

    Args:
        name: name of the sequence at its current process.
        begin_s: its arrival, or the time at which the history begins to know it.
        process: its current process.
        place: place of that process.
        has_arrival: whether the history knows its arrival.
    """

    def __init__(self, name: str, begin_s: float, process: str, place: PlaceState, *, has_arrival: bool) -> None:
        self.sequence_id = sequence_of(name)
        self.process = process
        """Current process, or the last one."""
        self.place = place
        self.lend_as: int | None = None
        """Number under which its blocks go to another process when its prompt is computed."""
        self.is_in_transit = False
        """Whether the sequence is between two processes."""
        self.told: RequestFinishedByCaller | None = None
        """Abort or stop from outside, until the process that runs the sequence confirms it."""
        self._end_requested = False
        """Whether the last process was told to end the sequence, and no other has taken it in since."""
        self.current_name = name
        self._begin_s = self._cursor_s = begin_s
        self._has_arrival = has_arrival
        self._status = RequestStatus.WAITING if has_arrival else RequestStatus.RUNNING
        self._cause = Cause(Label.WAIT_STEP, "for the next step to be decided")
        """Cause of its wait, while it waits."""
        self._in_flight: deque[DecidedStep] = deque()
        """Steps in flight that compute tokens of this sequence."""
        self._spans: list[Span] = []
        self._admitted: AdmittedRequest | None = None
        self._admitted_in_step = -1
        self._num_admissions = 0
        self._num_computed_most = 0
        self._token_times_s: list[float] = []
        self._passes: list[tuple[int, int]] = []
        """Tokens and drafts of each pass that gave tokens."""
        self._finish_reason: FinishReason | None = None
        self._num_prompt_tokens: int | None = None
        self._num_cached_tokens: int | None = None
        self._num_preemptions = 0
        self._notes: list[str] = [] if has_arrival else ["the history begins after its arrival"]

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self._finish_reason is not None

    # ------------------------------------------------------------------ events

    def arrived(self, event: RequestArrived, place: PlaceState) -> None:
        """Record that the sequence is in the queue."""
        self.lend_as = event.arrival.lend_as
        handed_over_s = event.submitted_time_s
        self._num_prompt_tokens = event.arrival.num_prompt_tokens
        self._spend(causes.preparation_cause(knows_handover=handed_over_s is not None), handed_over_s or event.time_s)
        self._cause = causes.arrival_wait_cause(self.current_name, self._cursor_s, place)
        self._spend(self._cause, event.time_s)

    def goes_on(self, event: RequestArrived, place: PlaceState, way: KVTransferPath | None, loss: str) -> None:
        """Record that the sequence is in the queue of another process.

        Args:
            event: its arrival there.
            place: place of that process.
            way: path of its KV to there.
            loss: reason of the latest loss of a process, used if no other reason is known.
        """
        is_next_attempt = event.request_id != self.current_name
        if is_next_attempt and (not self.is_in_transit or self._cause.label is Label.TRANSFER):
            self.left(self._cursor_s, resume_cause(loss))
        source, self.process, self.place = self.process, event.process, place
        cause = causes.arrival_wait_cause(event.request_id, event.time_s, place)
        if self._cause.label is Label.TRANSFER:
            last = self._handed_over(source, event, place, way)
            cause = last if last.label is cause.label else cause  # it keeps waiting for the same cause
        else:
            self._spend(self._cause, event.time_s, process="")
        self._drop_undelivered_tokens(event.arrival.num_prompt_tokens)
        self.lend_as = event.arrival.lend_as
        self.is_in_transit = self._end_requested = False
        self.current_name = event.request_id
        self._admitted_in_step = -1
        self._cause = cause

    def routed(self, reason: str) -> None:
        """Record the reason for which the gateway chose its workers; empty: not known."""
        if reason:
            self._notes.append(f"routed: {reason}")

    def left(self, time_s: float, cause: Cause, *, is_withdrawn: bool = False) -> None:
        """Record that the sequence left its process and is to go on in another."""
        is_in_prefill = self._in_flight and self._in_flight[0].shares[self.current_name].stroke is Stroke.PREFILL
        if self._status is RequestStatus.RUNNING and not is_in_prefill:  # no event since the last cut
            self._in_flight.clear()
            self._status, self._cause, self.is_in_transit = RequestStatus.WAITING, cause, True
        self._close(time_s, "broken off")
        self.is_in_transit, self._end_requested = True, is_withdrawn
        self._status, self._cause = RequestStatus.WAITING, cause
        self._in_flight.clear()

    def scheduled(self, event: StepScheduled, place: PlaceState) -> None:
        """Record the decision of a step, with or without tokens of this sequence."""
        batch = event.batch
        for preemption in batch.preemptions:
            if preemption.request_id == self.current_name:
                self._status = RequestStatus.PREEMPTED
                self._num_preemptions += 1
                self._cause = causes.preemption_cause(preemption)
        step = place.in_flight[-1] if place.in_flight and not batch.is_empty else None
        takes_part = step is not None and self.current_name in step.shares
        if self._status is not RequestStatus.RUNNING:
            if not self._in_flight:  # otherwise its time until that step's result belongs to the step
                self._spend(self._cause, event.time_s)
            if takes_part:
                self._admit(event)
            elif self._status is RequestStatus.WAITING:
                self._cause = causes.queue_cause(self.current_name, batch, place)
        if takes_part and step is not None:
            self._in_flight.append(step)

    def committed(self, event: StepCommitted, step: DecidedStep | None, commit: Commit | None) -> None:
        """Record the result of a step; None: the step was decided before the history begins."""
        if step is None:
            if commit is not None and commit.finish_reason is not None:
                self._close(event.time_s, "in a step that was decided before the history begins")
        elif self._in_flight and self._in_flight[0] is step:
            self._in_flight.popleft()
            self._work(step, event.time_s, commit)
        elif self._status is RequestStatus.RUNNING:
            if step.batch.step < self._admitted_in_step:
                self._spend(causes.step_wait_cause(step, self.current_name), event.time_s)
            else:
                has_output = bool(self._token_times_s)
                self._spend(causes.skipped_step_cause(self.current_name, has_output, step), event.time_s)
        if commit is not None:
            self._token_times_s.extend([event.time_s] * commit.num_tokens)
            if commit.num_tokens:
                self._passes.append((commit.num_tokens, commit.num_draft_tokens))
            if commit.finish_reason is FinishReason.LENGTH and self.lend_as is not None:
                self.left(event.time_s, pending_transfer_cause(self.process))
            else:
                self._finish_reason = commit.finish_reason

    def finished_by_caller(self, event: RequestFinishedByCaller) -> None:
        """Record an abort, or a stop string found in the text."""
        num_tokens = len(self._token_times_s)
        self._finish_reason = event.reason
        is_enough = self.is_in_transit and event.reason is FinishReason.LENGTH
        if (is_enough or event.reason is FinishReason.STOP) and num_tokens:
            num_counted = num_tokens if event.num_output_tokens is None else event.num_output_tokens
            num_counted = max(1, min(num_tokens, num_counted))
            if num_counted < num_tokens:
                dropped = counted(num_tokens - num_counted, "token")
                self._notes.append(f"{dropped} after the stop string not counted")
            del self._token_times_s[num_counted:]
            self._cut(self._token_times_s[-1])
        else:
            self._close(event.time_s, "ended from outside")

    def kv_checked(self, event: KVBlockChecked, place: PlaceState) -> None:
        """Record the wait for a KV check, and its outcome for this sequence.

        A block is computed again between a decision and its step, so all running requests wait. If an earlier step
        is still in flight, the time belongs to that step.
        """
        is_alone = len(place.in_flight) == 1
        if self._status is RequestStatus.RUNNING and is_alone:
            if not self._spans or self._spans[-1].cause.label is not Label.KV_CHECK:  # else between two checks
                self._spend(causes.step_wait_cause(None, self.current_name), event.begin_s)
            self._spend(causes.kv_check_cause(event), event.time_s)
        if self.current_name in event.suspects.ended:
            self._finish_reason = FinishReason.ERROR
            self._notes.append("it had read a KV block that was found corrupt: its output may be wrong")
            self._close(event.time_s, "it had read a corrupt block")
        elif self.current_name in event.suspects.started_over:
            self._status = RequestStatus.WAITING
            self._in_flight.clear()
            self._cause = causes.restart_cause(event)
            self._notes.append("started over: its cached prefix held a KV block that was found corrupt")

    def lost(self, time_s: float, why: str) -> None:
        """Record that the engine that ran the sequence is gone."""
        self._finish_reason = FinishReason.ERROR
        self._close(time_s, why)

    def lane(self, upto_s: float) -> Lane:
        """Return the lane so far; of a live sequence, up to `upto_s`."""
        spans = list(self._spans)
        end_s = self._cursor_s
        finish_reason = FinishReason.ABORT if self._end_requested and not self.is_finished else self._finish_reason
        if finish_reason is None and upto_s > end_s:
            spans.append(self._open_span(upto_s, "goes on"))
            end_s = upto_s
        return Lane(
            sequence_id=self.sequence_id,
            begin_s=self._begin_s,
            end_s=end_s,
            segments=merged(spans),
            finish_reason=finish_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=len(self._token_times_s),
            num_preemptions=self._num_preemptions,
            drafts=DraftTally.total([self._tally()]),
            draft_decisions=self._decisions(),
            first_token_s=self._token_times_s[0] if self._token_times_s else None,
            notes=tuple(self._notes),
            has_arrival=self._has_arrival,
        )

    # ------------------------------------------------------------------ spans

    def _spend(self, cause: Cause, until_s: float, work: Work = NO_WORK, process: str | None = None) -> None:
        """Assign the time since the last cut to a cause."""
        until_s = max(until_s, self._cursor_s)
        if until_s > self._cursor_s or work.num_steps:
            where = self.process if process is None else process
            self._spans.append(Span(cause, self._cursor_s, until_s, work, where))
            self._cursor_s = until_s

    def _handed_over(self, source: str, event: RequestArrived, place: PlaceState, way: KVTransferPath | None) -> Cause:
        """Spend the time since `source` computed the prompt; return the last cause."""
        num_spans, prefilled_s, cause = len(self._spans), self._cursor_s, self._cause
        for cause, until_s in handover_causes(source, prefilled_s, event.time_s, way, place):
            self._spend(cause, min(until_s, event.time_s))
        if not any(span.cause.label is Label.TRANSFER for span in self._spans[num_spans:]):
            told = transfer_cause(source, prefilled_s, None if way is None else way.ended).reason
            self._notes.append(f"transfer: {told}")
        return cause

    def _admit(self, event: StepScheduled) -> None:
        mine = [a for a in event.batch.admitted if a.request_id == self.current_name]
        self._admitted = mine[0] if mine else None
        is_first = self._status is RequestStatus.WAITING and not self._token_times_s
        if self._admitted is not None and is_first:  # at a later process the transferred prefix counts as cached
            self._num_cached_tokens = self._admitted.num_cached_tokens
        self._admitted_in_step = event.batch.step
        self._num_admissions += 1
        self._status = RequestStatus.RUNNING

    def _tally(self) -> DraftTally:
        """Return the draft statistics of the tokens that count."""
        tally, num_left = DraftTally(), len(self._token_times_s)
        for num_tokens, num_draft_tokens in self._passes:
            if num_left > 0:
                tally.passed(min(num_tokens, num_left), num_draft_tokens)
            num_left -= num_tokens
        return tally

    def _decisions(self) -> dict[DraftReason, int]:
        """Return the number of its steps by the draft gate's decision."""
        decisions = [span.work.drafts.decision for span in self._spans]
        return dict(Counter(decision.reason for decision in decisions if decision is not None))

    def _work(self, step: DecidedStep, until_s: float, commit: Commit | None) -> None:
        share = step.shares[self.current_name]
        is_again = share.num_computed_tokens < self._num_computed_most
        self._num_computed_most = max(self._num_computed_most, share.token_range.stop - share.num_draft_tokens)
        if share.stroke is Stroke.DECODE:
            num_tokens = 0 if commit is None else commit.num_tokens
            work = Work(1, num_tokens, drafts=drafts_of(self.current_name, step, commit))
            self._spend(causes.decode_cause(self.current_name, step), until_s, work)
            return
        told = "" if self._admitted is None else causes.cached_in_words(self._admitted)
        self._admitted = None  # reported once, with the first chunk
        self._spend(
            Cause(Label.RECOMPUTE if is_again else Label.PREFILL, told, step.prefills_of_others(self.current_name)),
            until_s,
            Work(1, share.num_scheduled_tokens, self._num_admissions, share.samples_token),
        )

    def _open_span(self, until_s: float, how: str) -> Span:
        """Return the span from the last cut until `until_s`; `how` says whether it goes on or was broken off."""
        if self._in_flight:
            step = self._in_flight[0]
            is_decode = step.shares[self.current_name].stroke is Stroke.DECODE
            cause = causes.decode_cause(self.current_name, step) if is_decode else Cause(Label.PREFILL, "")
            cause = Cause(cause.label, f"in a step; {how}", cause.because_of)
        elif self._status is RequestStatus.RUNNING:
            cause = Cause(Label.END, f"between two steps; {how}")
        else:
            cause = self._cause
        return Span(cause, self._cursor_s, until_s, process="" if self.is_in_transit else self.process)

    def _drop_undelivered_tokens(self, num_tokens: int) -> None:
        """Drop tokens beyond those with which the sequence goes on elsewhere; they came too late and are recomputed.

        Args:
            num_tokens: tokens of the sequence at its next process.
        """
        if self._num_prompt_tokens is None or not self._has_arrival:
            return
        num_delivered = max(0, num_tokens - self._num_prompt_tokens)
        num_late = len(self._token_times_s) - num_delivered
        if num_late > 0:
            del self._token_times_s[num_delivered:]
            self._notes.append(f"{counted(num_late, 'token')} came too late and not counted")
            while sum(tokens for tokens, _ in self._passes) > num_delivered:
                self._passes.pop()

    def _close(self, time_s: float, how: str) -> None:
        if time_s > self._cursor_s:
            self._spans.append(self._open_span(time_s, how))
            self._cursor_s = time_s

    def _cut(self, end_s: float) -> None:
        """Remove all time after the token that turned out to be the last."""
        kept = [span for span in self._spans if span.start_s < end_s or (span.work.num_steps and span.end_s <= end_s)]
        self._spans = [replace(span, end_s=min(span.end_s, end_s)) for span in kept]
        self._cursor_s = end_s
