"""Options of `twostroke train-medusa`; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostroke.config.checks import number, whole_number
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
        whole_number("num_heads", self.num_heads, 1, 16)
        whole_number("num_layers", self.num_layers, 1, 16)
        whole_number("window", self.window, self.num_heads + 2)
        whole_number("batch_windows", self.batch_windows, 1)
        whole_number("seed", self.seed, 0)
        number("learning_rate", self.learning_rate, 0.0, 1.0, "a number above 0, at most 1", low_open=True)
        number("save_every_s", self.save_every_s, 0.0, 1e9, "a number of seconds")
        if self.steps is not None:
            whole_number("steps", self.steps, 1)
        if self.minutes is not None:
            number("minutes", self.minutes, 0.0, 1e6, "a number of minutes above 0", low_open=True)
            if self.steps is not None:
                raise InvalidParameter("minutes", self.minutes, "cannot be given beside steps", "Give one of them.")
