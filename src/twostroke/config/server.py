"""Settings of the server: where it listens, who may ask, and how much."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from twostroke.config.checks import number, one_of, switch, text, whole_number
from twostroke.config.sizes import read_sizes
from twostroke.errors import InvalidParameter

MAX_PORT = 65535
_ORIGIN = re.compile(r"[a-zA-Z][\w+.-]*://[^\s/?#@]+|null")
_HOST = re.compile(r"\*|(\*?\.)?[\w-]+(\.[\w-]+)*\.?|[0-9a-fA-F:.]+")
"""A name, the names within a domain, or an address."""
_ENDPOINT = re.compile(r"https?://[^\s/?#]+(/\S*)?")
MetricsNames = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side of `twostroke serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine unless told otherwise."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, which is printed."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients may call the model by, the first in answers; default: as MODEL was given."""
    api_key: tuple[str, ...] = ()
    """Keys of which one is needed for every route but liveness; without any, everybody may ask. NAME:SECRET names the
    tenant; the fair queue, quotas and the prefix cache tell tenants apart."""
    admin_api_key: str | None = None
    """Key for administration. Without one it is for this machine only, and for nobody where keys are set."""
    api_key_file: Path | None = None
    """A file of further keys as --api-key takes them, one a line; lines that begin with # are comments. Everybody on
    this machine can read the command line, and only some a file."""
    admin_api_key_file: Path | None = None
    """A file whose one line that is no comment is the key for administration."""
    chat_template: Path | None = None
    """A Jinja file instead of the model's own chat template."""
    tool_call_parser: str | None = None
    """How the model writes tool calls; without it a chat with tools is refused."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning; without it the reasoning is part of the answer."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server; '*' lets all."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which the server may be asked, beside localhost and --host: api.example.com, *.example.com for
    all in a domain, '*' for any. With --host 0.0.0.0 addresses and private names are right as well."""
    lab: bool = False
    """Offer the switchboard on the page, to the administrator: experiments in processes of their own, which take
    processor time from the model that is served."""
    live_text: bool = False
    """Keep the prompts of the flight recorder's minutes in memory: the page, and GET /v1/requests/ID/prompt, show them
    to their own tenant and to the administrator. Without, nobody's text is kept."""
    strict: bool = False
    """Refuse requests with fields that nobody here knows, instead of naming them in a header."""
    ssl_certfile: Path | None = None
    """Certificate, for TLS."""
    ssl_keyfile: Path | None = None
    """Its private key."""
    stall_timeout_s: float = 30.0
    """With work queued and no step for so long, /health says that the engine stalls."""
    drain_timeout_s: float = 30.0
    """On SIGTERM, running requests have so long to end."""
    max_connections: int = 4096
    """Most connections; one more is answered 503 and closed."""
    head_timeout_s: float = 20.0
    """From the connection, or the first byte of a later request, its headers have so long to come (then 408)."""
    body_timeout_s: float = 30.0
    """From its headers the body of a request has so long to come (then 408)."""
    answer_timeout_s: float = 60.0
    """An answer whose reader takes less than 16 KiB of it in so long, with more to come, is ended as if it had left."""
    max_body_bytes: int = 4 * 2**20
    """Longest request body, in bytes or such as 4MiB."""
    max_unfinished_body_bytes: int = 64 * 2**20
    """Most bytes of all bodies that have not arrived completely, and at least max_body_bytes. Beyond it the oldest
    large one is given up (503)."""
    metrics_compat: tuple[MetricsNames, ...] = ()
    """Serve the metrics under these servers' names, too, for dashboards that people have."""
    otlp_traces_endpoint: str | None = None
    """URL that takes a trace of each request by OTLP over HTTP: http://localhost:4318. A path /v1/traces may follow."""
    flight_recorder_minutes: float = 5.0
    """How much of the engine's past is kept, for timelines and for dumps."""
    flight_recorder_dir: Path | None = None
    """Folder for the dumps that a stall or a crash leaves; default: the system's for temporary files."""
    tokens_per_minute: int | None = None
    """Tokens, of prompts and outputs, that a tenant may use in a minute. A request is let in while any are left, and
    runs to its end; what that takes beyond has to flow in again before the next is let in (429)."""
    share_prefix_cache: bool = False
    """Let tenants use each other's cached prefixes: faster, and the time to a first token tells what others asked."""
    max_queued_requests: int = 1024
    """Most sequences that wait to run; with more, requests are refused (503). A request counts n times its prompts."""
    max_queued_tokens: int = 2**20
    """The same for the tokens of their prompts."""
    max_queue_wait_s: float = 60.0
    """A request that would wait longer to run is refused (503, with Retry-After); one that does wait longer is ended.
    The header x-request-timeout shortens it."""
    default_max_tokens: int | None = None
    """Output tokens of a chat or response whose request sets no limit; default: what the context leaves. (A completion
    has 16, as OpenAI's.)"""
    max_answer_bytes: int = 64 * 2**20
    """Largest answer, estimated from tokens and log-probabilities asked for."""
    max_parameter_items: int = 32768
    """Most entries of logit_bias, allowed_token_ids and stop_token_ids of a request, and characters of all its stop
    strings and bad words, together."""

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        read_sizes(self, "max_body_bytes", "max_answer_bytes")
        text("host", self.host)
        whole_number("port", self.port, 0, MAX_PORT)
        for name in ("served_model_name", "api_key", "cors_origins", "allowed_hosts"):
            for value in getattr(self, name):
                text(name, value)
        self._check_admin_key()
        self._check_addresses()
        number("flight_recorder_minutes", self.flight_recorder_minutes, 0.1, 1440, "0.1 to 1440 (minutes)")
        for name in ("lab", "live_text", "strict", "share_prefix_cache"):
            switch(name, getattr(self, name))
        for name in ("tokens_per_minute", "default_max_tokens"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        number("stall_timeout_s", self.stall_timeout_s, 0.1, 86400, "0.1 to 86400 (seconds)")
        number("drain_timeout_s", self.drain_timeout_s, 0, 86400, "0 to 86400 (seconds)")
        whole_number("max_body_bytes", self.max_body_bytes, 1024)
        whole_number("max_unfinished_body_bytes", self.max_unfinished_body_bytes, 1024)
        for name in (
            "max_connections",
            "max_queued_requests",
            "max_queued_tokens",
            "max_answer_bytes",
            "max_parameter_items",
        ):
            whole_number(name, getattr(self, name), 1)
        limit = "more than 0, at most 86400 (seconds)"
        for name in ("max_queue_wait_s", "head_timeout_s", "body_timeout_s", "answer_timeout_s"):
            number(name, getattr(self, name), 0, 86400, limit, low_open=True)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidParameter("ssl_keyfile", self.ssl_keyfile, "goes with ssl_certfile", "Give both or neither.")

    def _check_admin_key(self) -> None:
        if self.admin_api_key is None:
            return
        text("admin_api_key", self.admin_api_key)
        if self.admin_api_key_file is not None:
            limit = "is given beside admin_api_key"
            raise InvalidParameter("admin_api_key_file", str(self.admin_api_key_file), limit, "Give one of the two.")

    def _check_addresses(self) -> None:
        for name in self.metrics_compat:
            one_of("metrics_compat", name, get_args(MetricsNames))
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                limit = "is no origin (scheme://host, scheme://host:port), and not '*'"
                raise InvalidParameter("cors_origins", origin, limit)
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                limit = "is no host name: letters, digits, dots and dashes, *.DOMAIN, or '*'"
                raise InvalidParameter("allowed_hosts", name, limit, "Leave scheme and port out.")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise InvalidParameter("otlp_traces_endpoint", endpoint, "must be like http://localhost:4318")
