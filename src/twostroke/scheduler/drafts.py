"""Number of draft tokens that each request's next step verifies.

`DraftProbes` also decides when and for which request a draft is tried although drafts do not pay off: the text may
have become easy to predict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Protocol

from twostroke.batch import Commit, DraftDecision, DraftReason, ScheduledRequest, StepDurations, Stroke
from twostroke.config.speculation import AUTO, MAX_AUTO_DRAFTS, SpeculativeConfig
from twostroke.cost.acceptance import Acceptances, DraftPlan, best_plan
from twostroke.cost.account import DraftAccount
from twostroke.cost.drafting_time import OUTLIER_FACTOR, DraftingTimes
from twostroke.cost.step_time import StepTimes
from twostroke.outputs import num_accepted
from twostroke.request import Request, RequestStatus
from twostroke.scheduler.step_plan import SchedulerPart, StepPlan


class DraftProbes:
    """Single drafts of single requests, with pauses that double while drafts are rejected.

    ```
    pause      24        48                96 …                             4   4   8 …
               |         |                 |                                |   |   |
    tries      x         x                 x       …      (accepted)        ✓   ✓   x        the same request again
    ```

    The request whose draft was accepted last goes first, then requests that have just begun, since their drafter has
    the least to read. A try waits up to twice the pause for one of these. A drafter may have nothing to propose for a
    request that it has not seen for long; the try is then repeated in the next steps.
    """

    _PAUSE_BEHIND_SUCCESS = 4
    _FIRST_PAUSE = 24
    _LAST_PAUSE = 384
    _MAX_RETRIES = 24

    def __init__(self) -> None:
        self._pause = self._FIRST_PAUSE
        self._num_idle = 0
        """Steps since the last try."""
        self._num_tries = 0
        self._num_retries = 0
        self._promising: str | None = None
        """Id of the request whose draft was accepted last."""

    def choose_request(self, requests: Sequence[Request], num_drafts: Sequence[int], *, may_begin: bool) -> int | None:
        """Return the index of a request without drafts that tries one in this step; None: no try.

        Args:
            requests: that decode.
            num_drafts: draft tokens of each.
            may_begin: whether there is time to lose; a try that has begun is completed in any case.
        """
        self._num_idle += 1
        if self._num_idle < self._pause or not (may_begin or self._num_retries):
            return None
        without = [place for place, number in enumerate(num_drafts) if not number]
        first = [place for place in without if requests[place].request_id == self._promising]
        first = first or [place for place in without if requests[place].num_output_tokens <= 1]
        if not without or (not first and self._num_idle < 2 * self._pause):
            return None
        self._num_idle = 0
        self._pause = min(2 * self._pause, self._LAST_PAUSE)
        self._num_tries += 1
        chosen = first or without
        return chosen[self._num_tries % len(chosen)]

    def record_accepted(self, request_id: str) -> None:
        """Record that a draft of the request was accepted, tried or not."""
        self._pause = self._PAUSE_BEHIND_SUCCESS
        self._promising = request_id

    def record_rejected(self, request_id: str) -> None:
        """Record that the first draft of the request was rejected."""
        if self._promising == request_id:
            self._promising = None

    def record_step(self, *, has_asked: bool, has_found: bool) -> None:
        """Record a step; if drafts were requested but not proposed, repeat the try with the same request."""
        if has_found or self._num_retries >= self._MAX_RETRIES:
            self._num_retries = 0
        elif has_asked and self._num_idle == 0:
            self._num_retries += 1
            self._num_tries -= 1
            self._pause = max(self._FIRST_PAUSE, self._pause // 2)
            self._num_idle = 2 * self._pause

    def reset_pause(self) -> None:
        """Reset the pause, since drafts pay off."""
        self._pause = self._FIRST_PAUSE


class DraftGate(Protocol):
    """Rule for the number of drafts per step and request."""

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        """Return for each request that is about to decode how many drafts are wanted; fewer may fit or be proposed."""
        ...

    @property
    def decision(self) -> DraftDecision | None:
        """Last decision with its reason; None if there was nothing to decide."""
        ...

    def learn(self, scheduled: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepDurations) -> None:
        """Learn from the outcome of a step."""
        ...

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        ...


class FixedDrafts:
    """The number of drafts in the settings, always."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        return (self._num_drafts,) * len(requests)

    @property
    def decision(self) -> DraftDecision | None:
        """None, since nothing is decided."""
        return None

    def learn(self, scheduled: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepDurations) -> None:
        """Do nothing."""

    def forget(self, request_id: str) -> None:
        """Do nothing."""


