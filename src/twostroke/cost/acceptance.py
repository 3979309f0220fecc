"""Expected value of drafts: tokens per pass, and the drafts that are worth their time.

With acceptance probability a for each draft, and all drafts after the first rejected one discarded, k drafts are
expected to give

    E = 1 + a + a^2 + … + a^k = (1 - a^(k+1)) / (1 - a)

tokens (Leviathan et al. 2023, section 3.1). The j-th draft adds a^j. Drafts of many requests are added in falling
order of a^j, for as long as tokens per second grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_LEVELS = 20
"""Resolution of probabilities: steps of a twentieth."""


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the expected tokens of one pass over the last token and `num_drafts` drafts.

    >>> expected_tokens(0.5, 2)
    1.75
    >>> expected_tokens(1.0, 3)
    4.0
    """
    return sum(acceptance**j for j in range(num_drafts + 1))


class Acceptance:
    """Estimate of the probability that the next draft of a request is accepted.

    A round in which the third draft is rejected counts as two successes and one failure. Older rounds count less.
    The initial guess counts like `_PRIOR_TRIALS` drafts.
    """

    __slots__ = ("_accepted_weight", "_verified_weight")

    _PRIOR_TRIALS = 2.0
    _KEPT = 0.93
    """Factor on the weight of all earlier rounds after each round."""

    def __init__(self, prior: float) -> None:
        self._accepted_weight = prior * self._PRIOR_TRIALS
        self._verified_weight = self._PRIOR_TRIALS

    @property
    def is_known(self) -> bool:
        """Whether a draft was verified, so that the estimate holds more than the initial guess."""
        return self._verified_weight > self._PRIOR_TRIALS  # each round adds more weight than decay removes, up to 14

    @property
    def probability(self) -> float:
        """Probability that a draft is accepted, given that those before it are."""
        return self._accepted_weight / self._verified_weight

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Record a round of one or more drafts."""
        self._accepted_weight = self._accepted_weight * self._KEPT + num_accepted
        self._verified_weight = self._verified_weight * self._KEPT + num_accepted + (num_accepted < num_drafts)


class Acceptances:
    """Acceptance estimates of all requests that have drafted; a new request starts with their mean.

    Each request counts once, however many drafts it had. Predictable requests draft most and say least about the
    next one.

    >>> acceptances = Acceptances()
    >>> acceptances.begin("easy")
    >>> acceptances.learn("easy", 1000, 1000)
    >>> acceptances.begin("hard")
    >>> acceptances.learn("hard", 1, 0)
    >>> [round(a, 2) for a in acceptances.expected(["easy", "hard", "new"])]
    [1.0, 0.59, 0.77]
    """

    _FIRST_GUESS = 0.7
    """Acceptance assumed before any measurement: high enough that drafting is tried."""
    _FIRST_WEIGHT = 0.5
    """Weight of the first guess, in requests."""
    _KEPT = 0.8
    """Factor on the weight of ended requests when another one ends."""

    def __init__(self) -> None:
        self._known: dict[str, Acceptance] = {}
        self._ended_weight = self._FIRST_WEIGHT
        self._ended = self._FIRST_GUESS * self._FIRST_WEIGHT
        """Weighted sum of the probabilities of ended requests."""

    def __contains__(self, request_id: object) -> bool:
        """Return whether the request has begun and not ended."""
        return request_id in self._known

    def begin(self, request_id: str) -> None:
        """Start an estimate for a request that is going to draft, unless it has one."""
        if request_id not in self._known:
            self._known[request_id] = Acceptance(self._typical())

    def learn(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Record a round of one or more drafts of a request that has begun and not ended."""
        self._known[request_id].learn(num_drafts, num_accepted)

    def forget(self, request_id: str) -> None:
        """Remove an ended request; its estimate still counts in the prior of later requests."""
        ended = self._known.pop(request_id, None)
        if ended is not None and ended.is_known:
            self._ended_weight = self._ended_weight * self._KEPT + 1
            self._ended = self._ended * self._KEPT + ended.probability

    def expected(self, request_ids: Iterable[str]) -> list[float]:
        """Return, for each request, the probability that its next draft is accepted."""
        typical = self._typical()
        found = (self._known.get(request_id) for request_id in request_ids)
        return [typical if known is None else known.probability for known in found]

    def _typical(self) -> float:
        known = [one.probability for one in self._known.values() if one.is_known]
        return (self._ended + sum(known)) / (self._ended_weight + len(known))


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Number of drafts for each request, and the expected outcome of the step."""

    num_drafts: tuple[int, ...]
    tokens: float
    """Expected tokens of the step."""
    seconds: float
    """Expected time of the step, drafting included."""
    plain_seconds: float
    """Expected time of the step without drafts, in which each request makes one token."""
    drafted_tokens: float
    """Expected tokens of the best plan with at least one draft, even if it is slower than no drafts.

    Candidate plans add drafts in falling order of value; drafts of equal value are added together. If no draft can be
    accepted, this is the number of tokens without drafts.
    """
    drafted_seconds: float
    """Expected time of that plan."""

    @property
    def gain(self) -> float:
        """Tokens per second relative to a step without drafts."""
        return self.tokens / self.seconds * self.plain_seconds / max(1, len(self.num_drafts))


def best_plan(
    acceptances: Sequence[float],
    most: int,
    step_s: Callable[[int], float],
    draft_s: Callable[[int, int], float],
    most_tokens: int | None = None,
) -> DraftPlan:
    """Return the drafts that give the most tokens per second.

    Args:
        acceptances: for each request, the probability that a draft is accepted.
        most: maximum number of drafts per request.
        step_s: seconds of a step by its query tokens.
        draft_s: seconds to draft, by the number of requests and the largest number of drafts of one of them.
        most_tokens: query tokens at which no more drafts are added; the last addition may exceed it.

    >>> plan = best_plan([0.9, 0.1], 4, lambda n: 1.0 + 0.1 * n, lambda rows, k: 0.1 * k)
    >>> plan.num_drafts
    (4, 0)
    """
    levels = [round(acceptance * _LEVELS) for acceptance in acceptances]
    counts = Counter(levels)
    # (value of one draft, level, position of the draft), by rising value
    steps = sorted(((level / _LEVELS) ** j, level, j) for level in counts if level for j in range(1, most + 1))
    num_tokens, tokens = len(levels), float(len(levels))
    plain_s = step_s(num_tokens)
    best_rate, best_tokens, best_s, best_steps = 0.0, tokens, plain_s, 0  # best plan with a draft
    num_rows = deepest = 0
    for taken, (value, level, j) in enumerate(reversed(steps), start=1):
        if most_tokens is not None and num_tokens >= most_tokens:
            break
        num_tokens += counts[level]
        tokens += counts[level] * value
        deepest = max(deepest, j)
        num_rows += counts[level] * (j == 1)
        seconds = step_s(num_tokens) + draft_s(num_rows, deepest)
        if tokens / seconds > best_rate:
            best_rate, best_tokens, best_s, best_steps = tokens / seconds, tokens, seconds, taken
    plain_tokens = float(len(levels))
    if best_rate <= plain_tokens / plain_s:
        return DraftPlan((0,) * len(levels), plain_tokens, plain_s, plain_s, best_tokens, best_s)
    depth = Counter(level for _, level, _ in list(reversed(steps))[:best_steps])
    num_drafts = tuple(depth[level] for level in levels)
    return DraftPlan(num_drafts, best_tokens, best_s, plain_s, best_tokens, best_s)
