"""Routes for health and operation of the server: caches, pools, and experiments (--lab)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.http_errors import HTTPError
from twostroke.api.openapi import Described
from twostroke.api.protocol.fields import WireObject
from twostroke.api.routing import BodyRoute
from twostroke.client.engine_client import PoolMember, ScalablePools
from twostroke.errors import shown
from twostroke.kv_transfer.geometry import KV_LAYOUT
from twostroke.lab.lab import Lab, LabBusy
from twostroke.pools.member import Role
from twostroke.version import __version__

_NOT_NOW: Described = {
    503: {"description": "No engine is running; the cause is in words.", "content": {"application/json": {}}}
}


def operations_router(context: ServerContext) -> APIRouter:
    """Return the routes for health and operation."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses=_NOT_NOW)
    @router.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Check that the engine commits steps while work is queued. A 503 gives the cause in words."""
        found = context.engine.health()
        body = {"status": found.state, "cause": found.cause, "num_requests": found.num_requests}
        return json_response(body, status=200 if found.is_alive else 503)

    @router.get("/ready", responses=_NOT_NOW)
    async def ready() -> Response:
        """Check whether requests are accepted now."""
        found = context.engine.health()
        return json_response({"status": found.state, "cause": found.cause}, status=200 if found.is_ready else 503)

    @router.get("/version")
    async def version() -> Response:
        """Return the version of Twostroke."""
        return json_response({"version": __version__})

    @router.get("/server_info")
    async def server_info() -> Response:
        """Describe the server and its settings, without secrets."""
        facts, found = context.engine.facts, context.engine.health()
        return json_response(
            {
                "version": __version__,
                "uptime_s": round(time.time() - context.started_s, 1),
                "models": context.model_names,
                "engine": {**dataclasses.asdict(facts), "tokenizer_path": None},
                "health": dataclasses.asdict(found),
                "settings": {
                    field.name: _shown(field.name, getattr(context.config, field.name))
                    for field in dataclasses.fields(context.config)
                },
            }
        )

    @router.post("/reset_prefix_cache", responses=_NOT_NOW)
    async def reset_prefix_cache() -> Response:
        """Drop cached prefixes; blocks of running requests are kept."""
        return json_response({"success": True, "had_blocks": await context.engine.reset_prefix_cache()})

    return router


def _shown(name: str, value: object) -> object:
    if "key" in name and name != "ssl_keyfile":
        return None if not value else "set"
    return value if isinstance(value, str | int | float | bool | tuple) or value is None else str(value)


_NO_POOLS: Described = {404: {"description": "The server has no pools.", "content": {"application/json": {}}}}


class PoolSizes(WireObject):
    """Number of workers of each pool; a pool that is left out keeps its size."""

    prefill: int | None = Field(default=None, description="Prefill workers.")
    decode: int | None = Field(default=None, description="Decode workers.")


def pools_router(context: ServerContext) -> APIRouter:
    """Return the routes for pools."""
    router = APIRouter(tags=["operations"], route_class=BodyRoute)

    @router.get("/pools", responses=_NO_POOLS)
    async def show() -> Response:
        """Show the workers, the differences between the pools, and the ratio that fits the load.

        Each worker has its pool, state, formats and number of sequences that need it. `no_room` says why the last
        increase was refused, or is null.
        """
        return _described(_pools(context))

    @router.post("/pools", responses=_NO_POOLS)
    async def resize(body: PoolSizes) -> Response:
        """Change the sizes of the pools while they serve.

        Workers that are removed finish their requests first. A size that the nodes of a cluster cannot hold is
        refused, and nothing changes.

        With --max-prefill or --max-decode the load may change the sizes again later.
        """
        pools = _pools(context)
        if body.unknown_fields:
            raise HTTPError(400, f"there is no pool {shown(body.unknown_fields[0])}; the pools are prefill and decode.")
        wanted = {Role.PREFILL: body.prefill, Role.DECODE: body.decode}
        sizes = {role: number for role, number in wanted.items() if number is not None}
        await pools.check_room(sizes)
        pools.scale(sizes)
        return _described(pools)

    return router


def _pools(context: ServerContext) -> ScalablePools:
    if context.pools is None:
        raise HTTPError(404, "this server has no pools; start it with --prefill and --decode.")
    return context.pools


def _described(pools: ScalablePools) -> Response:
    ratio = pools.suggested_ratio()
    suggested = None if ratio is None else {**dataclasses.asdict(ratio), "prefill_per_decode": ratio.prefill_per_decode}
    members = pools.members()
    workers = [dataclasses.asdict(member) for member in members]
    return json_response(
        {
            "workers": workers,
            "hand_over": _hand_over(members),
            "suggested_ratio": suggested,
            "no_room": pools.no_room or None,
        }
    )


def _hand_over(members: Sequence[PoolMember]) -> dict[str, Any] | None:
    """Return the pools' differences and how hand-overs treat them; None unless both have a running worker."""
    sides = {role: [m.formats for m in members if m.role is role and m.formats] for role in Role}
    prefill, decode = sides[Role.PREFILL], sides[Role.DECODE]
    if not prefill or not decode:
        return None
    differs: dict[str, dict[str, list[str | int]]] = {}
    for name in dict.fromkeys(name for formats in (*prefill, *decode) for name in formats):
        ours, theirs = (list(dict.fromkeys(f[name] for f in side if name in f)) for side in (prefill, decode))
        if ours != theirs or len(ours) > 1:
            differs[name] = {Role.PREFILL.value: ours, Role.DECODE.value: theirs}
    return {
        "differs": differs,
        "converts_kv": any(name in differs for name in KV_LAYOUT),
        "may_drift": any(name not in KV_LAYOUT for name in differs),
    }


MAX_BYTES = 64 * 1024
"""Maximum bytes of an experiment's description."""

_NONE: Described = {404: {"description": "The lab is not enabled.", "content": {"application/json": {}}}}
_BUSY: Described = {409: {"description": "An experiment is already running.", "content": {"application/json": {}}}}


def lab_router(context: ServerContext) -> APIRouter:
    """Return the routes for experiments."""
    router = APIRouter(tags=["lab"])

    @router.get("/lab", responses=_NONE)
    async def offers() -> Response:
        """List the stories, the switches, and the fields of a workload."""
        return json_response(_lab(context).options())

    @router.get("/lab/experiment", responses=_NONE)
    async def status() -> Response:
        """Return progress and results of the running or latest experiment."""
        return json_response(_lab(context).status())

    @router.post("/lab/experiment", responses=_NONE | _BUSY)
    async def start(request: Request) -> Response:
        """Start an experiment: {"story": name}, or {"a": switches, "b": switches, "workload": fields}."""
        lab = _lab(context)
        try:
            return json_response(lab.start(_object(await request.body())))
        except LabBusy as error:
            raise HTTPError(409, str(error), code="experiment_runs") from error

    @router.delete("/lab/experiment", responses=_NONE)
    async def stop() -> Response:
        """Stop the running experiment and its processes."""
        return json_response({"stopped": await _lab(context).stop()})

    return router


def _lab(context: ServerContext) -> Lab:
    if context.lab is None:
        raise HTTPError(404, "the lab is not enabled; start the server with --lab.", code="no_lab")
    return context.lab


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BYTES:
        raise HTTPError(400, f"the experiment has {len(body)} bytes; the limit is {MAX_BYTES}.")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPError(400, f"the body must be a JSON object ({error}).") from error
