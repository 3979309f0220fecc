"""What drafts are worth: how many tokens a pass is expected to make, and which drafts are worth their time.

With each draft standing with probability a, and nothing behind the first that falls, k drafts are expected to give

    E = 1 + a + a^2 + … + a^k = (1 - a^(k+1)) / (1 - a)

tokens (Leviathan et al. 2023, section 3.1). The j-th draft adds a^j to it: drafts of many requests are worth taking
in the falling order of that number, and so far as tokens per second still grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_LEVELS = 20
"""Probabilities are told apart in steps of a twentieth."""


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens of one pass over the last token and `num_drafts` drafts.

    >>> expected_tokens(0.5, 2)
    1.75
    >>> expected_tokens(1.0, 3)
    4.0
    """
    return sum(acceptance**j for j in range(num_drafts + 1))


class Acceptance:
    """How likely the next draft of a sequence stands, from what became of the last ones.

    A round of drafts that ends with the third one falling is two successes and one failure. What is older counts
    less; at the beginning a guess counts like `_PRIOR_TRIALS` drafts.
    """

    __slots__ = ("_stood", "_tried")

    _PRIOR_TRIALS = 2.0
    _KEPT = 0.93
    """Of the weight of all that was, after each round."""

    def __init__(self, prior: float) -> None:
        self._stood = prior * self._PRIOR_TRIALS
        self._tried = self._PRIOR_TRIALS

    @property
    def is_known(self) -> bool:
        """A draft was looked at: what it says is more than the guess."""
        return self._tried > self._PRIOR_TRIALS  # each round adds more than is forgotten, up to 14

    @property
    def probability(self) -> float:
        """That a draft stands, given that those before it do."""
        return self._stood / self._tried

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """A round of 1 and more drafts."""
        self._stood = self._stood * self._KEPT + num_accepted
        self._tried = self._tried * self._KEPT + num_accepted + (num_accepted < num_drafts)


class Acceptances:
    """Of all requests that have drafted; a new one is expected to do as the others do.

    Each counts once, however much it drafted: those that are easy to guess draft most, and tell least of the next.

    >>> acceptances = Acceptances()
    >>> acceptances.begin("easy")
    >>> acceptances.learn("easy", 1000, 1000)
    >>> acceptances.begin("hard")
    >>> acceptances.learn("hard", 1, 0)
    >>> [round(a, 2) for a in acceptances.expected(["easy", "hard", "new"])]
    [1.0, 0.59, 0.77]
    """

    _FIRST_GUESS = 0.7
    """Before anything is known: good enough to find out."""
    _FIRST_WEIGHT = 0.5
    """That of half a request."""
    _KEPT = 0.8
    """Of the weight of those that have ended, when another one ends."""

    def __init__(self) -> None:
        self._known: dict[str, Acceptance] = {}
        self._ended_weight = self._FIRST_WEIGHT
        self._ended = self._FIRST_GUESS * self._FIRST_WEIGHT
        """Sum of their probabilities."""

    def __contains__(self, request_id: object) -> bool:
        """It has begun."""
        return request_id in self._known

    def begin(self, request_id: str) -> None:
        """It is going to draft, if it does not yet: what comes of it is to be learned."""
        if request_id not in self._known:
            self._known[request_id] = Acceptance(self._typical())

    def learn(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """A round of 1 and more drafts, of a request that has begun and not ended."""
        self._known[request_id].learn(num_drafts, num_accepted)

    def forget(self, request_id: str) -> None:
        """It has ended; what became of its drafts still tells of the next ones."""
        ended = self._known.pop(request_id, None)
        if ended is not None and ended.is_known:
            self._ended_weight = self._ended_weight * self._KEPT + 1
            self._ended = self._ended * self._KEPT + ended.probability

    def expected(self, request_ids: Iterable[str]) -> list[float]:
        """Of each, the probability that its next draft stands."""
        typical = self._typical()
        found = (self._known.get(request_id) for request_id in request_ids)
        return [typical if known is None else known.probability for known in found]

    def _typical(self) -> float:
        known = [one.probability for one in self._known.values() if one.is_known]
        return (self._ended + sum(known)) / (self._ended_weight + len(known))


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How many drafts for each request, and what the step is expected to give."""

    num_drafts: tuple[int, ...]
    tokens: float
    """Expected of the step."""
    seconds: float
    """Expected, with the drafting."""
    plain_seconds: float
    """The same without drafts, when the step makes one token for each request."""
    drafted_tokens: float
    """Expected of the best plan with a draft at all, be it this one or worse than none, of those that take drafts in
    the falling order of their worth, equals at once; where no draft can stand, the tokens without any."""
    drafted_seconds: float
    """Its time."""

    @property
    def gain(self) -> float:
        """Tokens per second against those without drafts."""
        return self.tokens / self.seconds * self.plain_seconds / max(1, len(self.num_drafts))


def best_plan(
    acceptances: Sequence[float],
    most: int,
    step_s: Callable[[int], float],
    draft_s: Callable[[int, int], float],
    most_tokens: int | None = None,
) -> DraftPlan:
    """The drafts that make the most tokens per second.

    Args:
        acceptances: of each request, the probability that a draft stands.
        most: drafts for one request.
        step_s: seconds of a step of so many query tokens.
        draft_s: seconds to draft for so many requests, so many drafts the one with most.
        most_tokens: query tokens of the step; those that reach it are the last, even if they go beyond.

    >>> plan = best_plan([0.9, 0.1], 4, lambda n: 1.0 + 0.1 * n, lambda rows, k: 0.1 * k)
    >>> plan.num_drafts
    (4, 0)
    """
    levels = [round(acceptance * _LEVELS) for acceptance in acceptances]
    counts = Counter(levels)
    # (value of one draft, level, which draft), the most valuable first
    steps = sorted(((level / _LEVELS) ** j, level, j) for level in counts if level for j in range(1, most + 1))
    num_tokens, tokens = len(levels), float(len(levels))
    plain_s = step_s(num_tokens)
    best_rate, best_tokens, best_s, best_steps = 0.0, tokens, plain_s, 0  # of those with a draft
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
