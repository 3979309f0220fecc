"""The switchboard: experiments beside the server, for its administrator, where it was started with --lab."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.http_errors import HTTPError
from twostroke.api.openapi import Described
from twostroke.lab.lab import Lab, LabBusy

MAX_BYTES = 64 * 1024
"""Of an experiment's description."""

_NONE: Described = {404: {"description": "There is no switchboard here.", "content": {"application/json": {}}}}
_BUSY: Described = {409: {"description": "An experiment runs already.", "content": {"application/json": {}}}}


def lab_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["lab"])

    @router.get("/lab", responses=_NONE)
    async def offers() -> Response:
        """Stories, switches, and the fields of a workload."""
        return json_response(_lab(context).offers())

    @router.get("/lab/experiment", responses=_NONE)
    async def status() -> Response:
        """The experiment that runs, or ran last: how far it is, and what came of it."""
        return json_response(_lab(context).status())

    @router.post("/lab/experiment", responses=_NONE | _BUSY)
    async def start(request: Request) -> Response:
        """Begins one: {"story": name}, or {"a": switches, "b": switches, "workload": fields}."""
        lab = _lab(context)
        try:
            return json_response(lab.start(_object(await request.body())))
        except LabBusy as error:
            raise HTTPError(409, str(error), code="experiment_runs") from error

    @router.delete("/lab/experiment", responses=_NONE)
    async def stop() -> Response:
        """Ends the one that runs, and its processes."""
        return json_response({"stopped": await _lab(context).stop()})

    return router


def _lab(context: ServerContext) -> Lab:
    if context.lab is None:
        raise HTTPError(404, "this server has no switchboard; start it with --lab.", code="no_lab")
    return context.lab


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BYTES:
        raise HTTPError(400, f"an experiment is described in at most {MAX_BYTES} bytes; these are {len(body)}.")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPError(400, f"the body must be a JSON object ({error}).") from error
