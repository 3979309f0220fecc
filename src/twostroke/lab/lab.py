"""Lab: the one experiment that runs, or ran last."""

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
ORDER = "abbabaab"
"""Of the runs: turned round in each pair, so that whatever gets slowly warmer or busier meets both sides alike."""
MOST_LANES = 24
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
        workload = asdict(self.workload)
        return {"number": self.number, "story": story, "a": self.a.given, "b": self.b.given, "workload": workload}


class Lab:
    """Runs experiments, one at a time, beside whatever else this process does. For one event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._status: dict[str, Any] = {"state": "idle"}
        self._number = 0

    def offers(self) -> dict[str, Any]:
        """What can be asked for."""
        stories = [story.to_dict() for story in STORIES]
        return {
            "stories": stories,
            "switches": [asdict(switch) for switch in SWITCHES],
            "workload": asdict(LabWorkload()),
        }

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
        self._status = {"state": "running", "experiment": experiment.to_dict(), "doing": "It begins", "results": {}}
        self._task = asyncio.create_task(self._run(experiment), name="twostroke-lab")
        self._task.add_done_callback(self._ended)
        return self._status

    async def stop(self) -> bool:
        """Ends what runs, its processes included; False where nothing does."""
        task = self._task
        if task is None:
            return False
        if not task.cancelling() and task.cancel():  # twice would keep it from closing its engines
            self._status |= {"doing": "It is being stopped"}
            self._status.pop("progress", None)
        await asyncio.wait([task])
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
        try:
            runs = await self._measure(experiment)
            results = {name: await asyncio.to_thread(_shown, runs[name]) for name in runs}
            verdict = _verdict(experiment, runs["a"], runs["b"])
            self._status |= {"state": "done", "doing": "", "results": results, "verdict": verdict}
        except Exception as error:
            causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            if not all(isinstance(cause, TwostrokeError) for cause in causes):
                log.error("an experiment failed", exc_info=error)
            self._status |= {"state": "failed", "doing": "", "problem": str(causes[0])}

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Also of one that was stopped before it had begun, and of which nothing ran. Only now may another begin: it
        would be told to have been stopped."""
        self._task = None
        if task.cancelled():
            self._status |= {"state": "stopped", "doing": ""}

    async def _measure(self, experiment: _Experiment) -> dict[str, list[TrialRun]]:
        """Both sides in turns, never at once: they would take the processor from each other."""
        requests = experiment.workload.requests()
        trials = {"a": Trial(experiment.a), "b": Trial(experiment.b)}
        runs: dict[str, list[TrialRun]] = {"a": [], "b": []}
        try:
            self._status["doing"] = "Both engines are being started"
            async with asyncio.TaskGroup() as starting:
                for trial in trials.values():
                    starting.create_task(trial.start())
            for number, name in enumerate(ORDER):

                def tell(num_ended: int, number: int = number, name: str = name) -> None:
                    doing = f"Run {number + 1} of {len(ORDER)}, side {name.upper()}"
                    done = (number + num_ended / len(requests)) / len(ORDER)
                    told = {"done": done, "num_ended": num_ended, "num_requests": len(requests)}
                    self._status |= {"doing": doing, "progress": told}

                runs[name].append(await trials[name].run(requests, tell))
        finally:
            await _to_the_end(asyncio.gather(*(trial.close() for trial in trials.values()), return_exceptions=True))
        return runs


async def _to_the_end(work: asyncio.Future[Any]) -> None:
    """Waits for what must not be left half done; who is cancelled meanwhile is so behind it."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _object(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidParameter(name, given, "must be an object")
    return given


def _shown(runs: Sequence[TrialRun]) -> dict[str, Any]:
    """All figures, and the lanes of the run that took the median time."""
    figures = {name: None if spread is None else asdict(spread) for name, spread in _together(runs).items()}
    middle = sorted(runs, key=lambda run: run.figures.duration_s)[(len(runs) - 1) // 2]
    lanes = [
        {
            "id": lane["id"],
            "segments": lane["segments"][:MOST_SEGMENTS],
            "num_more": max(0, len(lane["segments"]) - MOST_SEGMENTS),
        }
        for lane in middle.lanes(MOST_LANES)
    ]
    return {"figures": figures, "lanes": lanes, "num_runs": len(runs), "num_requests": len(middle.token_ids)}


def _together(runs: Sequence[TrialRun]) -> Measured:
    """Their figures together."""
    return measured([run.figures for run in runs])


def _verdict(experiment: _Experiment, a: Sequence[TrialRun], b: Sequence[TrialRun]) -> dict[str, Any]:
    """Whether the tokens are equal, which figures are apart, and what is to be said of it."""
    tokens = Tokens.of([run.token_ids for run in a], [run.token_ids for run in b])
    formats = [side.engine.cache.kv_cache_dtype for side in (experiment.a, experiment.b)]
    mine, theirs = _together(a), _together(b)
    story = experiment.story
    return {
        "tokens": tokens.told(may_differ=formats[0] != formats[1]),
        "num_equal": tokens.num_equal,
        "num_requests": tokens.num_requests,
        "apart": {name: apart(mine[name], theirs[name]) for name in mine},
        "sentences": [] if story is None else [asdict(said) for said in story.tell(mine, theirs, tokens)],
    }
