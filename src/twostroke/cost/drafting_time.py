"""How long drafting takes here: rounds by the requests that draft together, and reading what a drafter has not read."""

from __future__ import annotations

from twostroke.cost.step_time import StepTimes

HICCUP = 1.5
"""So many times as long as usual is the most that is held against drafts: the rest is not their doing."""
_READ_LEARNED = 0.3
"""Weight of the latest time that was needed to read."""


class DraftingTimes:
    """Seconds of a step's drafting: one round for each draft in a row, and before the first what is to be read.

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
        """To read one token of a request that has not drafted before, or not for a while."""

    @property
    def most_together(self) -> int:
        """Requests that are known to have drafted in one step; at least one, of which nothing may be known."""
        return max(1, self._rounds.largest)

    def predicted(self, num_requests: int, num_drafts: int) -> float:
        """Without reading; nothing where nothing is known, and no more for more requests than were seen together: of
        those it is soon known.
        """
        return num_drafts * (self._rounds.predicted(max(1, min(num_requests, self.most_together))) or 0.0)

    def learn(self, num_requests: int, num_drafts: int, num_unread: int, seconds: float, now: int) -> float:
        """A step's drafting took so long.

        Args:
            num_requests: that had something to guess.
            num_drafts: of the one with most.
            num_unread: tokens of those that were asked, and had not been in the step before.
            seconds: that it took, with asking those who had nothing.
            now: counts steps.

        Returns:
            The part of these seconds that is no hiccup, by what is usual.
        """
        if num_requests and not num_unread:
            self._rounds.learn(num_requests, seconds / num_drafts, now)
        elif num_unread and self._rounds.largest:
            read_s = max(0.0, seconds - self.predicted(num_requests, num_drafts)) / num_unread
            self.read_s += (read_s - self.read_s) * _READ_LEARNED
        return min(seconds, HICCUP * (self.predicted(num_requests, max(1, num_drafts)) + num_unread * self.read_s))

    def forget(self, before: int) -> None:
        """See StepTimes."""
        self._rounds.forget(before)
