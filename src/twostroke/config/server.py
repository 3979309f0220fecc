"""Settings of the server: its address, access control and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from twostroke.config.checks import check_bool, check_choice, check_int, check_number, check_text
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
    """Address to listen on; by default only this machine can connect."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, which is printed."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients may use for the model; responses carry the first. Default: MODEL as it was given."""
    api_key: tuple[str, ...] = ()
    """API keys, one of which every route but liveness requires; without any, access is open. NAME:SECRET names the
    tenant; the fair queue, quotas and the prefix cache are per tenant."""
    admin_api_key: str | None = None
    """Key for administration. Without one, only this machine may administer, or no one if API keys are set."""
    api_key_file: Path | None = None
    """File of further keys in the format of --api-key, one per line; lines that begin with # are comments. Unlike a
    file, the command line is visible to every user of this machine."""
    admin_api_key_file: Path | None = None
    """File with the key for administration, as its only line that is no comment."""
    chat_template: Path | None = None
    """A Jinja file instead of the model's own chat template."""
    tool_call_parser: str | None = None
    """Format in which the model writes tool calls; without it a chat with tools is refused."""
    reasoning_parser: str | None = None
    """Format in which the model marks its reasoning; without it the reasoning is part of the answer."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server; '*' allows all."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names that requests may address, besides localhost and --host: api.example.com, *.example.com for a
    whole domain, '*' for any. With --host 0.0.0.0, addresses and private names are allowed as well."""
    lab: bool = False
    """Offer experiments on the page, to the administrator. They run in their own processes and take processor time from
    the served model."""
    live_text: bool = False
    """Keep the prompts of the flight recorder's minutes in memory. The page and GET /v1/requests/ID/prompt show them
    to their own tenant and to the administrator. Without it, no text is kept."""
    strict: bool = False
    """Refuse requests with unknown fields, instead of naming these in a header."""
    ssl_certfile: Path | None = None
    """Certificate for TLS."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate."""
    stall_timeout_s: float = 30.0
    """Seconds without a step, with work queued, after which /health reports that the engine stalls."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    max_connections: int = 4096
    """Most connections; a further one is answered 503 and closed."""
    head_timeout_s: float = 20.0
    """Seconds for the headers to arrive, from the connection or the first byte of a later request (then 408)."""
    body_timeout_s: float = 30.0
    """Seconds for the body of a request to arrive, after its headers (then 408)."""
    answer_timeout_s: float = 60.0
    """Seconds in which a client must read 16 KiB of an answer with more to come; a slower one counts as
    disconnected."""
    max_body_bytes: int = 4 * 2**20
    """Longest request body, in bytes or such as 4MiB."""
    max_unfinished_body_bytes: int = 64 * 2**20
    """Most bytes of all bodies that have not arrived completely, and at least max_body_bytes. Beyond it the oldest
    large one is dropped (503)."""
    metrics_compat: tuple[MetricsNames, ...] = ()
    """Other servers' names to serve the metrics under as well, for existing dashboards."""
    otlp_traces_endpoint: str | None = None
    """URL that receives a trace of each request by OTLP over HTTP: http://localhost:4318. A path /v1/traces may
    follow."""
    flight_recorder_minutes: float = 5.0
    """Minutes of the engine's past to keep, for timelines and for dumps."""
    flight_recorder_dir: Path | None = None
    """Folder for the dumps of a stall or a crash; default: the system's folder for temporary files."""
    tokens_per_minute: int | None = None
    """Tokens, of prompts and outputs, that a tenant may use per minute. A request is admitted while any are left, and
    runs to its end; tokens used beyond the quota must be regained before the next one is admitted (429)."""
    share_prefix_cache: bool = False
    """Let tenants use each other's cached prefixes: faster, but the time to a first token reveals what others asked."""
    max_queued_requests: int = 1024
    """Most sequences that wait to run; with more, requests are refused (503). A request counts n times its prompts."""
    max_queued_tokens: int = 2**20
    """Most prompt tokens of sequences that wait to run; with more, requests are refused (503)."""
    max_queue_wait_s: float = 60.0
    """Longest wait to run, in seconds. A request expected to wait longer is refused (503, with Retry-After); one that
    does wait longer is ended. The header x-request-timeout shortens it."""
    default_max_tokens: int | None = None
    """Output tokens of a chat or response whose request sets no limit; default: the rest of the context. (A completion
    has 16, as with OpenAI.)"""
    max_answer_bytes: int = 64 * 2**20
    """Largest answer, estimated from the requested tokens and log-probabilities."""
    max_parameter_items: int = 32768
    """Most entries of logit_bias, allowed_token_ids and stop_token_ids of a request, plus characters of all its stop
    strings and bad words."""

    def __post_init__(self) -> None:
        read_sizes(self, "max_body_bytes", "max_answer_bytes")
        check_text("host", self.host)
        check_int("port", self.port, 0, MAX_PORT)
        for name in ("served_model_name", "api_key", "cors_origins", "allowed_hosts"):
            for value in getattr(self, name):
                check_text(name, value)
        self._check_admin_key()
        self._check_addresses()
        check_number("flight_recorder_minutes", self.flight_recorder_minutes, 0.1, 1440, "0.1 to 1440 (minutes)")
        for name in ("lab", "live_text", "strict", "share_prefix_cache"):
            check_bool(name, getattr(self, name))
        for name in ("tokens_per_minute", "default_max_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_number("stall_timeout_s", self.stall_timeout_s, 0.1, 86400, "0.1 to 86400 (seconds)")
        check_number("drain_timeout_s", self.drain_timeout_s, 0, 86400, "0 to 86400 (seconds)")
        check_int("max_body_bytes", self.max_body_bytes, 1024)
        check_int("max_unfinished_body_bytes", self.max_unfinished_body_bytes, 1024)
        for name in (
            "max_connections",
            "max_queued_requests",
            "max_queued_tokens",
            "max_answer_bytes",
            "max_parameter_items",
        ):
            check_int(name, getattr(self, name), 1)
        limit = "more than 0, at most 86400 (seconds)"
        for name in ("max_queue_wait_s", "head_timeout_s", "body_timeout_s", "answer_timeout_s"):
            check_number(name, getattr(self, name), 0, 86400, limit, low_open=True)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidParameter("ssl_keyfile", self.ssl_keyfile, "goes with ssl_certfile", "Give both or neither.")

    def _check_admin_key(self) -> None:
        if self.admin_api_key is None:
            return
        check_text("admin_api_key", self.admin_api_key)
        if self.admin_api_key_file is not None:
            limit = "cannot be given beside admin_api_key"
            raise InvalidParameter("admin_api_key_file", str(self.admin_api_key_file), limit, "Give one of the two.")

    def _check_addresses(self) -> None:
        for name in self.metrics_compat:
            check_choice("metrics_compat", name, get_args(MetricsNames))
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
