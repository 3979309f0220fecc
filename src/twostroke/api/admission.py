"""Admission to the queue: checked before a request's body is read, and again when its size is known.

    gate      key ─► check ─► body ─► route ─► prepare (templates, tokens) ─► admit ─► engine
                     queue length and wait            also this request's
                     without this request             tokens and cost

The wait is predicted from the work ahead of the request:

    num_tokens_ahead   tokens of prefills that go first, each takes prefill_s_per_token
    num_departures     requests that must end before this one gets a slot; of num_slots that run, each for
                       num_output_tokens steps, one ends every num_output_tokens / num_slots steps

    wait = num_tokens_ahead x prefill_s_per_token + num_departures x num_output_tokens / num_slots x step_s

In a queue that is fair among m tenants, at most m times a tenant's own backlog goes before its next request. The
predicted wait is 0 until the first requests have been measured.

A queue that is too long to be served in time makes every request late. Refusing new requests keeps the rate of
requests served in time at its value without overload. With --tokens-per-minute each key also has a token bucket.
Everything but `QueueAdmission` is pure: the caller passes load and clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from twostroke.api.http_errors import HTTPError
from twostroke.api.protocol.sampling import SamplingFields
from twostroke.client.engine_client import EngineClient
from twostroke.client.input_processor import PromptInput
from twostroke.client.load import EngineLoad
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter, Overloaded

SECONDS_PER_MINUTE = 60.0


@dataclass(slots=True)
class TokenBucket:
    """Token bucket with a capacity of one minute's tokens; debt must be refilled before the next request.

    A request is admitted while the bucket is not empty, and pays as its tokens are computed, because its output length
    is not known before. The bucket can therefore go into debt, by at most the requests that were admitted.

    >>> bucket = TokenBucket(tokens_per_minute=60)
    >>> bucket.pay(90, now_s=0.0)
    >>> bucket.wait_s(now_s=10.0)           # 60 - 90 + 10
    20.0
    """

    tokens_per_minute: int
    _level: float | None = None
    _at_s: float = 0.0

    def pay(self, num_tokens: int, now_s: float) -> None:
        """Take tokens out."""
        self._level = self._filled(now_s) - num_tokens
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a request is admitted; 0 if it is admitted now."""
        level = self._filled(now_s)
        return 0.0 if level > 0 else -level * SECONDS_PER_MINUTE / self.tokens_per_minute

    def _filled(self, now_s: float) -> float:
        most = float(self.tokens_per_minute)
        if self._level is None:
            return most
        return min(most, self._level + (now_s - self._at_s) * most / SECONDS_PER_MINUTE)


