"""After a run: what the plan says beside what its event log says.

sizes    blocks, their bytes, the longest request: as planned, and as the engine had them
times    the requests of the run in simulated time, by the plan's step times (those of the calibration, else floors);
         and as they really were
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.errors import InvalidParameter
from twostroke.events import Event
from twostroke.planner.plan import Plan
from twostroke.planner.replay import figures, replay_log
from twostroke.scheduler.replay import layout_of
from twostroke.simulation.requests import recording_of


@dataclass(frozen=True, slots=True)
class Compared:
    """One size, both ways."""

    figure: str
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """Planned over measured, less 1.

        >>> Compared("num_blocks", 90, 100).error
        -0.1
        """
        return round(self.planned / self.measured - 1, 6)


@dataclass(frozen=True, slots=True)
class AfterRun:
    """The plan, held against one run."""

    sizes: tuple[Compared, ...]
    """Exact, where the engine was given what the plan was."""
    planned: dict[str, Any]
    """Of times, as figures() has them."""
    measured: dict[str, Any]
    are_floors: bool
    """Whether what is planned are the least times there could be, and no predictions."""


def compare(plan: Plan, events: Sequence[Event]) -> AfterRun:
    """Holds a plan against the log of one engine.

    Raises:
        InvalidParameter: the log is of another model, or none that can be replayed.
    """
    memory, started = plan.memory, recording_of(events).started
    planned = f"{memory.model} ({memory.architecture}, {memory.num_parameters} parameters"
    if not started.model.startswith(planned):
        limit = f"is of another model, {started.model}; planned was {planned})"
        raise InvalidParameter("measured", started.process, limit, "Plan the model that ran.")
    layout = layout_of(started.layout)
    replayed = replay_log(events, (), plan.step_times)
    return AfterRun(
        sizes=(
            Compared("kv_bytes_per_block", memory.layout.bytes_per_block, layout.bytes_per_block),
            Compared("num_blocks", memory.num_blocks, started.num_blocks),
            Compared("max_model_len", memory.max_model_len, started.max_model_len),
            Compared("max_num_seqs", memory.max_num_seqs, started.scheduler["max_num_seqs"]),
        ),
        planned=figures(replayed.back_test.run),
        measured=figures(replayed.measured),
        are_floors=not plan.is_predicted,
    )
