"""Loggers of the library: standard logging, no handlers of our own, one line per decision."""

from __future__ import annotations

import logging
import math


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; the application decides where lines go."""
    return logging.getLogger(name)


class RateLimitFilter(logging.Filter):
    """Filter that passes a repeated warning once per interval; that line counts the suppressed ones before it.

    It is for warnings that clients can cause as often as they like. Errors, which are internal, always pass.

    Args:
        every_s: seconds between two lines of the same message.
    """

    _MAX_MESSAGES = 100

    def __init__(self, every_s: float = 1.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._passed_s: dict[object, float] = {}
        self._num_held_back: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written."""
        if record.levelno > logging.WARNING:
            return True
        message, now_s = record.msg, record.created
        if abs(now_s - self._passed_s.get(message, -math.inf)) < self._every_s:  # a clock may be set back
            self._num_held_back[message] = self._num_held_back.get(message, 0) + 1
            return False
        if message not in self._passed_s and len(self._passed_s) >= self._MAX_MESSAGES:
            self._passed_s.clear()
            self._num_held_back.clear()
        self._passed_s[message] = now_s
        if num_held_back := self._num_held_back.pop(message, 0):
            record.msg = f"{message} ({num_held_back:,} more like it since the last such line)"
        return True