class TokenQuotas:
    """Token buckets, one per tenant, all of one size.

    Args:
        tokens_per_minute: size of each bucket.
    """

    def __init__(self, tokens_per_minute: int) -> None:
        self._tokens_per_minute = tokens_per_minute
        self._buckets: dict[str, TokenBucket] = {}
        self._generated: dict[str, int] = {}

    def wait_s(self, tenant: str, num_generated: int, now_s: float) -> float:
        """Return the seconds until a tenant's next request is admitted.

        Args:
            tenant: the tenant of the request.
            num_generated: output tokens that the engine has made for the tenant so far.
            now_s: seconds on any monotonic clock.
        """
        before = self._generated.get(tenant, 0)
        # a restarted engine counts from 0
        self.pay(tenant, num_generated - before if num_generated >= before else num_generated, now_s)
        self._generated[tenant] = num_generated
        return self._buckets[tenant].wait_s(now_s)

    def pay(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Take tokens out of a tenant's bucket."""
        self._buckets.setdefault(tenant, TokenBucket(self._tokens_per_minute)).pay(num_tokens, now_s)


TOKEN_BYTES = 8
"""Approximate bytes of one token's text in an answer."""
LOGPROB_BYTES = 96
"""Approximate bytes of one log-probability in an answer, as JSON: the token, its bytes and the number."""
MIN_RETRY_S = 1.0
MAX_WAIT_FRACTION = 0.75
"""Fraction of the longest wait (the server's or the caller's) up to which a predicted wait is admitted.

A request that does wait longer than the limit is dropped, which is worse than an immediate refusal.
"""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits on the number of waiting requests and on their wait."""

    max_queued_requests: int
    """Sequences: a request counts n times its number of prompts."""
    max_queued_tokens: int
    """Prompt tokens of the waiting requests."""
    max_queue_wait_s: float
    max_answer_bytes: int


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Cost of a request, summed over all of its prompts and sequences."""

    num_sequences: int = 1
    num_prompt_tokens: int = 0
    """Prompt tokens, once for each of n sequences; savings by the prefix cache are not assumed."""
    num_answer_bytes: int = 0
    """Approximate bytes that the answer may have."""
    most_bytes: tuple[str, int] = ("max_tokens", 0)
    """The parameter with the largest share of `num_answer_bytes`, and its value."""
    field: str = "prompt"
    """Name of the request's field that sets the number of sequences."""

    def check_fits_empty_queue(self, limits: QueueLimits) -> None:
        """Refuse a request that would not fit an empty queue.

        Raises:
            InvalidParameter: the request can never fit.
        """
        if self.num_sequences > limits.max_queued_requests:
            limit = f"sequences (prompts x n, or best_of); at most max_queued_requests, {limits.max_queued_requests}"
            remedy = "Send fewer prompts at once, or start the server with --max-queued-requests."
            raise InvalidParameter(self.field, self.num_sequences, limit, remedy)
        if self.num_prompt_tokens > limits.max_queued_tokens:
            limit = f"tokens in all prompts, each n times; at most max_queued_tokens, {limits.max_queued_tokens}"
            remedy = "Send fewer prompts at once, or start the server with --max-queued-tokens."
            raise InvalidParameter("prompt", self.num_prompt_tokens, limit, remedy)
        if self.num_answer_bytes > limits.max_answer_bytes:
            name, value = self.most_bytes
            limit = f"the answer may have about {self.num_answer_bytes:,} bytes; at most {limits.max_answer_bytes:,}"
            fewer = "fewer tokens" if name == "max_tokens" else "fewer log-probabilities, or for fewer tokens"
            remedy = f"Ask for {fewer} or choices, or start the server with --max-answer-bytes."
            raise InvalidParameter(name, value, limit, remedy)


def cost_of(prompts: Sequence[PromptInput]) -> RequestCost:
    """Return the cost of one request with these prompts."""
    num_sequences = num_prompt_tokens = 0
    num_bytes = {"max_tokens": 0, "logprobs": 0, "prompt_logprobs": 0}
    field = "n" if any(p.params.n > 1 for p in prompts) else "input" if prompts[0].wants_hidden_state else "prompt"
    for prompt in prompts:
        params, length = prompt.params, len(prompt.prompt_token_ids)
        num_sequences += params.n
        num_prompt_tokens += params.n * length
        num_bytes["max_tokens"] += params.n * prompt.max_tokens * TOKEN_BYTES
        if params.logprobs is not None:
            num_bytes["logprobs"] += params.n * prompt.max_tokens * LOGPROB_BYTES * (params.logprobs + 1)
        if params.prompt_logprobs is not None:  # reported once, whatever n is
            num_bytes["prompt_logprobs"] += length * LOGPROB_BYTES * (params.prompt_logprobs + 1)
    most = max(num_bytes, key=lambda name: num_bytes[name])
    largest = max((getattr(prompt.params, most) or 0 for prompt in prompts), default=0)
    return RequestCost(num_sequences, num_prompt_tokens, sum(num_bytes.values()), (most, largest), field)


def predicted_wait_s(load: EngineLoad) -> float:
    """Return the seconds that the next request would wait before it runs.

    >>> predicted_wait_s(EngineLoad(num_slots=4, num_running=4, num_waiting=7, num_own_waiting=7,
    ...                       step_s=0.01, num_output_tokens=100.0))     # 8 of 4 have to end, one every 25 steps
    2.0
    """
    num_ahead = min(load.num_waiting, load.num_own_waiting * load.num_tenants)
    num_tokens_ahead = min(load.num_waiting_tokens, load.num_own_waiting_tokens * load.num_tenants)
    num_departures = max(0, load.num_running + num_ahead + 1 - load.num_slots)
    steps = num_departures * load.num_output_tokens / load.num_slots
    return (load.num_running_tokens + num_tokens_ahead) * load.prefill_s_per_token + steps * load.step_s


def check_overload(load: EngineLoad, limits: QueueLimits, cost: RequestCost, deadline_s: float | None = None) -> None:
    """Refuse a request that would wait too long or does not fit the queue.

    A full queue still accepts a tenant that has less than its share of it, so one tenant's flood does not exclude the
    others. With m tenants the queue holds at most (1 + 1/2 + … + 1/m) times its limit.

    Args:
        load: the engine's current work.
        limits: limits of the queue.
        cost: cost of the request.
        deadline_s: seconds after which the first token is of no use to the caller.

    Raises:
        Overloaded: a limit is exceeded; the error names it and says when to retry.
    """
    wait_s = predicted_wait_s(load)
    share = 1 / load.num_tenants
    drains_s = wait_s / max(1, min(load.num_waiting, load.num_own_waiting * load.num_tenants))
    for total, own, limit, flag in (
        (
            load.num_waiting + cost.num_sequences,
            load.num_own_waiting + cost.num_sequences,
            limits.max_queued_requests,
            "requests",
        ),
        (
            load.num_waiting_tokens + cost.num_prompt_tokens,
            load.num_own_waiting_tokens + cost.num_prompt_tokens,
            limits.max_queued_tokens,
            "tokens",
        ),
    ):
        if total > limit and own > limit * share:
            reason = f"the queue is full: with this request {total} {flag}; the limit is {limit} (--max-queued-{flag})"
            raise _overloaded(reason, drains_s * cost.num_sequences)
    if wait_s > MAX_WAIT_FRACTION * limits.max_queue_wait_s:
        limit = f"{MAX_WAIT_FRACTION:.0%} of {limits.max_queue_wait_s:g} s (--max-queue-wait-s)"
        reason = f"this request would wait about {wait_s:.1f} s; the limit is {limit}"
        raise _overloaded(reason, wait_s - MAX_WAIT_FRACTION * limits.max_queue_wait_s)
    ttft_s = wait_s + cost.num_prompt_tokens * load.prefill_s_per_token + load.step_s
    if deadline_s is not None and ttft_s > MAX_WAIT_FRACTION * deadline_s:
        limit = f"{MAX_WAIT_FRACTION:.0%} of its timeout of {deadline_s:g} s"
        reason = f"its first token would come after about {ttft_s:.1f} s; the limit is {limit}"
        raise _overloaded(reason, ttft_s - MAX_WAIT_FRACTION * deadline_s)


def _overloaded(reason: str, retry_after_s: float) -> Overloaded:
    return Overloaded(f"the server is overloaded: {reason}.", math.ceil(max(MIN_RETRY_S, retry_after_s)))


TIMEOUT_HEADER = "x-request-timeout"
UNKNOWN_COST = RequestCost()


_LONG_PARAMETERS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "stop", "bad_words")


