"""The back-test: the recorded run simulated with its own settings and compared with the measurement.

Its error is the possible error of any prediction from the same log. Beyond a limit, nothing is concluded from the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twostroke.plain_words import counted, deviation

LIMIT = 0.25
"""Largest |predicted / measured - 1| with which predictions are shown. A lever has to bring 10 %."""
MIN_REQUESTS = 10
"""Fewest requests with a token: with fewer, one unusual request decides every percentile."""
TOO_FEW_REASON = f"with fewer than {MIN_REQUESTS}, one odd request decides every percentile"
"""Reason why so few requests allow no conclusion."""
JUDGED = ("ttft_p50", "tpot_p50", "output_tok_s")
"""Figures of a run that must all be within the limit."""

_REMEDY = "Record a longer run, on a machine that does nothing else."


def errors(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Return predicted / measured - 1 of each figure that both sides have.

    >>> errors({"ttft_p50": 1.1, "itl_p50": None}, {"ttft_p50": 1.0, "itl_p50": 2.0})
    {'ttft_p50': 0.1}
    """
    return {
        name: round(predicted[name] / value - 1, 6)
        for name, value in measured.items()
        if value and predicted.get(name) is not None
    }


def unreliable(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Return the figures whose error exceeds the limit; no conclusion is drawn from these.

    >>> unreliable({"ttft_p50": 1.1, "itl_max": 0.7}, {"ttft_p50": 1.0, "itl_max": 1.0})
    ['itl_max']
    """
    return [name for name, error in errors(predicted, measured).items() if abs(error) > LIMIT]


def refusal(predicted: Mapping[str, Any], measured: Mapping[str, Any], judged: Iterable[str] = JUDGED) -> str:
    """Return why a back-test allows no conclusion: figure, limit and remedy. Empty: it is accurate enough.

    >>> refusal({"ttft_p50": 1.5}, {"ttft_p50": 1.0})
    'the back-test is off by +50.0% (ttft_p50), more than the 25% allowed. Record a longer run, on a machine that does \
nothing else.'
    """
    off_by = errors(predicted, measured)
    known = [name for name in judged if name in off_by]
    worst = max(known, key=lambda name: abs(off_by[name]), default=None)
    if worst is None or abs(off_by[worst]) <= LIMIT:
        return ""
    return f"the back-test is off by {deviation(off_by[worst])} ({worst}), more than the {LIMIT:.0%} allowed. {_REMEDY}"


def too_few(num_requests: int) -> str:
    """Return why so few requests allow no conclusion. Empty: there are enough."""
    if num_requests >= MIN_REQUESTS:
        return ""
    held = counted(num_requests, "request")
    return f"the log holds {held} with a token, fewer than the {MIN_REQUESTS} needed. {_REMEDY}"
