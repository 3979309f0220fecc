"""Lab: the one experiment that runs, or ran last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.errors import InvalidParameter, TwostrokeError, UnknownParameter
from twostroke.lab.settings import SWITCHES, Side
from twostroke.lab.stories import BY_NAME, STORIES, Story
from twostroke.lab.trial import SideResult, run_side
from twostroke.lab.workload import LabWorkload
from twostroke.log import get_logger

log = get_logger(__name__)

_FIELDS = ("story", "a", "b", "workload")
MOST_SEGMENTS = 120
"""Of a lane that are sent."""


class LabBusy(TwostrokeError):
    """An experiment runs already."""


@dataclass(frozen=True, slots=True)
class _Experiment:
    """What is to be compared."""

    number: int
    story: Story | None
    a: Side
    b: Side
    workload: LabWorkload

    def to_dict(self) -> dict[str, Any]:
        """As it is sent."""
        story = None if self.story is None else self.story.name
        workload = self.workload.to_dict()
        return {"number": self.number, "story": story, "a": self.a.given, "b": self.b.given, "workload": workload}


class Lab:
    """Runs experiments, one at a time, beside whatever else this process does. For one event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._status: dict[str, Any] = {"state": "idle"}
        self._number = 0

    def offers(self) -> dict[str, Any]:
        """What can be asked for."""
        switches = [{"name": s.name, "title": s.title, "values": s.values, "most": s.most} for s in SWITCHES]
        stories = [story.to_dict() for story in STORIES]
        return {"stories": stories, "switches": switches, "workload": LabWorkload().to_dict()}

    def status(self) -> dict[str, Any]:
        """Of the experiment that runs, or ran last: its state, how far it is, and what came of it."""
        return self._status

    def start(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Begins an experiment: {"story": name}, or {"a": switches, "b": switches, "workload": fields}.

        Raises:
            LabBusy: one runs already.
            UnknownParameter: a name that nobody knows.
            InvalidParameter: a value out of range, or settings that contradict each other.
        """
        experiment = self._read(asked)
        if self._task is not None:
            doing = self._status.get("doing", "")
            raise LabBusy(f"an experiment runs ({doing}); wait for it, or stop it (DELETE /lab/experiment).")
        self._number = experiment.number
        self._status = {"state": "running", "experiment": experiment.to_dict(), "doing": "begins", "results": {}}
        self._task = asyncio.create_task(self._run(experiment), name="twostroke-lab")
        return self._status

    async def stop(self) -> bool:
        """Ends what runs, its processes included; False where nothing does."""
        task = self._task
        if task is None:
            return False
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return True

    def _read(self, asked: Mapping[str, Any]) -> _Experiment:
        for name in asked:
            if name not in _FIELDS:
                raise UnknownParameter(name, list(_FIELDS), "an experiment")
        story_name = asked.get("story")
        if story_name is None:
            parts = {name: _object(name, asked.get(name, {})) for name in ("a", "b", "workload")}
            workload = LabWorkload.of(parts["workload"])
            return _Experiment(self._number + 1, None, Side.of(parts["a"]), Side.of(parts["b"]), workload)
        if len(asked) > 1:
            raise InvalidParameter("story", story_name, "brings its own settings", "Leave a, b and workload out.")
        story = BY_NAME.get(story_name) if isinstance(story_name, str) else None
        if story is None:
            raise InvalidParameter("story", story_name, f"must be one of {', '.join(BY_NAME)}")
        return _Experiment(self._number + 1, story, Side.of(story.a), Side.of(story.b), story.workload)

    async def _run(self, experiment: _Experiment) -> None:
        """Both sides, one after the other: two at once would take the processor from each other."""
        try:
            results: dict[str, SideResult] = {}
            requests = experiment.workload.requests()
            for name, side in (("a", experiment.a), ("b", experiment.b)):

                def tell(doing: str, num_ended: int, num_requests: int, name: str = name) -> None:
                    self._status["doing"] = f"side {name.upper()}: {doing}"
                    self._status["progress"] = {"side": name, "num_ended": num_ended, "num_requests": num_requests}

                results[name] = await run_side(side, requests, tell)
                self._status["results"][name] = _shown(results[name])
            self._status |= {"state": "done", "doing": "", "verdict": _verdict(experiment, results["a"], results["b"])}
        except asyncio.CancelledError:
            self._status |= {"state": "stopped", "doing": ""}
            raise
        except Exception as error:
            causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            if not all(isinstance(cause, TwostrokeError) for cause in causes):
                log.error("an experiment failed", exc_info=error)
            self._status |= {"state": "failed", "doing": "", "problem": str(causes[0])}
        finally:
            self._task = None


def _object(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidParameter(name, given, "must be an object")
    return given


def _shown(result: SideResult) -> dict[str, Any]:
    lanes = [{"id": lane["id"], "segments": lane["segments"][:MOST_SEGMENTS]} for lane in result.lanes]
    return {"figures": result.figures.to_dict(), "lanes": lanes}


def _verdict(experiment: _Experiment, a: SideResult, b: SideResult) -> dict[str, Any]:
    """Whether the tokens are equal, and what is to be said of it."""
    num_equal = sum(mine == theirs for mine, theirs in zip(a.token_ids, b.token_ids, strict=True))
    formats = [side.engine.cache.kv_cache_dtype for side in (experiment.a, experiment.b)]
    may_differ = formats[0] != formats[1]
    why = "K and V are rounded differently on the two sides, so tokens may differ." if may_differ else ""
    if num_equal < len(a.token_ids) and not may_differ:
        why = "That is a mistake of the engine: these settings must not change a token. Please report it."
    explanation = "" if experiment.story is None else experiment.story.explain(a.figures, b.figures)
    return {"num_equal": num_equal, "num_requests": len(a.token_ids), "why": why, "explanation": explanation}
