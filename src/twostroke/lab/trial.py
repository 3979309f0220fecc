"""One side of an experiment: an engine in processes of its own that runs the workload several times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.errors import EngineError
from twostroke.event_codec import PackedEvent, unpack
from twostroke.events import StepScheduled
from twostroke.explain.recorder import FlightRecorder
from twostroke.explain.timeline import timeline_of
from twostroke.lab.figures import Figures, figures_of
from twostroke.lab.settings import Side
from twostroke.lab.workload import LabRequest
from twostroke.log import get_logger
from twostroke.outputs import RequestOutput
from twostroke.sampling_params import SamplingParams

log = get_logger(__name__)

ProgressCallback = Callable[[int], object]
"""Callback for progress; called with the number of requests that have ended."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TrialRun:
    """Results of one run."""

    figures: Figures
    token_ids: tuple[tuple[int, ...], ...]
    """Token ids of each request's answer."""
    recorder: FlightRecorder
    begin_s: float

    def lanes(self, most: int) -> list[dict[str, Any]]:
        """Return, for the first requests, each segment's label, start (ms after the first arrival), duration (ms) and
        reason."""
        events = list(self.recorder.events())
        lanes: list[dict[str, Any]] = []
        for index in range(min(most, len(self.token_ids))):
            (lane,) = timeline_of(events, _name(index)).lanes
            segments = [
                [str(segment.label), 1e3 * (segment.start_s - self.begin_s), 1e3 * segment.duration_s, segment.reason]
                for segment in lane.segments
            ]
            lanes.append({"id": _name(index), "segments": segments})
        return lanes


class _RunEvents:
    """Recorder of an engine's events during one run; a `PackedEventLog`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Discard the events of the previous run."""
        self.recorder = FlightRecorder(minutes=10)
        self.most_running = 0

    def append(self, packed: PackedEvent) -> None:
        self.recorder.append(packed)
        event = unpack(packed)
        if isinstance(event, StepScheduled):
            self.most_running = max(self.most_running, event.batch.num_running)


class Trial:
    """Engine of one side, and the runs on it; its creator must close it in every case."""

    def __init__(self, side: Side) -> None:
        self._notes = _RunEvents()
        self._num_processes = 1 if side.pools is None else 2
        self._engine: RemoteEngine | PooledEngine
        if side.pools is None:
            self._engine = RemoteEngine(side.engine, listeners=(self._notes,), on_trouble=_log_trouble)
        else:
            self._engine = PooledEngine(side.engine, side.pools, listeners=(self._notes,), on_trouble=_log_trouble)

    async def start(self) -> None:
        """Start the engine and warm it up.

        Raises:
            SetupError: the engine cannot start with these settings.
        """
        await self._engine.start()
        warm_up = LabRequest(0.0, "def warm_up():\n", WARM_UP_TOKENS, 0)
        await _answer(self._engine, warm_up, "warm-up", self._engine.now_s())

    async def close(self) -> None:
        """Stop the engine, whether or not it has started."""
        await self._engine.close()

    async def run(self, requests: Sequence[LabRequest], tell: ProgressCallback) -> TrialRun:
        """Run all requests once, with an empty prefix cache.

        Raises:
            TwostrokeError: a request cannot be run, or the engine died.
        """
        await self._engine.reset_prefix_cache()
        self._notes.begin()
        begin_s = self._engine.now_s()
        outputs = await _run_all(self._engine, requests, begin_s, tell)
        facts = self._engine.facts
        figures = figures_of(
            outputs,
            begin_s,
            num_processes=self._num_processes,
            most_running=self._notes.most_running,
            kv_capacity_tokens=facts.num_blocks * facts.block_size,
        )
        token_ids = tuple(tuple(output.outputs[0].token_ids) for output in outputs)
        return TrialRun(figures, token_ids, self._notes.recorder, begin_s)


async def _run_all(
    engine: RemoteEngine | PooledEngine, requests: Sequence[LabRequest], begin_s: float, tell: ProgressCallback
) -> list[RequestOutput]:
    num_ended = 0
    tell(0)

    async def ask(index: int, asked: LabRequest) -> RequestOutput:
        nonlocal num_ended
        await asyncio.sleep(max(0.0, begin_s + asked.arrival_s - engine.now_s()))
        output = await _answer(engine, asked, _name(index), max(begin_s + asked.arrival_s, begin_s))
        num_ended += 1
        tell(num_ended)
        return output

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(index, asked)) for index, asked in enumerate(requests)]
    return [task.result() for task in tasks]


async def _answer(engine: RemoteEngine | PooledEngine, asked: LabRequest, name: str, arrival_s: float) -> RequestOutput:
    """Return the whole answer to one request."""
    params = SamplingParams(max_tokens=asked.max_tokens, seed=asked.seed, temperature=0.0, ignore_eos=True)
    prompt = await asyncio.to_thread(engine.inputs.process, asked.prompt, params)
    woken = asyncio.Event()
    stream = engine.generate(
        Submission(prompt=prompt, request_id=name, arrival_time_s=arrival_s, kind=OutputKind.FINAL)
    )
    stream.listen(woken.set)
    try:
        while True:
            for output in stream.take():
                if output.error is not None:
                    raise EngineError(output.error)
                if output.finished:
                    return output
            await woken.wait()
            woken.clear()
    finally:
        stream.close()


def _name(index: int) -> str:
    return f"request-{index}"


def _log_trouble(cause: str) -> None:
    log.warning("an experiment's engine: %s", cause)
