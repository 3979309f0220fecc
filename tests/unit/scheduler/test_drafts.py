"""The gate against machines whose times are known: it drafts where that makes more tokens per second, only there."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from factories import make_arrival
from twostroke.batch import Commit, DraftReason, ScheduledRequest, StepSeconds, Stroke
from twostroke.request import Request
from twostroke.scheduler.drafts import MeasuredDrafts


@dataclass
class Machine:
    """Steps of `base` seconds and `per_token` for each query token; a round of drafting takes `round_s`."""

    acceptance: float
    num_requests: int = 1
    base: float = 1.0
    per_token: float = 0.02
    round_s: float = 0.05
    seed: int = 0

    def run(self, num_steps: int) -> tuple[float, float, list[DraftReason]]:
        """Tokens per second with the gate, without drafts, and the reasons."""
        gate, dice = MeasuredDrafts(8), random.Random(self.seed)
        requests = [Request(make_arrival(f"r{i}")) for i in range(self.num_requests)]
        seconds = num_tokens = 0.0
        reasons: list[DraftReason] = []
        for _ in range(num_steps):
            wanted = gate.num_drafts(requests)
            assert gate.decision is not None
            reasons.append(gate.decision.reason)
            scheduled = [
                ScheduledRequest(r.request_id, Stroke.DECODE, 0, 1 + k, k, True, ())
                for r, k in zip(requests, wanted, strict=True)
            ]
            accepted = [self._accepted(dice, k) for k in wanted]
            commits = [
                Commit(r.request_id, 1 + a, num_draft_tokens=k)
                for r, k, a in zip(requests, wanted, accepted, strict=True)
            ]
            draft_s = self.round_s * max(wanted)
            step_s = self.base + self.per_token * (len(requests) + sum(wanted)) + draft_s
            gate.learn(scheduled, commits, StepSeconds(step_s, draft_s))
            seconds, num_tokens = seconds + step_s, num_tokens + len(requests) + sum(accepted)
        plain = self.num_requests / (self.base + self.per_token * self.num_requests)
        return num_tokens / seconds, plain, reasons

    def _accepted(self, dice: random.Random, num_drafts: int) -> int:
        for place in range(num_drafts):
            if dice.random() >= self.acceptance:
                return place
        return num_drafts

    def best(self) -> float:
        """Tokens per second with the best fixed number of drafts."""
        found = list[float]()
        for k in range(9):
            tokens = self.num_requests * sum(self.acceptance**j for j in range(k + 1))
            found.append(tokens / (self.base + self.per_token * self.num_requests * (1 + k) + self.round_s * k))
        return max(found)


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
@pytest.mark.parametrize(("per_token", "round_s"), [(0.001, 0.0), (0.02, 0.1), (0.2, 0.05), (1.0, 1.0)])
def test_it_is_never_much_slower_and_mostly_near_the_best(
    acceptance: float, num_requests: int, per_token: float, round_s: float
) -> None:
    machine = Machine(acceptance, num_requests, per_token=per_token, round_s=round_s)
    rate, plain, _ = machine.run(600)
    assert rate >= 0.97 * plain
    assert rate >= 0.85 * machine.best()


def test_it_says_why() -> None:
    reasons = Machine(0.0).run(200)[2]
    assert reasons[:3] == [DraftReason.UNKNOWN] * 3
    assert reasons[3] is DraftReason.PROBE, "nothing is known"
    assert reasons.count(DraftReason.DOES_NOT_PAY) > 150
    assert DraftReason.PROBE in reasons
    assert set(Machine(0.9).run(100)[2][10:]) == {DraftReason.PAYS}


def test_where_drafts_do_not_pay_the_figures_are_those_of_drafts() -> None:
    gate = MeasuredDrafts(8)
    request = Request(make_arrival("a"))
    for _ in range(20):
        (k,) = gate.num_drafts([request])
        scheduled = [ScheduledRequest("a", Stroke.DECODE, 0, 1 + k, k, True, ())]
        gate.learn(scheduled, [Commit("a", 1, num_draft_tokens=k)], StepSeconds(1.0 + k, 0.0))
    decision = gate.decision
    assert decision is not None
    assert decision.reason is DraftReason.DOES_NOT_PAY
    assert decision.plain_s == 1.0
    assert decision.expected_s == 2.0, "one draft costs as much as the step"
    assert 1.0 < decision.expected_tokens < 2.0


def test_a_text_that_becomes_easy_is_noticed() -> None:
    machine = Machine(0.0)
    gate = MeasuredDrafts(8)
    request = Request(make_arrival("a"))

    def step(accepts: bool) -> int:
        (wanted,) = gate.num_drafts([request])
        scheduled = [ScheduledRequest("a", Stroke.DECODE, 0, 1 + wanted, wanted, True, ())]
        commits = [Commit("a", 1 + wanted * accepts, num_draft_tokens=wanted)]
        draft_s = machine.round_s * wanted
        gate.learn(scheduled, commits, StepSeconds(1.0 + 0.02 * wanted + draft_s, draft_s))
        return wanted

    for _ in range(60):
        step(False)
    assert [step(False) for _ in range(10)] == [0] * 10
    later = [step(True) for _ in range(400)]
    assert later[-1] == 8


def test_requests_are_told_apart() -> None:
    gate = MeasuredDrafts(4)
    requests = [Request(make_arrival(name)) for name in ("good", "bad")]
    for _ in range(120):
        wanted = dict(zip(("good", "bad"), gate.num_drafts(requests), strict=True))
        scheduled = [ScheduledRequest(i, Stroke.DECODE, 0, 1 + k, k, True, ()) for i, k in wanted.items()]
        commits = [Commit(i, 1 + (k if i == "good" else 0), num_draft_tokens=k) for i, k in wanted.items()]
        gate.learn(scheduled, commits, StepSeconds(1.0 + 0.05 * sum(wanted.values()), 0.0))
    assert wanted == {"good": 4, "bad": 0}
    gate.forget("bad")
    assert gate.num_drafts(requests)[0] == 4