def _size(given: str | Mapping[str, float] | Sequence[str] | Sequence[int]) -> int:
    """Return the characters of texts, or the number of other entries."""
    if isinstance(given, str | Mapping):
        return len(given)
    return sum(len(item) if isinstance(item, str) else 1 for item in given)


class QueueAdmission:
    """Admission checks for all requests of a server, from the engine's load and the configured limits.

    Args:
        engine: engine whose load counts.
        config: settings with the limits.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self._engine = engine
        self._limits = QueueLimits(
            config.max_queued_requests, config.max_queued_tokens, config.max_queue_wait_s, config.max_answer_bytes
        )
        self._max_parameter_items = config.max_parameter_items
        self._quotas = None if config.tokens_per_minute is None else TokenQuotas(config.tokens_per_minute)
        self._separates_caches = bool(config.api_key) and not config.share_prefix_cache
        self._num_preparing = 0

    def check(self, tenant: str, first_token_timeout_s: float | None) -> None:
        """Refuse a request of which only the tenant and timeout are known.

        Raises:
            HTTPError: 429, the tenant has used up its tokens.
            Overloaded: the queue is full, or the request would wait too long.
        """
        if not self._num_preparing and self._has_room(first_token_timeout_s):
            return
        load, num_preparing = self._engine.load(tenant), self._num_preparing
        if num_preparing:
            load = dataclasses.replace(
                load,
                num_waiting=load.num_waiting + num_preparing,
                num_own_waiting=load.num_own_waiting + num_preparing,
            )
        if self._quotas is not None:
            wait_s = self._quotas.wait_s(tenant, load.num_own_generated, self._engine.now_s())
            if wait_s > 0:
                raise _quota_exceeded(wait_s)
        check_overload(load, self._limits, UNKNOWN_COST, first_token_timeout_s)

    def check_items(self, request: SamplingFields) -> None:
        """Refuse parameters so long that reading them would delay other requests.

        Raises:
            InvalidParameter: there are too many entries or characters.
        """
        sizes = {name: _size(given) for name in _LONG_PARAMETERS if (given := getattr(request, name))}
        if sum(sizes.values()) > self._max_parameter_items:
            name = max(sizes, key=lambda name: sizes[name])
            told = ", ".join(f"{name} {size}" for name, size in sizes.items())
            limit = f"too many entries and characters ({told}): together at most {self._max_parameter_items}"
            remedy = "Send fewer, or start the server with --max-parameter-items."
            raise InvalidParameter(name, sizes[name], limit, remedy)

    @contextlib.contextmanager
    def preparing(self) -> Generator[None]:
        """Count the request as waiting while its prompt is prepared."""
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def admit(
        self,
        prompts: Sequence[PromptInput],
        tenant: str,
        first_token_timeout_s: float | None,
        *,
        background: bool = False,
    ) -> None:
        """Refuse a request that is too large, either now or for any queue.

        Background requests have a separate queue of the same length, with no limit on the wait.

        Raises:
            InvalidParameter: the request would not fit an empty queue.
            Overloaded: the queue is full, or the request would wait too long.
        """
        cost = cost_of(prompts)
        cost.check_fits_empty_queue(self._limits)
        if self._has_room(first_token_timeout_s):
            return
        if background:
            limits = dataclasses.replace(self._limits, max_queue_wait_s=math.inf)
            check_overload(self._engine.load(tenant, background=True), limits, cost, first_token_timeout_s)
        else:
            check_overload(self._engine.load(tenant), self._limits, cost, first_token_timeout_s)
        if self._quotas is not None:
            self._quotas.pay(tenant, cost.num_prompt_tokens, self._engine.now_s())

    def max_wait_s(self, first_token_timeout_s: float | None, *, background: bool = False) -> float | None:
        """Return the seconds that a request may wait before it runs; None if there is no limit."""
        if background:
            return first_token_timeout_s
        longest = self._limits.max_queue_wait_s
        return longest if first_token_timeout_s is None else min(longest, first_token_timeout_s)

    def cache_salt(self, tenant: str, given: str | None) -> str | None:
        """Return the salt of a tenant's cached prefixes.

        Separate salts keep the time to first token from revealing other tenants' prompts.
        """
        # names of tenants contain no colon
        return f"{tenant}:{given or ''}" if self._separates_caches else given

    def _has_room(self, first_token_timeout_s: float | None) -> bool:
        """Return whether any request is admitted without an estimate, because the engine is idle.

        Estimates matter only with a caller's timeout or a quota, and computing them folds the engine's events.
        """
        return self._engine.is_idle and first_token_timeout_s is None and self._quotas is None


def first_token_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return the caller's limit on time to first token in seconds, if the request has one.

    Raises:
        InvalidParameter: the header is not a number above 0.
    """
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidParameter(TIMEOUT_HEADER, given, "must be a number of seconds above 0")
    return seconds


def _quota_exceeded(wait_s: float) -> HTTPError:
    seconds = max(1, math.ceil(wait_s))
    return HTTPError(
        429,
        f"this key has used up its tokens (--tokens-per-minute); retry in {seconds} s.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
    )
