"""Every environment variable that Twostroke reads; nothing else may touch the environment.

TWOSTROKE_CACHE_DIR    where machine measurements are kept (default: ~/.cache/twostroke)
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder for what was measured on this machine."""
    return Path(os.environ.get("TWOSTROKE_CACHE_DIR", "~/.cache/twostroke")).expanduser()
