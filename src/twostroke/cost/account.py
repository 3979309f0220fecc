"""What drafting has cost so far: an account that keeps it from ever costing more than a small share of the time.

Figures that a plan goes by may be wrong: the machine slows down, a text turns, a prompt has to be read before the
first draft. What a step with drafts took, and what came of it, is known afterwards. So every such step is booked
against the same tokens made without drafts, and who owes too much stops, whatever the next plan promises.
"""

from __future__ import annotations

WRITTEN_OFF = 0.007
"""Of the time of all steps: what drafting may cost in the long run."""
MOST_OWED = 4.0
"""In steps without drafts: a few unlucky ones are no reason to stop."""
MOST_SAVED = 4.0
"""The same: enough to find out about the next text or two."""


class DraftAccount:
    r"""Seconds lost to drafting that were neither won back nor written off.

    ```
    owed   limit |        ____               it stops, and goes on when all is paid
                 |      _/    \___
               0 |   __/          \___       each second of any work writes off a small part
           saved |__/  lost                 what drafts have won pays for later tries, up to a limit
    ```

    >>> account = DraftAccount()
    >>> account.book(seconds=1.0, lost_s=0.3, plain_s=0.1)
    >>> account.owes, account.is_stopped
    (True, False)
    >>> account.book(seconds=1.0, lost_s=0.2, plain_s=0.1)
    >>> account.is_stopped
    True
    """

    def __init__(self) -> None:
        self._owed_s = 0.0
        self.is_stopped = False
        """It owed too much, and has not paid all of it yet."""

    @property
    def owes(self) -> bool:
        """Nothing is to be tried now."""
        return self._owed_s > 0.0

    def book(self, seconds: float, lost_s: float, plain_s: float) -> None:
        """One step.

        Args:
            seconds: that it took.
            lost_s: of it, more than its tokens would have taken without drafts; negative where drafts have won.
            plain_s: of a step of these requests without drafts.
        """
        owed_s = self._owed_s + lost_s
        if owed_s > 0.0:
            owed_s = max(0.0, owed_s - WRITTEN_OFF * seconds)
        self._owed_s = max(-MOST_SAVED * plain_s, owed_s)
        if self._owed_s > MOST_OWED * plain_s:
            self.is_stopped = True
        elif self._owed_s <= 0.0:
            self.is_stopped = False
