"""When a draft is tried where drafts do not pay, and for whom: the text may have become one that is easy to guess."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.request import Request


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
