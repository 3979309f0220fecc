"""ASGI application: routes behind the request gate, and one shape for all errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.calls import embeddings_router, generate_router, messages_router, responses_router
from twostroke.api.context import ServerContext
from twostroke.api.gate import App, RequestGate
from twostroke.api.http_errors import ErrorAnswer, HTTPError, error_body, in_api_format, validation_answer
from twostroke.api.observation import Observation
from twostroke.api.openapi import published_schema
from twostroke.api.routes.capabilities import capabilities_router
from twostroke.api.routes.history import history_router, live_router, observe_router
from twostroke.api.routes.models import models_router
from twostroke.api.routes.ollama import ollama_models_router, ollama_router
from twostroke.api.routes.operations import lab_router, operations_router, pools_router
from twostroke.api.routes.page import page_router
from twostroke.api.routing import Methods, RefusedBody, allowed_methods, known_routes
from twostroke.client.engine_client import EngineClient, ScalablePools
from twostroke.config.server import ServerConfig
from twostroke.errors import TwostrokeError
from twostroke.lab.lab import Lab
from twostroke.version import __version__

ROUTERS = (
    generate_router,
    messages_router,
    responses_router,
    embeddings_router,
    ollama_router,
    ollama_models_router,
    models_router,
    capabilities_router,
    observe_router,
    live_router,
    operations_router,
    pools_router,
    lab_router,
)
NO_TEXTS = "this server does not keep prompts; start it with --live-text to see them."


def build_app(
    engine: EngineClient,
    config: ServerConfig,
    model: str,
    observation: Observation,
    pools: ScalablePools | None = None,
    lab: Lab | None = None,
) -> App:
    """Return the application: CORS, then the gate, then the routes.

    Args:
        engine: a started engine.
        config: settings of the server.
        model: model name as the user gave it; clients use it unless served_model_name is set.
        observation: receives the engine's events.
        pools: the same engine, if it has several processes.
        lab: the lab of experiments, if it is enabled.
    """
    context = ServerContext.of(engine, config, model, observation, pools, lab)
    # the interactive documentation pages would load scripts from other hosts
    app = FastAPI(title="Twostroke", version=__version__, docs_url=None, redoc_url=None)
    routers = [make_router(context) for make_router in ROUTERS]
    routers.append(history_router(observation.recorder.events, observation.texts, why_no_texts=NO_TEXTS))
    routers.append(page_router(has_lab=lab is not None, has_keys=bool(config.api_key)))
    known = [*app.routes, *(route for router in routers for route in router.routes)]
    for router in routers:
        app.include_router(router)
    app.openapi = lambda: published_schema(app)
    answer_errors(app)
    routes: Any = Methods(app)  # ASGI app types of Starlette and ours differ
    gate: Any = RequestGate(routes, config, engine.now_s, context.admission, observation.answers, known_routes(known))
    if config.cors_origins:
        return CORSMiddleware(gate, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"])
    return gate


def answer_errors(app: FastAPI) -> None:
    """Register handlers that answer every error in the shape of its route's API."""

    async def known(request: Request, error: Exception) -> Response:
        return _response(request, error_body(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(request, validation_answer(error.errors()))

    async def by_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, RefusedBody):
            return _response(request, error.answer)
        told: Any = error.detail
        message = f"{told}: {request.method} {request.url.path}" if error.status_code in (404, 405) else str(told)
        if isinstance(error.__cause__, UnicodeDecodeError):
            message = f"the body is not valid JSON: byte {error.__cause__.start} is not UTF-8."
        elif isinstance(error.__cause__, RecursionError):
            message = "the body is not valid JSON: its lists and objects are nested too deeply."
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:  # the framework names only the methods of one route of the path
            headers["allow"] = ", ".join(allowed_methods(request.app, request.scope))
        return _response(request, HTTPError(error.status_code, message, headers=headers).answer)

    app.add_exception_handler(TwostrokeError, known)
    app.add_exception_handler(HTTPError, known)
    app.add_exception_handler(RecursionError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, by_framework)
    app.add_exception_handler(Exception, known)


def _response(request: Request, answer: ErrorAnswer) -> Response:
    answer = in_api_format(request.url.path, answer)
    return json_response(answer.body, answer.headers, answer.status)
