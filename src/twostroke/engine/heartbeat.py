"""How an engine process shows that it lives."""

from __future__ import annotations

import msgspec


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """What it is told of that."""

    every_s: float = 0.5
    """A process that has said nothing else for so long says that it lives."""
    step_timeout_s: float = 15.0
    """An engine that does not come round for so long, its step's own time aside, hangs: that it lives is not said."""
