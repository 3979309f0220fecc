"""The lab's single experiment: the one that runs, or ran last."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twostroke.errors import InvalidParameter, TwostrokeError, UnknownParameter
from twostroke.lab.figures import Measured, Tokens, apart, measured
from twostroke.lab.settings import SWITCHES, Side
from twostroke.lab.stories import BY_NAME, STORIES, Story
from twostroke.lab.trial import Trial, TrialRun
from twostroke.lab.workload import LabWorkload
from twostroke.log import get_logger

log = get_logger(__name__)

_FIELDS = ("story", "a", "b", "workload")
RUN_ORDER = "abbabaab"
"""Order of the runs: each pair is reversed, so that slow drifts of temperature or load affect both sides equally."""
MAX_LANES = 24
MAX_SEGMENTS = 120
"""Segments that are sent per lane."""


class LabBusy(TwostrokeError):
    """Error: another experiment is running."""


@dataclass(frozen=True, slots=True)
class _Experiment:
    """Two sides to compare, and their workload."""

    number: int
    story: Story | None
    a: Side
    b: Side
    workload: LabWorkload

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        story = None if self.story is None else self.story.name
        workload = asdict(self.workload)
        return {"number": self.number, "story": story, "a": self.a.given, "b": self.b.given, "workload": workload}


class Lab:
    """Runner of experiments, one at a time, beside the rest of this process. For one event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._status: dict[str, Any] = {"state": "idle"}
        self._number = 0

    def options(self) -> dict[str, Any]:
        """Return the stories, switches and default workload that can be requested."""
        stories = [story.to_dict() for story in STORIES]
        return {
            "stories": stories,
            "switches": [asdict(switch) for switch in SWITCHES],
            "workload": asdict(LabWorkload()),
        }

    def status(self) -> dict[str, Any]:
        """Return the state, progress and results of the experiment that runs, or ran last."""
        return self._status

    def start(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Start an experiment: {"story": name}, or {"a": switches, "b": switches, "workload": fields}.

        Raises:
            LabBusy: another experiment is running.
            UnknownParameter: a field, switch or story does not exist.
            InvalidParameter: a value is out of range, or settings contradict each other.
        """
        experiment = self._read(asked)
        if self._task is not None:
            doing = self._status.get("doing", "")
            raise LabBusy(f"an experiment is running ({doing}); wait for its end, or stop it (DELETE /lab/experiment).")
        self._number = experiment.number
        self._status = {"state": "running", "experiment": experiment.to_dict(), "doing": "Starting", "results": {}}
        self._task = asyncio.create_task(self._run(experiment), name="twostroke-lab")
        self._task.add_done_callback(self._ended)
        return self._status

    async def stop(self) -> bool:
        """Stop the running experiment and its processes; return False if none runs."""
        task = self._task
        if task is None:
            return False
        if not task.cancelling() and task.cancel():  # a second cancel would interrupt the closing of its engines
            self._status |= {"doing": "Stopping"}
            self._status.pop("progress", None)
        await asyncio.wait([task])
        return True

    def _read(self, asked: Mapping[str, Any]) -> _Experiment:
        for name in asked:
            if name not in _FIELDS:
                raise UnknownParameter(name, list(_FIELDS), "an experiment")
        story_name = asked.get("story")
        if story_name is None:
            parts = {name: _mapping(name, asked.get(name, {})) for name in ("a", "b", "workload")}
            workload = LabWorkload.of(parts["workload"])
            return _Experiment(self._number + 1, None, Side.of(parts["a"]), Side.of(parts["b"]), workload)
        if len(asked) > 1:
            raise InvalidParameter("story", story_name, "brings its own settings", "Leave a, b and workload out.")
        story = BY_NAME.get(story_name) if isinstance(story_name, str) else None
        if story is None:
            raise InvalidParameter("story", story_name, f"must be one of {', '.join(BY_NAME)}")
        return _Experiment(self._number + 1, story, Side.of(story.a), Side.of(story.b), story.workload)

    async def _run(self, experiment: _Experiment) -> None:
        try:
            runs = await self._measure(experiment)
            results = {name: await asyncio.to_thread(_results, runs[name]) for name in runs}
            verdict = _verdict(experiment, runs["a"], runs["b"])
            self._status |= {"state": "done", "doing": "", "results": results, "verdict": verdict}
        except Exception as error:
            causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            if not all(isinstance(cause, TwostrokeError) for cause in causes):
                log.error("an experiment failed", exc_info=error)
            self._status |= {"state": "failed", "doing": "", "problem": str(causes[0])}

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Record the end of an experiment, also if it was stopped before it began and `_run` never ran.

        Another experiment may start only after this; otherwise it would be reported as stopped.
        """
        self._task = None
        if task.cancelled():
            self._status |= {"state": "stopped", "doing": ""}

    async def _measure(self, experiment: _Experiment) -> dict[str, list[TrialRun]]:
        """Run both sides alternately, never at once: they would compete for the processor."""
        requests = experiment.workload.requests()
        trials = {"a": Trial(experiment.a), "b": Trial(experiment.b)}
        runs: dict[str, list[TrialRun]] = {"a": [], "b": []}
        try:
            self._status["doing"] = "Starting both engines"
            async with asyncio.TaskGroup() as starting:
                for trial in trials.values():
                    starting.create_task(trial.start())
            for number, name in enumerate(RUN_ORDER):

                def tell(num_ended: int, number: int = number, name: str = name) -> None:
                    doing = f"Run {number + 1} of {len(RUN_ORDER)}, side {name.upper()}"
                    done = (number + num_ended / len(requests)) / len(RUN_ORDER)
                    told = {"done": done, "num_ended": num_ended, "num_requests": len(requests)}
                    self._status |= {"doing": doing, "progress": told}

                runs[name].append(await trials[name].run(requests, tell))
        finally:
            await _wait_uncancelled(
                asyncio.gather(*(trial.close() for trial in trials.values()), return_exceptions=True)
            )
        return runs


async def _wait_uncancelled(work: asyncio.Future[Any]) -> None:
    """Wait for work that must complete; a cancellation meanwhile takes effect afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _mapping(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidParameter(name, given, "must be an object")
    return given


def _results(runs: Sequence[TrialRun]) -> dict[str, Any]:
    """Return all figures, and the lanes of the run with the median duration."""
    figures = {name: None if spread is None else asdict(spread) for name, spread in _spreads(runs).items()}
    middle = sorted(runs, key=lambda run: run.figures.duration_s)[(len(runs) - 1) // 2]
    lanes = [
        {
            "id": lane["id"],
            "segments": lane["segments"][:MAX_SEGMENTS],
            "num_more": max(0, len(lane["segments"]) - MAX_SEGMENTS),
        }
        for lane in middle.lanes(MAX_LANES)
    ]
    return {"figures": figures, "lanes": lanes, "num_runs": len(runs), "num_requests": len(middle.token_ids)}


def _spreads(runs: Sequence[TrialRun]) -> Measured:
    """Return the figures of all runs of a side."""
    return measured([run.figures for run in runs])


def _verdict(experiment: _Experiment, a: Sequence[TrialRun], b: Sequence[TrialRun]) -> dict[str, Any]:
    """Return whether tokens are equal, which figures are apart, and the story's sentences."""
    tokens = Tokens.of([run.token_ids for run in a], [run.token_ids for run in b])
    formats = [side.engine.cache.kv_cache_dtype for side in (experiment.a, experiment.b)]
    mine, theirs = _spreads(a), _spreads(b)
    story = experiment.story
    return {
        "tokens": tokens.told(may_differ=formats[0] != formats[1]),
        "num_equal": tokens.num_equal,
        "num_requests": tokens.num_requests,
        "apart": {name: apart(mine[name], theirs[name]) for name in mine},
        "sentences": [] if story is None else [asdict(said) for said in story.tell(mine, theirs, tokens)],
    }
