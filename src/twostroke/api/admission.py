"""Whether a request may join the queue: asked before its body is read, and again when its size is known.

gate      key ─► check ─► body ─► route ─► prepare (templates, tokens) ─► admit ─► engine
                 queue and wait as they are,              this request's
                 whatever this request is                 tokens and cost, too
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence

from twostroke.api.http_errors import HTTPError
from twostroke.api.protocol.sampling import SamplingFields
from twostroke.api.quota import Quotas
from twostroke.client.engine_client import EngineClient
from twostroke.client.input_processor import PromptInput
from twostroke.client.load import Load
from twostroke.client.overload import QueueLimits, RequestCost, cost_of, refuse_overload
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter

PATIENCE_HEADER = "x-request-timeout"
NOTHING_KNOWN = RequestCost()


class Admission:
    """Puts every request's case to the deciders.

    Args:
        engine: whose load counts.
        config: the limits.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self._engine = engine
        self._limits = QueueLimits(
            config.max_queued_requests, config.max_queued_tokens, config.max_queue_wait_s, config.max_answer_bytes
        )
        self._max_parameter_items = config.max_parameter_items
        self._quotas = None if config.tokens_per_minute is None else Quotas(config.tokens_per_minute)
        self._separates_caches = bool(config.api_key) and not config.share_prefix_cache
        self._num_preparing = 0

    def check(self, tenant: str, patience_s: float | None) -> None:
        """Refuses a request of which nothing but its caller is known.

        Raises:
            HTTPError: 429, the tenant has used its tokens up.
            Overloaded: the queue is full, or it would wait too long.
        """
        load = self._load(tenant, self._num_preparing)
        if self._quotas is not None:
            wait_s = self._quotas.wait_s(tenant, load.num_own_generated, self._engine.now_s())
            if wait_s > 0:
                raise _quota_used_up(wait_s)
        refuse_overload(load, self._limits, NOTHING_KNOWN, patience_s)

    def check_items(self, request: SamplingFields) -> None:
        """Refuses parameters whose reading alone would hold everybody up.

        Raises:
            InvalidParameter: they are too many, or too long.
        """
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        sizes = {
            "logit_bias": len(request.logit_bias or ()),
            "allowed_token_ids": len(request.allowed_token_ids or ()),
            "stop_token_ids": len(request.stop_token_ids or ()),
            "stop": sum(map(len, stops)),
            "bad_words": sum(map(len, request.bad_words or ())),
        }
        if sum(sizes.values()) > self._max_parameter_items:
            name = max(sizes, key=lambda name: sizes[name])
            told = ", ".join(f"{name} {size}" for name, size in sizes.items() if size)
            limit = f"entries and characters ({told}), together at most {self._max_parameter_items}"
            remedy = "Send fewer, or start the server with --max-parameter-items."
            raise InvalidParameter(name, sizes[name], limit, remedy)

    @contextlib.contextmanager
    def preparing(self) -> Generator[None]:
        """While a request's prompt is made it has a place in the queue already."""
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def admit(
        self, prompts: Sequence[PromptInput], tenant: str, patience_s: float | None, *, background: bool = False
    ) -> None:
        """Refuses a request that is too large, for now or for ever.

        Background work has a queue of its own, as long as the others', and may wait in it for any time.

        Raises:
            InvalidParameter: no empty queue could take it.
            Overloaded: the queue is full, or it would wait too long.
        """
        cost = cost_of(prompts)
        cost.check_possible(self._limits)
        if background:
            limits = dataclasses.replace(self._limits, max_queue_wait_s=math.inf)
            refuse_overload(self._engine.load(tenant, background=True), limits, cost, patience_s)
        else:
            refuse_overload(self._load(tenant, 0), self._limits, cost, patience_s)
        if self._quotas is not None:
            self._quotas.pay(tenant, cost.num_prompt_tokens, self._engine.now_s())

    def longest_wait_s(self, patience_s: float | None, *, background: bool = False) -> float | None:
        """How long a request may wait to run; None: for any time."""
        if background:
            return patience_s
        longest = self._limits.max_queue_wait_s
        return longest if patience_s is None else min(longest, patience_s)

    def cache_salt(self, tenant: str, given: str | None) -> str | None:
        """With which a tenant's prefixes are cached: nobody learns from the time to a first token what others ask."""
        # no name of a tenant has a colon in it
        return f"{tenant}:{given or ''}" if self._separates_caches else given

    def _load(self, tenant: str, num_preparing: int) -> Load:
        load = self._engine.load(tenant)
        if not num_preparing:
            return load
        return dataclasses.replace(
            load,
            num_waiting=load.num_waiting + num_preparing,
            num_own_waiting=load.num_own_waiting + num_preparing,
        )


def patience_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the caller gives its first token, if it says so.

    Raises:
        InvalidParameter: the header is no number above 0.
    """
    given = headers.get(PATIENCE_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidParameter(PATIENCE_HEADER, given, "must be a number of seconds above 0")
    return seconds


def _quota_used_up(wait_s: float) -> HTTPError:
    seconds = max(1, math.ceil(wait_s))
    return HTTPError(
        429,
        f"the tokens of this key are used up (--tokens-per-minute); more will be there in {seconds} s.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
    )
