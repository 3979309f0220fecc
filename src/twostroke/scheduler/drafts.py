"""How many drafts each request's next step is to verify.

When a draft is tried where drafts do not pay, and for whom: the text may have become one that is easy to guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Protocol

from twostroke.batch import Commit, DraftDecision, DraftReason, ScheduledRequest, StepSeconds, Stroke
from twostroke.config.speculation import AUTO, MAX_AUTO_DRAFTS, SpeculativeConfig
from twostroke.cost.acceptance import Acceptances, DraftPlan, best_plan
from twostroke.cost.account import DraftAccount
from twostroke.cost.drafting_time import HICCUP, DraftingTimes
from twostroke.cost.step_time import StepTimes
from twostroke.outputs import num_accepted
from twostroke.request import Request, RequestStatus
from twostroke.scheduler.step_plan import SchedulerPart, StepPlan


class DraftTries:
    """One request tries one draft; then there is a pause, which doubles as long as drafts fall.

    ```
    pause      24        48                96 …                             4   4   8 …
               |         |                 |                                |   |   |
    tries      x         x                 x       …        (stands)        ✓   ✓   x        the same request again
    ```

    The last one that was right goes first, then whoever has just begun, for there is the least to read: a try waits up
    to twice the pause for one of these. Who had not been asked for long may have nothing to guess from yet; then the
    try is repeated in the next steps.
    """

    _PAUSE_BEHIND_SUCCESS = 4
    _FIRST_PAUSE = 24
    _LAST_PAUSE = 384
    _MOST_RETRIES = 24

    def __init__(self) -> None:
        self._pause = self._FIRST_PAUSE
        self._num_idle = 0
        """Steps since the last try."""
        self._num_tries = 0
        self._num_retries = 0
        self._promising: str | None = None
        """The request whose drafts stood last."""

    def place(self, requests: Sequence[Request], num_drafts: Sequence[int], *, may_begin: bool) -> int | None:
        """Of a request without drafts that tries one in this step.

        Args:
            requests: that decode.
            num_drafts: that each has.
            may_begin: there is time to lose; what was begun comes to its end in any case.
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

    def stood(self, request_id: str) -> None:
        """A draft of the request did, tried or not."""
        self._pause = self._PAUSE_BEHIND_SUCCESS
        self._promising = request_id

    def fell(self, request_id: str) -> None:
        """The first draft did."""
        if self._promising == request_id:
            self._promising = None

    def passed(self, *, has_asked: bool, has_found: bool) -> None:
        """A step has; drafts that were asked for and not guessed are asked for again, of the same request."""
        if has_found or self._num_retries >= self._MOST_RETRIES:
            self._num_retries = 0
        elif has_asked and self._num_idle == 0:
            self._num_retries += 1
            self._num_tries -= 1
            self._pause = max(self._FIRST_PAUSE, self._pause // 2)
            self._num_idle = 2 * self._pause

    def begin_anew(self) -> None:
        """Drafts pay."""
        self._pause = self._FIRST_PAUSE


class DraftGate(Protocol):
    """Decides per step and request."""

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        """For each request that is about to decode, so many drafts are wanted; fewer may fit, or be guessed."""
        ...

    @property
    def decision(self) -> DraftDecision | None:
        """The last one, with its reason; None where there was nothing to decide."""
        ...

    def learn(self, scheduled: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepSeconds) -> None:
        """What became of a step."""
        ...

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        ...


class FixedDrafts:
    """As many as the user said, always."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        """The same for everybody."""
        return (self._num_drafts,) * len(requests)

    @property
    def decision(self) -> DraftDecision | None:
        """Nothing was decided."""
        return None

    def learn(self, scheduled: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepSeconds) -> None:
        """Nothing to learn."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


class MeasuredDrafts:
    """Drafts where they pay, by what was measured: who guesses well here, and how long steps of which size take.

    ```
    measured    a of each request      v(tokens) of a step     c(requests) of one round of drafting, and of reading
                       └──────────────────────┼─────────────────────┘
    decided      the drafts that make the most tokens per second: best_plan (cost/acceptance.py)
    booked       what came of them, against the same tokens without drafts: DraftAccount (cost/account.py)
    ```

    Until a few drafts were looked at, one request tries them for everybody; then four times as many as have drafted
    together before, because nobody knows how long drafting takes for more. Where drafts do not pay, one is tried all
    the same now and then (DraftTries). Nothing is tried while drafting owes time, and nothing drafted at all when it
    owes much.
    """

    _ENOUGH_TRIED = 12
    """Drafts that were looked at before more than one request has any: a prompt that is read for them is not free."""
    _LEAST_GAIN = 1.03
    """Less is within what measuring can tell."""
    _BASE_SAMPLES = 3
    """Steps of a size that are timed without drafts before anything is held against them."""
    _FRESH_STEPS = 32
    """So many steps with drafts, times what they gain, and one is timed without: its time may have changed."""
    _REMEMBERED = 512
    """Steps for which the time of a size counts that was not seen again."""
    _FURTHER = 2
    """So many times as many tokens as in any step that is remembered are planned at most: nobody knows what comes."""
    _GROWTH = 4
    """So many times as many requests may draft together as have done so before."""
    _FIRST_HOLD = 4
    _LAST_HOLD = 64
    """For so many steps it stays at no drafts, longer each time: thinking takes a fiftieth of a small model's step."""
    _LOOKS_EVERY = 8
    """Meanwhile it looks at every eighth step, for the same reason."""
    _READ_SPREAD = 32
    """Steps with drafts that a drafter's reading has to be worth."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step_times = StepTimes()
        self._draft_times = DraftingTimes()
        self._num_steps = self._next_cleaning = 0
        self._acceptances = Acceptances()
        self._tries = DraftTries()
        self._num_since_plain = 0
        """Steps with drafts since one without was timed."""
        self._num_tried = 0
        """Drafts that were looked at."""
        self._held: tuple[int, int] = 0, 0
        """No drafts for so many steps yet, as long as there are so many requests."""
        self._hold = self._FIRST_HOLD
        """How long the next time."""
        self._off = DraftDecision(DraftReason.DOES_NOT_PAY, 0, 0.0, 0.0, 0.0)
        """The decision of the steps of a hold, with the figures of the best that could have been drafted."""
        self._drafted_last: Set[str] = frozenset()
        """Requests with drafts in the last step."""
        self._account = DraftAccount()
        self._unbooked_s = 0.0
        """Time of the steps that the account has not been told of."""
        self._decision: DraftDecision | None = None

    @property
    def decision(self) -> DraftDecision | None:
        """See DraftGate."""
        return self._decision

    def num_drafts(self, requests: Sequence[Request]) -> Sequence[int]:
        """See DraftGate."""
        self._decision = None
        if not requests:
            return ()
        if self._step_times.num_learned(len(requests)) < self._BASE_SAMPLES:
            return self._timed_without(requests)
        steps_left, num_requests = self._held
        if not steps_left or num_requests != len(requests):
            expected = self._acceptances.expected(request.request_id for request in requests)
            read_s = self._to_read_s(requests)
            plan = best_plan(
                expected,
                self._most,
                self._least_step_s,
                lambda n, k: self._draft_times.predicted(n, k) + n * read_s,
                most_tokens=self._FURTHER * self._step_times.largest,
            )
            pays = plan.gain >= self._LEAST_GAIN
            if not self._account.is_stopped:
                if self._num_tried < self._ENOUGH_TRIED:
                    return self._taken(DraftReason.PROBE, plan, self._scouted(requests, plan.num_drafts))
                if pays and self._num_since_plain >= self._FRESH_STEPS * plan.gain:
                    return self._timed_without(requests)
                if pays:
                    self._hold = self._FIRST_HOLD
                    self._tries.begin_anew()
                    wanted = self._with_try(requests, self._some(requests, plan.num_drafts))
                    return self._taken(DraftReason.PAYS, plan, wanted)
            figures = plan.drafted_tokens, plan.drafted_seconds, plan.plain_seconds
            self._off = DraftDecision(DraftReason.OWES if pays else DraftReason.DOES_NOT_PAY, 0, *figures)
            steps_left, self._hold = self._hold, min(2 * self._hold, self._LAST_HOLD)
        self._held = steps_left - 1, len(requests)
        wanted = self._with_try(requests, (0,) * len(requests))
        self._decision = self._off
        if any(wanted):
            self._decision = replace(self._off, reason=DraftReason.PROBE, num_drafts=sum(wanted))
        return wanted

    def learn(self, scheduled: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepSeconds) -> None:
        """See DraftGate."""
        self._num_steps += 1
        self._unbooked_s += seconds.step_s
        asked = {request.request_id: request.num_draft_tokens for request in scheduled if request.num_draft_tokens}
        if not asked and self._held[1] and self._num_steps % self._LOOKS_EVERY:
            self._drafted_last = asked.keys()  # nobody
            return
        verified = [commit for commit in commits if commit.num_draft_tokens]
        num_drafts = sum(commit.num_draft_tokens for commit in verified)
        num_stood = sum(map(self._num_stood, verified))
        drafting_s = self._learn_drafting(verified, scheduled, seconds.draft_s) if asked else 0.0
        self._drafted_last = asked.keys()
        num_decoding = sum(request.stroke is Stroke.DECODE for request in scheduled)
        if not seconds.step_s or not num_decoding:
            return
        verified_s = 0.0
        if num_decoding == len(scheduled):  # what drafts add to a step with prompts is not told apart
            verified_s = seconds.step_s - seconds.draft_s
            self._step_times.learn(num_decoding + num_drafts, verified_s, self._num_steps)
            self._num_since_plain = self._num_since_plain + 1 if asked else 0
            self._tries.passed(has_asked=bool(asked), has_found=bool(verified))
        self._book(num_decoding, num_drafts, num_stood, drafting_s, verified_s if asked else 0.0)
        if self._num_steps >= self._next_cleaning:
            self._next_cleaning = self._num_steps + self._REMEMBERED // 8
            for times in (self._step_times, self._draft_times):
                times.forget(self._num_steps - self._REMEMBERED)

    def forget(self, request_id: str) -> None:
        """See DraftGate."""
        self._acceptances.forget(request_id)

    def _timed_without(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """No drafts, to know what a step takes without."""
        self._held = 0, 0
        self._decision = DraftDecision(DraftReason.UNKNOWN, 0, float(len(requests)), 0.0, 0.0)
        return (0,) * len(requests)

    def _taken(self, reason: DraftReason, plan: DraftPlan, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """These drafts of a plan, or fewer."""
        self._held = 0, 0
        self._decision = DraftDecision(reason, sum(wanted), plan.tokens, plan.seconds, plan.plain_seconds)
        return wanted

    def _scouted(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Of these drafts only one request's, and one at least: the others wait for its experience."""
        known = [place for place, request in enumerate(requests) if request.request_id in self._acceptances]
        scout = known[0] if known else 0
        self._acceptances.begin(requests[scout].request_id)
        return tuple(max(1, n) if place == scout else 0 for place, n in enumerate(num_drafts))

    def _some(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Of these drafts those of as many requests as may have any."""
        places = [place for place, number in enumerate(num_drafts) if number]
        chosen = set(places[: self._GROWTH * self._draft_times.most_together])
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

    def _to_read_s(self, requests: Sequence[Request]) -> float:
        """Of one request, its part in a step's time of what is to be read before the first draft."""
        num_tokens = sum(request.num_tokens for request in requests if request.request_id not in self._drafted_last)
        return num_tokens / len(requests) * self._draft_times.read_s / self._READ_SPREAD

    def _learn_drafting(
        self, verified: Sequence[Commit], scheduled: Sequence[ScheduledRequest], draft_s: float
    ) -> float:
        """What drafting took, without hiccups; who has not drafted in the last step had something to read first."""
        num_unread = sum(
            request.num_computed_tokens
            for request in scheduled
            if request.num_draft_tokens and request.request_id not in self._drafted_last
        )
        deepest = max((commit.num_draft_tokens for commit in verified), default=0)
        return self._draft_times.learn(len(verified), deepest, num_unread, draft_s, self._num_steps)

    def _book(self, num_decoding: int, num_drafts: int, num_stood: int, drafting_s: float, verified_s: float) -> None:
        """What drafts lost, or won: the time to draft, and what they added to the target's pass.

        That pass is told by its length, 0 where nobody was asked or it is not known; with no draft to verify it may be
        longer, too, because it is watched.
        """
        if self._step_times.num_learned(num_decoding) < self._BASE_SAMPLES:
            return
        plain_s = self._step_s(num_decoding)
        lost_s = drafting_s - num_stood * plain_s / num_decoding
        if verified_s:
            lost_s += min(verified_s, HICCUP * self._step_s(num_decoding + num_drafts)) - plain_s
        self._account.book(self._unbooked_s, lost_s, plain_s)
        self._unbooked_s = 0.0

    def _num_stood(self, commit: Commit) -> int:
        """Of a request's drafts; what that tells of the next ones is learned."""
        num_stood = num_accepted(commit.num_tokens, commit.num_draft_tokens)
        is_cut = commit.finish_reason is not None and num_stood < commit.num_draft_tokens
        if commit.request_id in self._acceptances and not is_cut:  # neither ended meanwhile, nor by one of these tokens
            if num_stood:
                self._hold = self._FIRST_HOLD
                self._tries.stood(commit.request_id)
            else:
                self._tries.fell(commit.request_id)
            self._acceptances.learn(commit.request_id, commit.num_draft_tokens, num_stood)
            self._num_tried += num_stood + (num_stood < commit.num_draft_tokens)
        return num_stood

    def _with_try(self, requests: Sequence[Request], wanted: Sequence[int]) -> tuple[int, ...]:
        """The same, with a single draft for one of those without, if it is time to try."""
        place = self._tries.place(requests, wanted, may_begin=not self._account.owes)
        if place is None:
            return tuple(wanted)
        self._acceptances.begin(requests[place].request_id)
        self._held = 0, 0
        return (*wanted[:place], 1, *wanted[place + 1 :])


class DraftShares(SchedulerPart):
    """The scheduler's part that gives decodes their drafts.

    Args:
        gate: decides how many are wanted.
    """

    def __init__(self, gate: DraftGate) -> None:
        self._gate = gate

    def of(self, plan: StepPlan, decoding: Sequence[Request]) -> Iterator[int]:
        """Yield for each request its drafts, as far as the budget has tokens for everybody else."""
        num_spare = plan.budget.remaining - len(plan.order.running)
        wanted = self._gate.num_drafts(decoding)
        plan.drafts = self._gate.decision
        for request, num_wanted in zip(decoding, wanted, strict=True):
            num_drafts = max(0, min(num_wanted, num_spare, request.num_outputs_left - 1))
            if request.status is RequestStatus.RUNNING:  # else it was preempted a moment ago
                num_spare -= num_drafts
            yield num_drafts

    def learn(
        self, step: int, requests: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepSeconds
    ) -> None:
        """Tell the gate what became of a step."""
        self._gate.learn(requests, commits, seconds)

    def ended(self, request: Request) -> None:
        """Forget a request."""
        self._gate.forget(request.request_id)


def make_drafts(config: SpeculativeConfig | None, max_drafts: int | None = None) -> DraftShares | None:
    """Return the part that the settings ask for; None where nobody drafts.

    Args:
        config: of speculation.
        max_drafts: most tokens in a row that the drafter can guess; None: any number.
    """
    if config is None:
        return None
    if config.num_speculative_tokens == AUTO:
        return DraftShares(MeasuredDrafts(min(MAX_AUTO_DRAFTS, max_drafts or MAX_AUTO_DRAFTS)))
    return DraftShares(FixedDrafts(config.num_speculative_tokens))
