"""State shared by all routes: engine, settings, model names and clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from twostroke.api.admission import QueueAdmission, first_token_timeout_s
from twostroke.api.dialect import Dialect
from twostroke.api.generation import AnswerHead, Caller
from twostroke.api.http_errors import HTTPError
from twostroke.api.observation import Observation
from twostroke.api.protocol.chat import MESSAGES, ChatRequest
from twostroke.api.protocol.fields import MAX_UNKNOWN, WireObject
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.api.protocol.ollama import OllamaChatRequest
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.protocol.sampling import SamplingFields
from twostroke.client.engine_client import EngineClient, ScalablePools
from twostroke.client.input_processor import PromptInput
from twostroke.config.server import ServerConfig
from twostroke.errors import shown
from twostroke.lab.lab import Lab
from twostroke.log import get_logger
from twostroke.tokenizer.chat_template import CALL_TEXTS, CALLS, TOOLS

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """State of one server."""

    engine: EngineClient
    config: ServerConfig
    dialect: Dialect
    model_names: tuple[str, ...]
    """Names of the model that clients may use; answers default to the first."""
    started_s: int
    """Time of the start, in whole seconds since 1970."""
    admission: QueueAdmission
    observation: Observation
    pools: ScalablePools | None
    """The engine's pools; None if one process does everything."""
    lab: Lab | None
    """The lab of experiments, if it is enabled."""

    @classmethod
    def of(
        cls,
        engine: EngineClient,
        config: ServerConfig,
        model: str,
        observation: Observation | None = None,
        pools: ScalablePools | None = None,
        lab: Lab | None = None,
    ) -> ServerContext:
        """Return the context of a started engine. Clients call the model `model` unless served_model_name is set.

        `observation` receives the engine's events; without it no history is available.
        """
        engine.inputs.chat_template.compile_now()
        return cls(
            engine=engine,
            config=config,
            dialect=Dialect(config.tool_call_parser, config.reasoning_parser),
            model_names=config.served_model_name or (model,),
            started_s=int(time.time()),
            admission=QueueAdmission(engine, config),
            observation=observation or Observation(config, model, engine.now_s()),
            pools=pools,
            lab=lab,
        )

    def caller(self, request: Request, operation: str, body: WireObject | None = None) -> Caller:
        """Return the caller of a request. Its arrival time is when the gate had read the whole body."""
        state = request.scope["state"]
        tracer, texts = self.observation.tracer, self.observation.texts
        tenant: str = state.get("tenant", "")

        def announce(request_id: str, prompt: PromptInput) -> None:
            if texts is not None:
                texts.keep(request_id, tenant, prompt)
            if tracer is not None:
                tracer.begin(request_id, operation, dict(request.headers), _attributes(body))

        return Caller(
            arrival_time_s=state.get("arrival_time_s", self.engine.now_s()),
            admission=self.admission,
            tenant=tenant,
            announce=None if tracer is None and texts is None else announce,
            first_token_timeout_s=first_token_timeout_s(request.headers),
        )

    def head(self, prefix: str, model: str | None, wanted: str | None = None) -> AnswerHead:
        """Return the head of an answer.

        Args:
            prefix: prefix of the id, such as cmpl.
            model: model name in the request, if any.
            wanted: the caller's request id, if any.

        Raises:
            HTTPError: 404, the model does not exist.
        """
        return AnswerHead(f"{prefix}-{wanted or uuid.uuid4().hex}", self.check_model(model), int(time.time()))

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer.

        Raises:
            HTTPError: 404, the model does not exist.
        """
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        known = ", ".join(map(repr, self.model_names))
        message = f"the model {shown(name)} does not exist; this server has {known}."
        raise HTTPError(404, message, code="model_not_found", param="model")

    def unknown_fields(self, request: WireObject) -> list[str]:
        """Return paths of the fields that are unused, also by the model's chat template."""
        reads = self.engine.inputs.chat_template.mentions
        unknown = request.unknown_fields
        return [path for path in unknown if not (path.startswith(MESSAGES) and reads(path.rpartition(".")[2]))]

    def check_fields(self, request: WireObject, chat: ChatRequest | None = None) -> Mapping[str, str]:
        """Return headers that name the unknown fields, and the parts that the model does not see.

        Args:
            request: the request as sent.
            chat: the equivalent chat, if the request is a conversation of another API.

        Raises:
            HTTPError: 400, there are unknown or unseen fields and the server is strict, or there are too many.
            InvalidParameter: its parameters are too long.
        """
        if isinstance(request, SamplingFields):
            self.admission.check_items(request)
        unknown = self.unknown_fields(request)
        asked = request if isinstance(request, ChatRequest) else chat
        unseen: Mapping[str, str] = {}
        if asked is not None and (asked.tools or any(message.get("tool_calls") for message in asked.messages)):
            unseen = self._unseen_parts_header(request, asked)
        return {**self._unknown_fields_header(unknown), **unseen} if unknown else unseen

    def _unknown_fields_header(self, unknown: Sequence[str]) -> Mapping[str, str]:
        """Return a header that names the unknown fields."""
        if len(unknown) > MAX_UNKNOWN:
            message = f"more than {MAX_UNKNOWN} fields of the request are unknown, such as {unknown[0][:64]!r}."
            raise HTTPError(400, message, code="unknown_field", param=unknown[0][:64])
        names = ", ".join(_printable(name) for name in unknown)
        if self.config.strict:
            message = f"unknown fields: {names}. Leave them out, or start the server without --strict."
            raise HTTPError(400, message, code="unknown_field", param=unknown[0][:64])
        for name in unknown:
            self.observation.answers.ignored(name[:64])
        log.warning("ignored unknown fields of a request: %s", names)
        return {"x-ignored-params": names}

    def _unseen_parts_header(self, request: WireObject, asked: ChatRequest) -> Mapping[str, str]:
        """Return a header that names the parts of a conversation that the chat template does not render.

        Unrendered tools are still used if a forced call or a structured output makes the model write a call. Calls of
        earlier turns and the text beside them are never refused, so a client can always send back the server's answers.
        """
        is_free = asked.tool_choice in (None, "auto") and asked.structured_outputs is None
        template = self.engine.inputs.chat_template
        unseen = template.unwritten(asked.messages, has_tools=bool(asked.tools) and is_free)
        if TOOLS in unseen and self.config.strict:
            message = "tools: this model's chat template does not render them, so the model would not see them."
            remedy = (
                "Leave them out, require a call (tool_choice), or start the server with a --chat-template that renders "
                "them, or without --strict."
            )
            raise HTTPError(400, f"{message} {remedy}", code="unseen_field", param="tools")
        calls, texts = _CALL_PATHS[type(request)]
        paths = {TOOLS: "tools", CALLS: calls, CALL_TEXTS: texts}
        return {"x-unseen-params": ", ".join(paths[name] for name in unseen)} if unseen else {}


_CALL_PATHS: Mapping[type[WireObject], tuple[str, str]] = {
    ChatRequest: ("messages.tool_calls", "messages.content"),
    CountTokensRequest: ("messages.content.tool_use", "messages.content.text"),
    MessagesRequest: ("messages.content.tool_use", "messages.content.text"),
    ResponsesRequest: ("input.function_call", "input.message"),
    OllamaChatRequest: ("messages.tool_calls", "messages.content"),
}
"""Paths of the calls of earlier turns, and of the text of a turn with calls, by type of request."""


def _printable(name: str) -> str:
    """Return a client's field name, made safe for headers and log lines."""
    ascii_only = name.encode("ascii", "backslashreplace").decode()[:64]
    return "".join(c if c.isprintable() else "?" for c in ascii_only)


def _attributes(body: WireObject | None) -> dict[str, str | int | float]:
    """Return the given fields of a request under the names of OpenTelemetry's GenAI conventions."""
    names = ("temperature", "top_p", "top_k", "seed", "max_tokens", "presence_penalty", "frequency_penalty")
    given = {f"gen_ai.request.{name}": getattr(body, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}