class MeasuredDrafts:
    """Drafts where they pay off, by measured acceptance and measured step times.

    ```
    measured    a of each request      v(tokens) of a step     c(requests) of one round of drafting, and of reading
                       └──────────────────────┼─────────────────────┘
    decided      the drafts that make the most tokens per second: best_plan (cost/acceptance.py)
    booked       their outcome against the same tokens without drafts: DraftAccount (cost/account.py)
    ```

    Until a few drafts are verified, only one request drafts. After that, at most four times as many requests draft as
    have drafted together before, because the time of drafting for more is unknown. If drafts do not pay off, one is
    still tried now and then (DraftProbes). Nothing is tried while drafting has a net loss of time, and nothing is
    drafted at all while the loss is large.
    """

    _ENOUGH_TRIED = 12
    """Verified drafts before more than one request drafts, since the drafter has to read a prompt for each."""
    _MIN_GAIN = 1.03
    """Least predicted gain; a smaller one is within measurement error."""
    _BASE_SAMPLES = 3
    """Steps of a size that are timed without drafts before drafts are compared with them."""
    _FRESH_STEPS = 32
    """Steps with drafts, times their gain, after which one step is timed without, since its time may have changed."""
    _REMEMBERED = 512
    """Steps after which the time of a size that did not recur is forgotten."""
    _FURTHER = 2
    """Most tokens of a planned step, as a multiple of the largest remembered step; the time of more is unknown."""
    _GROWTH = 4
    """Most requests that may draft together, as a multiple of those that have drafted together before."""
    _FIRST_HOLD = 4
    _LAST_HOLD = 64
    """Steps without drafts after a negative decision, doubled each time: a decision takes a fiftieth of a small model's
    step."""
    _LOOKS_EVERY = 8
    """Interval of the steps that are measured meanwhile, for the same reason."""
    _READ_SPREAD = 32
    """Steps with drafts over which the cost of a drafter's reading is spread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step_times = StepTimes()
        self._draft_times = DraftingTimes()
        self._num_steps = self._next_cleaning = 0
        self._acceptances = Acceptances()
        self._probes = DraftProbes()
        self._num_since_plain = 0
        """Steps with drafts since one without was timed."""
        self._num_tried = 0
        """Verified drafts."""
        self._held: tuple[int, int] = 0, 0
        """Steps left of a hold without drafts, and the number of requests for which the hold is valid."""
        self._hold = self._FIRST_HOLD
        """Length of the next hold."""
        self._off = DraftDecision(DraftReason.DOES_NOT_PAY, 0, 0.0, 0.0, 0.0)
        """Decision for the steps of a hold, with the figures of the best plan that was rejected."""
        self._drafted_last: Set[str] = frozenset()
        """Requests with drafts in the last step."""
        self._account = DraftAccount()
        self._unbooked_s = 0.0
        """Time of the steps that are not yet in the account."""
        self._decision: DraftDecision | None = None

    @property
    def decision(self) -> DraftDecision | None:
        return self._decision

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        self._decision = None
        if not requests:
            return ()
        if self._step_times.num_learned(len(requests)) < self._BASE_SAMPLES:
            return self._measure_without(requests)
        steps_left, num_requests = self._held
        if not steps_left or num_requests != len(requests):
            expected = self._acceptances.expected(request.request_id for request in requests)
            read_s = self._catch_up_s(requests)
            plan = best_plan(
                expected,
                self._most,
                self._least_step_s,
                lambda n, k: self._draft_times.predicted(n, k) + n * read_s,
                most_tokens=self._FURTHER * self._step_times.largest,
            )
            pays = plan.gain >= self._MIN_GAIN
            if not self._account.is_stopped:
                if self._num_tried < self._ENOUGH_TRIED:
                    return self._taken(DraftReason.PROBE, plan, self._one_probe(requests, plan.num_drafts))
                if pays and self._num_since_plain >= self._FRESH_STEPS * plan.gain:
                    return self._measure_without(requests)
                if pays:
                    self._hold = self._FIRST_HOLD
                    self._probes.reset_pause()
                    wanted = self._with_probe(requests, self._some(requests, plan.num_drafts))
                    return self._taken(DraftReason.PAYS, plan, wanted)
            figures = plan.drafted_tokens, plan.drafted_seconds, plan.plain_seconds
            self._off = DraftDecision(DraftReason.OWES if pays else DraftReason.DOES_NOT_PAY, 0, *figures)
            steps_left, self._hold = self._hold, min(2 * self._hold, self._LAST_HOLD)
        self._held = steps_left - 1, len(requests)
        wanted = self._with_probe(requests, (0,) * len(requests))
        self._decision = self._off
        if any(wanted):
            self._decision = replace(self._off, reason=DraftReason.PROBE, num_drafts=sum(wanted))
        return wanted

    def learn(self, scheduled: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepDurations) -> None:
        self._num_steps += 1
        self._unbooked_s += seconds.step_s
        asked = {request.request_id: request.num_draft_tokens for request in scheduled if request.num_draft_tokens}
        if not asked and self._held[1] and self._num_steps % self._LOOKS_EVERY:
            self._drafted_last = asked.keys()  # empty
            return
        verified = [commit for commit in commits if commit.num_draft_tokens]
        num_drafts = sum(commit.num_draft_tokens for commit in verified)
        num_accepted_tokens = sum(map(self._num_accepted, verified))
        drafting_s = self._learn_drafting(verified, scheduled, seconds.draft_s) if asked else 0.0
        self._drafted_last = asked.keys()
        num_decoding = sum(request.stroke is Stroke.DECODE for request in scheduled)
        if not seconds.step_s or not num_decoding:
            return
        verified_s = 0.0
        if num_decoding == len(scheduled):  # a step with prompts does not show what drafts add
            verified_s = seconds.step_s - seconds.draft_s
            self._step_times.learn(num_decoding + num_drafts, verified_s, self._num_steps)
            self._num_since_plain = self._num_since_plain + 1 if asked else 0
            self._probes.record_step(has_asked=bool(asked), has_found=bool(verified))
        self._book(num_decoding, num_drafts, num_accepted_tokens, drafting_s, verified_s if asked else 0.0)
        if self._num_steps >= self._next_cleaning:
            self._next_cleaning = self._num_steps + self._REMEMBERED // 8
            for times in (self._step_times, self._draft_times):
                times.forget(self._num_steps - self._REMEMBERED)

    def forget(self, request_id: str) -> None:
        self._acceptances.forget(request_id)

    def _measure_without(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return no drafts, to measure a step without them."""
        self._held = 0, 0
        self._decision = DraftDecision(DraftReason.UNKNOWN, 0, float(len(requests)), 0.0, 0.0)
        return (0,) * len(requests)

    def _taken(self, reason: DraftReason, plan: DraftPlan, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Record the decision and return these drafts of a plan, or fewer."""
        self._held = 0, 0
        self._decision = DraftDecision(reason, sum(wanted), plan.tokens, plan.seconds, plan.plain_seconds)
        return wanted

    def _one_probe(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Return the drafts of one request only, and at least one: the other requests wait for its outcome."""
        known = [place for place, request in enumerate(requests) if request.request_id in self._acceptances]
        scout = known[0] if known else 0
        self._acceptances.begin(requests[scout].request_id)
        return tuple(max(1, n) if place == scout else 0 for place, n in enumerate(num_drafts))

    def _some(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Return the drafts of as many requests as may draft together."""
        places = [place for place, number in enumerate(num_drafts) if number]
        chosen = set(places[: self._GROWTH * self._draft_times.max_drafting_requests])
        for place in chosen:
            self._acceptances.begin(requests[place].request_id)
        return tuple(number if place in chosen else 0 for place, number in enumerate(num_drafts))

    def _step_s(self, num_tokens: int) -> float:
        seconds = self._step_times.predicted(num_tokens)
        assert seconds is not None, "asked before a step was timed"
        return seconds

    def _least_step_s(self, num_tokens: int) -> float:
        """Return the step time that a plan uses; an unknown small size counts as cheap, so that it gets tried."""
        seconds = self._step_times.least(num_tokens)
        assert seconds is not None, "asked before a step was timed"
        return seconds

    def _catch_up_s(self, requests: Sequence[Request]) -> float:
        """Return one request's share of a step for the reading that drafters do before the first draft."""
        num_tokens = sum(request.num_tokens for request in requests if request.request_id not in self._drafted_last)
        return num_tokens / len(requests) * self._draft_times.read_s / self._READ_SPREAD

    def _learn_drafting(
        self, verified: Sequence[Commit], scheduled: Sequence[ScheduledRequest], draft_s: float
    ) -> float:
        """Learn the time of drafting without outliers; requests that did not draft in the last step had text to read
        first."""
        num_unread = sum(
            request.num_computed_tokens
            for request in scheduled
            if request.num_draft_tokens and request.request_id not in self._drafted_last
        )
        deepest = max((commit.num_draft_tokens for commit in verified), default=0)
        return self._draft_times.learn(len(verified), deepest, num_unread, draft_s, self._num_steps)

    def _book(
        self, num_decoding: int, num_drafts: int, num_accepted_tokens: int, drafting_s: float, verified_s: float
    ) -> None:
        """Book the time that drafts lost or saved: drafting, and what they added to the target's pass.

        `verified_s` is the length of that pass; 0 if no drafts were requested or the length is unknown. It may be
        longer even without a draft to verify, because the pass is observed.
        """
        if self._step_times.num_learned(num_decoding) < self._BASE_SAMPLES:
            return
        plain_s = self._step_s(num_decoding)
        lost_s = drafting_s - num_accepted_tokens * plain_s / num_decoding
        if verified_s:
            lost_s += min(verified_s, OUTLIER_FACTOR * self._step_s(num_decoding + num_drafts)) - plain_s
        self._account.book(self._unbooked_s, lost_s, plain_s)
        self._unbooked_s = 0.0

    def _num_accepted(self, commit: Commit) -> int:
        """Return the number of accepted drafts of a request, after learning its acceptance from them."""
        num_accepted_tokens = num_accepted(commit.num_tokens, commit.num_draft_tokens)
        is_cut = commit.finish_reason is not None and num_accepted_tokens < commit.num_draft_tokens
        if (
            commit.request_id in self._acceptances and not is_cut
        ):  # skip requests that ended meanwhile, or whose end cut these drafts
            if num_accepted_tokens:
                self._hold = self._FIRST_HOLD
                self._probes.record_accepted(commit.request_id)
            else:
                self._probes.record_rejected(commit.request_id)
            self._acceptances.learn(commit.request_id, commit.num_draft_tokens, num_accepted_tokens)
            self._num_tried += num_accepted_tokens + (num_accepted_tokens < commit.num_draft_tokens)
        return num_accepted_tokens

    def _with_probe(self, requests: Sequence[Request], wanted: Sequence[int]) -> tuple[int, ...]:
        """Return the wanted drafts, with a single one for a request without any if a try is due."""
        place = self._probes.choose_request(requests, wanted, may_begin=not self._account.owes)
        if place is None:
            return tuple(wanted)
        self._acceptances.begin(requests[place].request_id)
        self._held = 0, 0
        return (*wanted[:place], 1, *wanted[place + 1 :])


class DraftScheduling(SchedulerPart):
    """The scheduler's part that gives decodes their drafts.

    Args:
        gate: rule for the number of wanted drafts.
    """

    def __init__(self, gate: DraftGate) -> None:
        self._gate = gate

    def of(self, plan: StepPlan, decoding: Sequence[Request]) -> Iterator[int]:
        """Yield the drafts of each request, as far as the budget leaves a token for every other request."""
        num_spare = plan.budget.remaining - len(plan.order.running)
        wanted = self._gate.num_drafts(decoding)
        plan.drafts = self._gate.decision
        for request, num_wanted in zip(decoding, wanted, strict=True):
            num_drafts = max(0, min(num_wanted, num_spare, request.num_outputs_left - 1))
            if request.status is RequestStatus.RUNNING:  # otherwise it was just preempted
                num_spare -= num_drafts
            yield num_drafts

    def learn(
        self, step: int, requests: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepDurations
    ) -> None:
        """Pass the outcome of a step to the gate."""
        self._gate.learn(requests, commits, seconds)

    def on_request_end(self, request: Request) -> None:
        self._gate.forget(request.request_id)


def make_drafts(config: SpeculativeConfig | None, max_drafts: int | None = None) -> DraftScheduling | None:
    """Return the drafting part for these settings; None without speculation.

    Args:
        config: of speculation.
        max_drafts: most tokens in a row that the drafter can propose; None: any number.
    """
    if config is None:
        return None
    if config.num_speculative_tokens == AUTO:
        return DraftScheduling(MeasuredDrafts(min(MAX_AUTO_DRAFTS, max_drafts or MAX_AUTO_DRAFTS)))
    return DraftScheduling(FixedDrafts(config.num_speculative_tokens))
