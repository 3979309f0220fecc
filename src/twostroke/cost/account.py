"""Account of time lost to drafting; it limits the loss to a small share of all time.

The figures behind a draft plan may be wrong: the machine slows down, the text changes, or a prompt has to be read
before the first draft. The true time and outcome of a step with drafts are known afterwards. Each such step is
compared with the same tokens made without drafts. When the accumulated loss exceeds a limit, drafting stops,
whatever the next plan promises.
"""

from __future__ import annotations

MAX_LOSS_SHARE = 0.007
"""Share of the time of all steps that drafting may cost in the long run."""
MAX_DEBT_STEPS = 4.0
"""Largest debt, in steps without drafts. A few unlucky rounds do not stop drafting."""
MAX_CREDIT_STEPS = 4.0
"""Largest credit, in steps without drafts: enough to try drafting on the next text or two."""


class DraftAccount:
    r"""Seconds lost to drafting that were neither won back nor written off.

    ```
    owed   limit |        ____               drafting stops here and resumes when the debt is zero
                 |      _/    \___
               0 |   __/          \___       each second of any work writes off a small part
           saved |__/  lost                 time saved by drafts pays for later tries, up to a limit
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
        """Whether the debt exceeded its limit and has not been paid in full since."""

    @property
    def owes(self) -> bool:
        """Whether there is a debt, so that no drafts are tried now."""
        return self._owed_s > 0.0

    def book(self, seconds: float, lost_s: float, plain_s: float) -> None:
        """Book one step.

        Args:
            seconds: time of the step.
            lost_s: excess of this time over that of its tokens without drafts; negative where drafts saved time.
            plain_s: time of one step of these requests without drafts.
        """
        owed_s = self._owed_s + lost_s
        if owed_s > 0.0:
            owed_s = max(0.0, owed_s - MAX_LOSS_SHARE * seconds)
        self._owed_s = max(-MAX_CREDIT_STEPS * plain_s, owed_s)
        if self._owed_s > MAX_DEBT_STEPS * plain_s:
            self.is_stopped = True
        elif self._owed_s <= 0.0:
            self.is_stopped = False
