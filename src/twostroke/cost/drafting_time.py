"""Learned drafting times, by requests that draft together, and for tokens that the drafter has not read."""

from __future__ import annotations

from twostroke.cost.step_time import StepTimes

OUTLIER_FACTOR = 1.5
"""Factor on the usual time up to which a slow round counts against drafts; the rest has other causes."""
_READ_LEARNED = 0.3
"""Weight of the latest measured reading time."""


class DraftingTimes:
    """Seconds of a step's drafting: one round per draft position, after reading what the drafter has not read.

    >>> times = DraftingTimes()
    >>> times.learn(num_requests=2, num_drafts=3, num_unread=0, seconds=0.3, now=0)
    0.3
    >>> round(times.predicted(2, 4), 2)
    0.4
    >>> round(times.learn(num_requests=2, num_drafts=3, num_unread=100, seconds=10.3, now=1), 2)
    4.95
    >>> round(times.read_s, 3)
    0.03
    """

    def __init__(self) -> None:
        self._rounds = StepTimes()
        self.read_s = 0.0
        """Seconds to read one token of a request that has not drafted before, or not for a while."""

    @property
    def max_drafting_requests(self) -> int:
        """Largest number of requests known to have drafted in one step; at least 1, even if nothing is known."""
        return max(1, self._rounds.largest)

    def predicted(self, num_requests: int, num_drafts: int) -> float:
        """Return the expected drafting seconds, reading excluded; 0.0 if nothing is known.

        More requests than were seen together count as the largest known number; their time is soon measured.
        """
        return num_drafts * (self._rounds.predicted(max(1, min(num_requests, self.max_drafting_requests))) or 0.0)

    def learn(self, num_requests: int, num_drafts: int, num_unread: int, seconds: float, now: int) -> float:
        """Record the drafting time of a step.

        Args:
            num_requests: requests that had a draft.
            num_drafts: largest number of drafts of one request.
            num_unread: tokens of the drafting requests that were not in the previous step, which the drafter reads.
            seconds: drafting time, including requests for which nothing was found.
            now: step counter.

        Returns:
            The part of these seconds within `OUTLIER_FACTOR` times the usual.
        """
        if num_requests and not num_unread:
            self._rounds.learn(num_requests, seconds / num_drafts, now)
        elif num_unread and self._rounds.largest:
            read_s = max(0.0, seconds - self.predicted(num_requests, num_drafts)) / num_unread
            self.read_s += (read_s - self.read_s) * _READ_LEARNED
        return min(
            seconds, OUTLIER_FACTOR * (self.predicted(num_requests, max(1, num_drafts)) + num_unread * self.read_s)
        )

    def forget(self, before: int) -> None:
        """Forget sizes last seen before step `before`, as StepTimes does."""
        self._rounds.forget(before)
