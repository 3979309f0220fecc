"""Delivery times of a step's tokens from the sampler to their connections, noted by the HTTP process."""

from __future__ import annotations

from twostroke.cluster.messages import Progress
from twostroke.events import TokensDelivered


def delivery_of(progress: Progress, process: str, received_s: float, now_s: float) -> TokensDelivered:
    """Return the delivery event of a report whose tokens were just written.

    Args:
        progress: with at least one update.
        process: name of the engine in events.
        received_s: time at which the report was read.
        now_s: time at which the last token was written.
    """
    return TokensDelivered(now_s, process, progress.updates[0].time_s, progress.sent_s, received_s)
