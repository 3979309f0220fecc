"""Loggers of the library: standard logging, no handlers of our own, one line per decision."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; the application decides where lines go."""
    return logging.getLogger(name)
