"""How long the tokens of a step take from the sampler to their connections, noted by the process that speaks HTTP."""

from __future__ import annotations

from twostroke.engine.messages import Progress
from twostroke.events import TokensDelivered


def delivery_of(progress: Progress, process: str, received_s: float, now_s: float) -> TokensDelivered:
    """Return what is to be noted of a report whose tokens were just handed out.

    Args:
        progress: with at least one update.
        process: the engine's name in events.
        received_s: when it was read.
        now_s: when the last token was written.
    """
    return TokensDelivered(now_s, process, progress.updates[0].time_s, progress.sent_s, received_s)
