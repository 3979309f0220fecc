"""What an engine has shown so far, and how engines stand to each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twostroke.measure.report import median


@dataclass(slots=True)
class Standing:
    """One engine's figures, or why it has none (or no more)."""

    name: str
    about: dict[str, str] = field(default_factory=dict[str, str])
    ready_after_s: float | None = None
    """From starting its process to the first token of a short prompt."""
    failure: str | None = None
    figures: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Of each figure the value of each round, in tokens per second."""

    def add(self, round_number: int, figures: Mapping[str, float]) -> None:
        """Puts down one work of one round."""
        for name, value in figures.items():
            self.figures.setdefault(name, {})[round_number] = value

    def median(self, figure: str) -> float | None:
        """Over rounds; None when it has not been measured."""
        values = self.figures.get(figure)
        return median(list(values.values())) if values else None

    def ratio_to(self, other: Standing, figure: str) -> float | None:
        """Median over the rounds that both took part in, each of which compares neighbours in time."""
        mine, theirs = self.figures.get(figure, {}), other.figures.get(figure, {})
        ratios = [mine[round_number] / theirs[round_number] for round_number in mine.keys() & theirs.keys()]
        return median(ratios) if ratios else None

    def as_json(self, ours: Standing) -> dict[str, Any]:
        """For the result; a ratio above 1 is ours being faster."""
        return {
            "about": self.about,
            "ready_after_s": self.ready_after_s,
            "failure": self.failure,
            "figures": {
                name: {
                    "tok_s": list(rounds.values()),
                    "rounds": list(rounds),
                    "median_tok_s": self.median(name),
                    "twostroke_to_this": ours.ratio_to(self, name),
                }
                for name, rounds in self.figures.items()
            },
        }
