"""Server of the page for a recorded event log, without an engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import uvicorn
from fastapi import APIRouter, FastAPI, Query
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.app import answer_errors
from twostroke.api.gate import HostGuard, HostNames
from twostroke.api.http_errors import HTTPError
from twostroke.api.routes.history import history_router
from twostroke.api.routes.page import page_router
from twostroke.api.routing import Methods
from twostroke.api.serve import address_of, listen
from twostroke.engine.event_sinks import merged_events
from twostroke.live.recording import RecordedLog, is_truncated
from twostroke.version import __version__


def recorded_router(recording: RecordedLog) -> APIRouter:
    """Return the routes of a recording."""
    router = APIRouter(tags=["observe"])
    reading = asyncio.Lock()
    last = max(0, recording.num_steps - 1)

    @router.get("/live/state")
    async def state(
        step: Annotated[int | None, Query()] = None,
        after_s: Annotated[float | None, Query()] = None,
        least_step: Annotated[int, Query()] = 0,
    ) -> Response:
        """Return the state after a step, counted from 0.

        With `after_s`, return the state after the last step decided by that time, but at least after `least_step`. With
        neither, return the state after the last step.
        """
        if step is None:
            step = last if after_s is None else min(last, max(least_step, recording.step_at(after_s)))
        if not 0 <= step <= last:
            raise HTTPError(400, f"step={step}: must be from 0 to {last}, the last one recorded.", param="step")
        async with reading:  # a recording continues from its last position
            return json_response(await asyncio.to_thread(recording.state, step))

    @router.get("/v1/models")
    async def models() -> Response:
        """Return an empty list: no model is loaded."""
        return json_response({"object": "list", "data": []})

    return router


GRACE_S = 2


def view(paths: Sequence[Path], host: str, port: int) -> None:
    """Serve the page for event logs until told to stop; no model is loaded.

    Raises:
        InvalidParameter: a file cannot be read or has no event, or the host is not an address of this machine.
        UnreadableEvent: a line is not an event of this version.
        SetupError: the address cannot be listened on.
    """
    with listen(host, port) as listener:
        app = HostGuard(Methods(recorded_app(read_recording(paths))), HostNames(host))
        server = _Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=GRACE_S))
        listener.listen()
        sys.stderr.write(f"viewing  {address_of(listener)}/#live\n")
        sys.stderr.flush()
        server.run(sockets=[listener])


def read_recording(paths: Sequence[Path]) -> RecordedLog:
    """Return the event logs merged into one recording; raise what `view` raises."""
    events = merged_events(paths)
    recording = RecordedLog(events, ", ".join(path.name for path in paths))
    cut = [path.name for path in paths if is_truncated(path)]
    if cut:
        recording.add_problem(f"The last line of {', '.join(cut)} is incomplete and was skipped.")
    return recording


def recorded_app(recording: RecordedLog) -> FastAPI:
    """Return the application: the page, the states behind it, and the history routes."""
    app = FastAPI(title="Twostroke, a recording", version=__version__, docs_url=None, redoc_url=None)
    history = history_router(recording.events, why_no_texts="a recording has ids, counts and times, but no text.")
    for router in (recorded_router(recording), history, page_router()):
        app.include_router(router)
    answer_errors(app)
    return app


class _Server(uvicorn.Server):
    """Server that exits with code 0 on a signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop serving. Uvicorn's own handler would raise the signal again at the end."""
        del sig, frame
        self.should_exit = True
