"""One side of an experiment: an engine of its own, in processes of its own, asked what the workload says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.engine.output_processor import OutputKind
from twostroke.engine.pooled_engine import PooledEngine
from twostroke.engine.remote_engine import RemoteEngine
from twostroke.errors import EngineError
from twostroke.events import Event, StepScheduled
from twostroke.explain.recorder import FlightRecorder
from twostroke.explain.timeline import timeline_of
from twostroke.lab.figures import Figures, figures_of
from twostroke.lab.settings import Side
from twostroke.lab.workload import AskedFor
from twostroke.log import get_logger
from twostroke.outputs import RequestOutput
from twostroke.packed_events import PackedEvent
from twostroke.sampling_params import SamplingParams

log = get_logger(__name__)

Tell = Callable[[str, int, int], object]
"""Hears what is being done, and how many of how many requests have ended."""
WARM_UP_TOKENS = 8
MOST_LANES = 24


@dataclass(frozen=True, slots=True)
class SideResult:
    """What came of it."""

    figures: Figures
    token_ids: tuple[tuple[int, ...], ...]
    """Of each request's answer."""
    lanes: tuple[dict[str, Any], ...]
    """Of the first requests: label, start and duration of each segment, in milliseconds after the first arrival."""


class _Notes:
    """Keeps an engine's events; a `PackedEventLog`."""

    def __init__(self) -> None:
        self.recorder = FlightRecorder(minutes=10)
        self.most_running = 0

    def append(self, event: Event, packed: PackedEvent) -> None:
        """One event, in order."""
        self.recorder.append(event, packed)
        if isinstance(event, StepScheduled):
            self.most_running = max(self.most_running, event.batch.num_running)


async def run_side(side: Side, requests: Sequence[AskedFor], tell: Tell) -> SideResult:
    """Starts the engine, asks, and ends it, however it goes.

    Raises:
        SetupError: the engine cannot be had with these settings.
        TwostrokeError: a request cannot be run, or the engine died.
    """
    notes = _Notes()
    engine: RemoteEngine | PooledEngine
    if side.pools is None:
        engine = RemoteEngine(side.engine, listeners=(notes,), on_trouble=_note)
    else:
        engine = PooledEngine(side.engine, side.pools, listeners=(notes,), on_trouble=_note)
    try:
        tell("the engine is being started", 0, len(requests))
        await engine.start()
        tell("it is being warmed up", 0, len(requests))
        warm_up = AskedFor(0.0, "def warm_up():\n", WARM_UP_TOKENS, 0)
        await _answer(engine, warm_up, "warm-up", engine.now_s())
        await engine.reset_prefix_cache()
        notes.most_running = 0
        begin_s = engine.now_s()
        outputs = await _ask_all(engine, requests, begin_s, tell)
        facts = engine.facts
        figures = figures_of(
            outputs,
            begin_s,
            most_running=notes.most_running,
            kv_capacity_tokens=facts.num_blocks * facts.block_size,
        )
        names = [output.request_id for output in outputs[:MOST_LANES]]
        lanes = await asyncio.to_thread(_lanes, notes.recorder, names, begin_s)
        token_ids = tuple(tuple(output.outputs[0].token_ids) for output in outputs)
        return SideResult(figures, token_ids, lanes)
    finally:
        await engine.close()


async def _ask_all(
    engine: RemoteEngine | PooledEngine, requests: Sequence[AskedFor], begin_s: float, tell: Tell
) -> list[RequestOutput]:
    num_ended = 0
    tell("requests run", 0, len(requests))

    async def ask(index: int, asked: AskedFor) -> RequestOutput:
        nonlocal num_ended
        await asyncio.sleep(max(0.0, begin_s + asked.arrival_s - engine.now_s()))
        output = await _answer(engine, asked, f"request-{index}", max(begin_s + asked.arrival_s, begin_s))
        num_ended += 1
        tell("requests run", num_ended, len(requests))
        return output

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(index, asked)) for index, asked in enumerate(requests)]
    return [task.result() for task in tasks]


async def _answer(engine: RemoteEngine | PooledEngine, asked: AskedFor, name: str, arrival_s: float) -> RequestOutput:
    """The whole answer to one request."""
    params = SamplingParams(max_tokens=asked.max_tokens, seed=asked.seed, temperature=0.0, ignore_eos=True)
    prompt = await asyncio.to_thread(engine.inputs.process, asked.prompt, params)
    woken = asyncio.Event()
    stream = engine.generate(prompt, request_id=name, arrival_time_s=arrival_s, kind=OutputKind.FINAL)
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


def _lanes(recorder: FlightRecorder, names: Sequence[str], begin_s: float) -> tuple[dict[str, Any], ...]:
    events = list(recorder.events())
    lanes: list[dict[str, Any]] = []
    for name in names:
        (lane,) = timeline_of(events, name).lanes
        segments = [
            [str(segment.label), 1e3 * (segment.start_s - begin_s), 1e3 * segment.duration_s, segment.reason]
            for segment in lane.segments
        ]
        lanes.append({"id": name, "segments": segments})
    return tuple(lanes)


def _note(cause: str) -> None:
    log.warning("an experiment's engine: %s", cause)
