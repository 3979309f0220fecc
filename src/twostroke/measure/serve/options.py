"""Options of `twostroke bench serve`, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from twostroke.config.checks import check_bool, check_choice, check_int, check_number, check_text
from twostroke.cost.price import check_price_per_hour
from twostroke.errors import InvalidParameter
from twostroke.measure.report import DEFAULT_FOLDER
from twostroke.measure.serve.figures import Slo
from twostroke.measure.serve.load import Origin
from twostroke.measure.serve.openai_wire import EndpointName, TokenCounts
from twostroke.measure.workload import RESERVED_TOKEN_IDS
from twostroke.measure.workload_options import WorkloadOptions, check_name

Prompts = Literal["token-ids", "text"]

_MAX_SECONDS = 24 * 3600.0
_MAX_LOAD = 1e3
_MAX_POINTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(WorkloadOptions):
    """Options: the load, the server, and the result files."""

    url: str = "http://127.0.0.1:8000"
    """The server, with or without /v1."""
    model: str | None = None
    """Name of the served model; default: the first of /v1/models."""
    api_key: str | None = field(default=None, repr=False)
    """API key, sent as the bearer token; not saved in the result."""
    endpoint: EndpointName = "completions"
    """/v1/completions or /v1/chat/completions."""
    prompts: Prompts | None = None
    """Form of the prompts: 'token-ids' (only for completions, and not every server accepts them) or 'text' (words of
    one token each); default: token ids for completions, text for chat."""
    tokenizer: str | None = None
    """Tokenizer that chooses the words of text prompts: a model folder, a GGUF file, a hub id or 'embedded'; default:
    the server is asked (/tokenize)."""
    vocab_size: int = 4096
    """Upper bound of the ids in token-id prompts; every model of production size has more."""
    max_concurrency: int | None = None
    """Closed loop: keep this many requests in flight, instead of arrivals."""
    frontier: str = ""
    """Loads to sweep, separated by commas, as multiples of request_rate, or without one of the server's rate when all
    requests come at once: 0.2,0.5,0.8,1,1.2."""
    goodput: tuple[str, ...] = ()
    """Limit that good requests keep, as NAME:MILLISECONDS with NAME ttft, tpot or e2el; can be repeated."""
    temperature: float | None = 0.0
    """Temperature of each request; above 0 its seed is sent too."""
    ignore_eos: bool = True
    """Ask for outputs of exactly the drawn lengths; servers that do not know the field need --no-ignore-eos."""
    extra_body: str = ""
    """A JSON object with more fields for each request; they override the others."""
    token_counts: TokenCounts = "usage"
    """Source of the number of tokens in a chunk: 'usage' (stream_options.continuous_usage_stats), 'token-ids' of each
    chunk (return_token_ids), or 'chunks': one token each, for servers that refuse both."""
    price_per_hour: float | None = None
    """Price of the server's machines per hour, in any currency: adds the cost per million tokens."""
    timeout: float = 600.0
    """Seconds after which a request is given up."""
    server_metrics: bool = True
    """Read /metrics before and after, if the server has it."""
    warmup: int = 1
    """Small runs before the one that counts."""
    name: str = "serve"
    """Name of the result files."""
    results: Path = DEFAULT_FOLDER
    """Folder of the result files."""
    plots: bool = True
    """Draw a PNG beside the JSON (needs the extra 'bench')."""

    def __post_init__(self) -> None:
        """Check what needs no server; raise if an option has no effect."""
        WorkloadOptions.__post_init__(self)  # super() without arguments fails: slots=True creates another class
        Origin.parse(self.url)
        for name in ("model", "api_key", "tokenizer"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidParameter("api_key", "...", "must be printable ASCII, since it is sent in a header")
        check_choice("endpoint", self.endpoint, get_args(EndpointName))
        check_choice("token_counts", self.token_counts, get_args(TokenCounts))
        for name in ("ignore_eos", "server_metrics", "plots"):
            check_bool(name, getattr(self, name))
        if self.temperature is not None:
            check_number("temperature", self.temperature, 0.0, 100.0, "a number, 0 to 100, or None")
        check_number("timeout", self.timeout, 0.0, _MAX_SECONDS, f"seconds, up to {_MAX_SECONDS:g}", low_open=True)
        check_int("warmup", self.warmup, 0)
        check_name(self.name)
        check_price_per_hour(self.price_per_hour)
        _ = self.slo, self.extra_fields, self.loads
        self._check_prompts()
        self._check_arrivals()

    @property
    def slo(self) -> Slo:
        """Limits that good requests keep."""
        return Slo.parse(self.goodput)

    @property
    def prompt_form(self) -> Prompts:
        """Form of the prompts, with the default filled in."""
        return self.prompts or ("text" if self.endpoint == "chat" else "token-ids")

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Fields of extra_body."""
        if not self.extra_body:
            return {}
        try:
            return msgspec.json.decode(self.extra_body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InvalidParameter("extra_body", self.extra_body, f"must be a JSON object ({error})") from error

    @property
    def loads(self) -> tuple[float, ...]:
        """Loads of the frontier as numbers; empty without a frontier."""
        words = self.frontier.split(",") if self.frontier else []
        try:
            loads = tuple(float(word) for word in words)
        except ValueError:
            loads = (-1.0,)
        if len(loads) > _MAX_POINTS or not all(0 < load <= _MAX_LOAD for load in loads):
            limit = f"must be at most {_MAX_POINTS} numbers above 0 and up to {_MAX_LOAD:g}, separated by commas"
            raise InvalidParameter("frontier", self.frontier, limit)
        return loads

    def _check_prompts(self) -> None:
        if self.prompts is not None:
            check_choice("prompts", self.prompts, get_args(Prompts))
        check_int("vocab_size", self.vocab_size, RESERVED_TOKEN_IDS + 1)
        if self.prompt_form == "token-ids":
            if self.endpoint == "chat":
                limit = "needs --endpoint completions: chat messages are text"
                raise InvalidParameter("prompts", self.prompts, limit, "Leave it out.")
            if self.tokenizer is not None:
                limit = "changes nothing: prompts are token ids"
                raise InvalidParameter("tokenizer", self.tokenizer, limit, "Add --prompts text.")
        elif self.vocab_size != 4096:
            raise InvalidParameter("vocab_size", self.vocab_size, "changes nothing: prompts are text", "Leave it out.")

    def _check_arrivals(self) -> None:
        if self.max_concurrency is not None:
            check_int("max_concurrency", self.max_concurrency, 1)
            for name in ("request_rate", "time_divisor", "frontier"):
                value = cast(object, getattr(self, name))
                if value:
                    limit = "changes nothing beside max_concurrency: each request is sent when another has ended"
                    raise InvalidParameter(name, value, limit, "Leave one of the two out.")
        if self.loads and self.trace is not None:
            raise InvalidParameter(
                "frontier", self.frontier, "changes the rate of drawn arrivals", "Leave out --trace."
            )
