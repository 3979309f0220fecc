"""Options of `twostroke train-medusa`; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostroke.config.checks import check_int, check_number
from twostroke.errors import InvalidParameter

DEFAULT_MINUTES = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions:
    """Output, architecture and training of the heads."""

    output: Path | None = None
    """Folder to write; default: the model's name and '-medusa', in the current folder."""
    num_heads: int = 4
    """Tokens that are drafted at once."""
    num_layers: int = 1
    """Blocks of a head; more draft better, and take longer."""
    minutes: float | None = None
    """Minutes to train; default: 30."""
    steps: int | None = None
    """Updates to train, instead of minutes."""
    resume: bool = False
    """Continue from the checkpoint in the output folder; a larger budget continues a run that has ended."""
    window: int = 512
    """Tokens per window of the text."""
    batch_windows: int = 4
    """Windows per update."""
    learning_rate: float = 1e-3
    """Highest learning rate of AdamW."""
    seed: int = 0
    """Seed of the order of the windows."""
    save_every_s: float = 120.0
    """Seconds between checkpoints."""
    threads: int | None = None
    """Threads of the model's operators; default: the processors that this process may use."""

    def __post_init__(self) -> None:
        check_int("num_heads", self.num_heads, 1, 16)
        check_int("num_layers", self.num_layers, 1, 16)
        check_int("window", self.window, self.num_heads + 2)
        check_int("batch_windows", self.batch_windows, 1)
        check_int("seed", self.seed, 0)
        check_number("learning_rate", self.learning_rate, 0.0, 1.0, "a number above 0, at most 1", low_open=True)
        check_number("save_every_s", self.save_every_s, 0.0, 1e9, "a number of seconds")
        if self.steps is not None:
            check_int("steps", self.steps, 1)
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0.0, 1e6, "a number of minutes above 0", low_open=True)
            if self.steps is not None:
                raise InvalidParameter("minutes", self.minutes, "cannot be given beside steps", "Give one of them.")
