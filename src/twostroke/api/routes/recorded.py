"""The states of a recording, where a server would tell its own."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.http_errors import HTTPError
from twostroke.live.recording import RecordedLog


def recorded_router(recording: RecordedLog) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["observe"])
    reading = asyncio.Lock()
    last = max(0, recording.num_steps - 1)

    @router.get("/live/state")
    async def state(
        step: Annotated[int | None, Query()] = None,
        after_s: Annotated[float | None, Query()] = None,
        least_step: Annotated[int, Query()] = 0,
    ) -> Response:
        """The state behind a step, from 0 on; or behind the last one that was decided by a time, but at least behind
        `least_step`; without either, behind the last of all."""
        if step is None:
            step = last if after_s is None else min(last, max(least_step, recording.step_at(after_s)))
        if not 0 <= step <= last:
            raise HTTPError(400, f"step={step}: must be from 0 to {last}, the last one recorded.", param="step")
        async with reading:  # it goes on from where it was asked last
            return json_response(await asyncio.to_thread(recording.state, step))

    @router.get("/v1/models")
    async def models() -> Response:
        """None is loaded."""
        return json_response({"object": "list", "data": []})

    return router
