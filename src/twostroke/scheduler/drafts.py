"""How many drafts each request's next step is to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twostroke.batch import Commit, DraftDecision, DraftReason, ScheduledRequest, StepSeconds, Stroke
from twostroke.config.speculation import AUTO, MAX_AUTO_DRAFTS, SpeculativeConfig
from twostroke.cost.acceptance import Acceptance, best_plan
from twostroke.cost.step_time import StepTimes
from twostroke.request import Request


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
    measured    a of each request      v(tokens) of a step     c(requests) of one round of drafting
                       └──────────────────────┼─────────────────────┘
    decided      the drafts that make the most tokens per second: best_plan (cost/acceptance.py)
    ```

    Until a few drafts were looked at, one request tries them for everybody; then four times as many as have drafted
    together before, because nobody knows how long drafting takes for more. Where drafts do not pay, one request at a
    time tries one all the same now and then, ever more rarely while they fall: the text may have become one that is
    easy to guess.
    """

    _FIRST_GUESS = 0.7
    """Acceptance before anything is known: good enough to find out."""
    _ENOUGH_TRIED = 12
    """Drafts that were looked at before more than one request has any: a prompt that is read for them is not free."""
    _LEAST_GAIN = 1.03
    """Less is within what measuring can tell."""
    _BASE_SAMPLES = 3
    """Steps of a size that are timed without drafts before anything is held against them."""
    _FIRST_PROBE = 24
    _LAST_PROBE = 384
    """Steps between two tries, by one of the requests whose drafts do not pay."""
    _MOST_RETRIES = 24
    """Steps for which a try is repeated that found nobody ready to draft: who had not been asked for long wakes up."""
    _GROWTH = 4
    """So many times as many requests may draft together as have done so before."""
    _FIRST_HOLD = 4
    _LAST_HOLD = 64
    """For so many steps it stays at no drafts, longer each time: thinking takes a fiftieth of a small model's step."""
    _GLOBAL_KEPT = 0.94
    """Of what is known of everybody, after each draft that was looked at: a dozen drafts make it anew."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step_times = StepTimes()
        self._draft_times = StepTimes()
        """Of one round of drafting, by requests."""
        self._acceptances: dict[str, Acceptance] = {}
        self._everybody = self._FIRST_GUESS
        """Acceptance of requests that have ended, or go on: where a new one begins."""
        self._idle_steps = 0
        """Steps since the last try."""
        self._patience = self._FIRST_PROBE
        """Steps until the next one."""
        self._num_probes = 0
        self._num_retries = 0
        self._most_together = 0
        """Requests that drafted in one step whose drafting was timed."""
        self._num_tried = 0
        """Drafts that were looked at."""
        self._held: tuple[int, int] = 0, 0
        """No drafts for so many steps yet, as long as there are so many requests."""
        self._hold = self._FIRST_HOLD
        """How long the next time."""
        self._figures = 0.0, 0.0, 0.0
        """Of the last time when drafts did not pay, the best that could have been drafted: tokens, seconds, seconds
        without drafts."""
        self._drafted_last: set[str] = set()
        """Requests with drafts in the last step."""
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
            self._decision = DraftDecision(DraftReason.UNKNOWN, 0, float(len(requests)), 0.0, 0.0)
            return (0,) * len(requests)
        steps_left, num_requests = self._held
        if not steps_left or num_requests != len(requests):
            expected = [self._expected(request.request_id) for request in requests]
            plan = best_plan(expected, self._most, self._step_s, self._draft_s)
            figures = plan.tokens, plan.seconds, plan.plain_seconds
            if self._num_tried < self._ENOUGH_TRIED:
                wanted = self._scouted(requests, plan.num_drafts)
                self._decision = DraftDecision(DraftReason.PROBE, sum(wanted), *figures)
                return wanted
            if plan.gain >= self._LEAST_GAIN:
                wanted = self._with_probe(requests, self._some(requests, plan.num_drafts))
                self._decision = DraftDecision(DraftReason.PAYS, sum(wanted), *figures)
                self._patience, self._hold = self._FIRST_PROBE, self._FIRST_HOLD
                return wanted
            self._figures = plan.drafted_tokens, plan.drafted_seconds, plan.plain_seconds
            steps_left, self._hold = self._hold, min(2 * self._hold, self._LAST_HOLD)
        self._held = steps_left - 1, len(requests)
        wanted = self._with_probe(requests, (0,) * len(requests))
        reason = DraftReason.PROBE if any(wanted) else DraftReason.DOES_NOT_PAY
        self._decision = DraftDecision(reason, sum(wanted), *self._figures)
        return wanted

    def learn(self, scheduled: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepSeconds) -> None:
        """See DraftGate."""
        verified = {commit.request_id: commit for commit in commits if commit.num_draft_tokens}
        for request_id, commit in verified.items():
            num_accepted = min(commit.num_tokens - 1, commit.num_draft_tokens)
            acceptance = self._acceptances.get(request_id)
            is_cut = commit.finish_reason is not None and num_accepted < commit.num_draft_tokens
            if acceptance is not None and not is_cut:  # neither ended meanwhile, nor by one of these tokens
                if num_accepted:
                    self._patience, self._hold = self._FIRST_PROBE, self._FIRST_HOLD
                acceptance.learn(commit.num_draft_tokens, num_accepted)
                tried = num_accepted + (num_accepted < commit.num_draft_tokens)
                self._num_tried += tried
                kept = self._GLOBAL_KEPT**tried
                self._everybody = self._everybody * kept + (1 - kept) * num_accepted / tried
        if not seconds.step_s or any(request.stroke is Stroke.PREFILL for request in scheduled):
            return
        num_drafts = sum(commit.num_draft_tokens for commit in verified.values())
        self._step_times.learn(len(scheduled) + num_drafts, seconds.step_s - seconds.draft_s)
        asked = {request.request_id: request.num_draft_tokens for request in scheduled if request.num_draft_tokens}
        self._retry_later(bool(asked), bool(verified))
        if asked and asked.keys() <= self._drafted_last:  # who has not drafted for a while has something to read first
            self._draft_times.learn(len(asked), seconds.draft_s / max(asked.values()))
            self._most_together = max(self._most_together, len(asked))
        self._drafted_last = set(asked)

    def forget(self, request_id: str) -> None:
        """See DraftGate."""
        self._acceptances.pop(request_id, None)

    def _expected(self, request_id: str) -> float:
        known = self._acceptances.get(request_id)
        return self._everybody if known is None else known.probability

    def _acceptance(self, request_id: str) -> Acceptance:
        if request_id not in self._acceptances:
            self._acceptances[request_id] = Acceptance(self._everybody)
        return self._acceptances[request_id]

    def _scouted(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Of these drafts only one request's, and one at least: the others wait for its experience."""
        known = [place for place, request in enumerate(requests) if request.request_id in self._acceptances]
        scout = known[0] if known else 0
        self._acceptance(requests[scout].request_id)  # what comes of it is to be learned
        return tuple(max(1, n) if place == scout else 0 for place, n in enumerate(num_drafts))

    def _some(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Of these drafts those of as many requests as may have any."""
        places = [place for place, number in enumerate(num_drafts) if number]
        chosen = set(places[: self._GROWTH * max(1, self._most_together)])
        for place in chosen:
            self._acceptance(requests[place].request_id)  # what comes of them is to be learned
        return tuple(number if place in chosen else 0 for place, number in enumerate(num_drafts))

    def _step_s(self, num_tokens: int) -> float:
        seconds = self._step_times.predicted(num_tokens)
        assert seconds is not None, "asked before a step was timed"
        return seconds

    def _draft_s(self, num_requests: int, num_drafts: int) -> float:
        num_timed = min(num_requests, max(1, self._most_together))  # of more, it is soon known
        return num_drafts * (self._draft_times.predicted(num_timed) or 0.0)

    def _retry_later(self, has_asked: bool, has_found: bool) -> None:
        """After a step: drafts that were asked for and not guessed are asked for again, of the same request."""
        if has_found or self._num_retries >= self._MOST_RETRIES:
            self._num_retries = 0
        elif has_asked and self._idle_steps == 0:
            self._num_retries += 1
            self._num_probes -= 1
            self._patience = max(self._FIRST_PROBE, self._patience // 2)
            self._idle_steps = self._patience

    def _with_probe(self, requests: Sequence[Request], wanted: Sequence[int]) -> tuple[int, ...]:
        """The same, with a single draft for one of those without, if it is time to try: each in its turn."""
        without = [place for place, num_drafts in enumerate(wanted) if not num_drafts]
        self._idle_steps += 1
        if not without or self._idle_steps < self._patience:
            return tuple(wanted)
        self._idle_steps = 0
        self._patience = min(2 * self._patience, self._LAST_PROBE)
        self._num_probes += 1
        place = without[self._num_probes % len(without)]
        self._acceptance(requests[place].request_id)  # what comes of it is to be learned
        self._held = 0, 0
        return (*wanted[:place], 1, *wanted[place + 1 :])


def make_gate(config: SpeculativeConfig | None, max_drafts: int | None = None) -> DraftGate:
    """The gate that the settings ask for; who drafts has at most `max_drafts` in a row to give."""
    if config is None:
        return FixedDrafts(0)
    if config.num_speculative_tokens == AUTO:
        return MeasuredDrafts(min(MAX_AUTO_DRAFTS, max_drafts or MAX_AUTO_DRAFTS))
    return FixedDrafts(config.num_speculative_tokens)
