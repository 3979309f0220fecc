"""Liveness of an engine process: how often it reports, and how long it may be silent."""

from __future__ import annotations

import msgspec


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Settings of the reports, as the engine process gets them."""

    every_s: float = 0.5
    """Send a report after so long without any other message."""
    step_timeout_s: float = 15.0
    """Send no report when the loop has not finished a pass for so long, beyond the time of its step."""
