"""Whether a request may join the queue: asked before its body is read, and again when its size is known.

    gate      key ─► check ─► body ─► route ─► prepare (templates, tokens) ─► admit ─► engine
                     queue and wait as they are,              this request's
                     whatever this request is                 tokens and cost, too

The wait is predicted from what is ahead of it:

    num_tokens_ahead   prefills that go first, each token takes prefill_s_per_token
    num_departures     requests that have to end before a slot is its own; of num_slots that run, each for
                       num_output_tokens steps, one ends every num_output_tokens / num_slots steps

    wait = num_tokens_ahead x prefill_s_per_token + num_departures x num_output_tokens / num_slots x step_s

In a queue that is fair among m tenants only m times a tenant's own backlog goes before its next request. While nothing
was measured the wait is 0: the first requests are what is measured.

A queue longer than what ends in time only makes everybody late: refusing at its entrance keeps the rate of those who
are served in time where it is without overload. With --tokens-per-minute each key has a bucket of tokens as well. All
but `Admission` is pure: the caller brings load and clock.
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
    """Holds a minute's tokens at most; what is used beyond them has to flow in again before the next request.

    A request is let in while there is anything left and pays as its tokens are computed: what it will generate is not
    known before. So the bucket may be in debt, by no more than the requests that were let in.

    >>> bucket = TokenBucket(tokens_per_minute=60)
    >>> bucket.pay(90, now_s=0.0)
    >>> bucket.wait_s(now_s=10.0)           # 60 - 90 + 10
    20.0
    """

    tokens_per_minute: int
    _level: float | None = None
    _at_s: float = 0.0

    def pay(self, num_tokens: int, now_s: float) -> None:
        """Takes tokens out."""
        self._level = self._filled(now_s) - num_tokens
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """How long until a request is let in; 0 now."""
        level = self._filled(now_s)
        return 0.0 if level > 0 else -level * SECONDS_PER_MINUTE / self.tokens_per_minute

    def _filled(self, now_s: float) -> float:
        most = float(self.tokens_per_minute)
        if self._level is None:
            return most
        return min(most, self._level + (now_s - self._at_s) * most / SECONDS_PER_MINUTE)


class Quotas:
    """A bucket for every tenant, each the same size.

    Args:
        tokens_per_minute: of each.
    """

    def __init__(self, tokens_per_minute: int) -> None:
        self._tokens_per_minute = tokens_per_minute
        self._buckets: dict[str, TokenBucket] = {}
        self._generated: dict[str, int] = {}

    def wait_s(self, tenant: str, num_generated: int, now_s: float) -> float:
        """How long until a tenant's next request is let in.

        Args:
            tenant: who asks.
            num_generated: output tokens that the engine has made for it so far.
            now_s: on any steady clock.
        """
        before = self._generated.get(tenant, 0)
        # an engine that was started again counts from 0
        self.pay(tenant, num_generated - before if num_generated >= before else num_generated, now_s)
        self._generated[tenant] = num_generated
        return self._buckets[tenant].wait_s(now_s)

    def pay(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Takes tokens out of a tenant's bucket."""
        self._buckets.setdefault(tenant, TokenBucket(self._tokens_per_minute)).pay(num_tokens, now_s)


TOKEN_BYTES = 8
"""Of a token's text in an answer, roughly."""
LOGPROB_BYTES = 96
"""Of one log-probability in an answer: the token, its bytes and the number, as JSON."""
MIN_RETRY_S = 1.0
HEADROOM = 0.75
"""Of the longest wait, the server's or the caller's, how much is given away by prediction: who does wait longer than
the longest is dropped, which is worse than a refusal at once."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait, and how long."""

    max_queued_requests: int
    """Sequences: a request counts n times its prompts."""
    max_queued_tokens: int
    """Of their prompts."""
    max_queue_wait_s: float
    max_answer_bytes: int


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What a request asks for, all of its prompts and sequences together."""

    num_sequences: int = 1
    num_prompt_tokens: int = 0
    """Each of n sequences counts the prompt; that the prefix cache may save some of it is not promised."""
    num_answer_bytes: int = 0
    """Bytes that the answer may have, roughly."""
    most_bytes: tuple[str, int] = ("max_tokens", 0)
    """The parameter that makes the most of them, and its value."""
    field: str = "prompt"
    """Of the request, that makes it so many sequences."""

    def check_possible(self, limits: QueueLimits) -> None:
        """Refuses what no empty queue could take.

        Raises:
            InvalidParameter: it will never fit.
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
    """How long the next request waits before it runs.

    >>> predicted_wait_s(EngineLoad(num_slots=4, num_running=4, num_waiting=7, num_own_waiting=7,
    ...                       step_s=0.01, num_output_tokens=100.0))     # 8 of 4 have to end, one every 25 steps
    2.0
    """
    num_ahead = min(load.num_waiting, load.num_own_waiting * load.num_tenants)
    num_tokens_ahead = min(load.num_waiting_tokens, load.num_own_waiting_tokens * load.num_tenants)
    num_departures = max(0, load.num_running + num_ahead + 1 - load.num_slots)
    steps = num_departures * load.num_output_tokens / load.num_slots
    return (load.num_running_tokens + num_tokens_ahead) * load.prefill_s_per_token + steps * load.step_s


def refuse_overload(load: EngineLoad, limits: QueueLimits, cost: RequestCost, deadline_s: float | None = None) -> None:
    """Refuses a request that would wait too long, or for which there is no place in the queue.

    A tenant who asks finds a place in a full queue while it has less than its share of it: one tenant's flood does not
    shut the others out. So the queue holds at most (1 + 1/2 + … + 1/m) times its limit with m tenants.

    Args:
        load: what there is to do.
        limits: of the queue.
        cost: of the request.
        deadline_s: seconds until its first token is of no use to the caller any more.

    Raises:
        Overloaded: says which limit, and when to ask again.
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
            reason = f"the queue is full: with this request {total} {flag}, at most {limit} (--max-queued-{flag})"
            raise _overloaded(reason, drains_s * cost.num_sequences)
    if wait_s > HEADROOM * limits.max_queue_wait_s:
        limit = f"{HEADROOM:.0%} of {limits.max_queue_wait_s:g} s (--max-queue-wait-s)"
        reason = f"it would wait about {wait_s:.1f} s, at most {limit} are given away"
        raise _overloaded(reason, wait_s - HEADROOM * limits.max_queue_wait_s)
    ttft_s = wait_s + cost.num_prompt_tokens * load.prefill_s_per_token + load.step_s
    if deadline_s is not None and ttft_s > HEADROOM * deadline_s:
        limit = f"{HEADROOM:.0%} of the {deadline_s:g} s that it is of use"
        reason = f"its first token would come after about {ttft_s:.1f} s, at most {limit} are given away"
        raise _overloaded(reason, ttft_s - HEADROOM * deadline_s)


def _overloaded(reason: str, retry_after_s: float) -> Overloaded:
    return Overloaded(f"the server is overloaded: {reason}.", math.ceil(max(MIN_RETRY_S, retry_after_s)))


PATIENCE_HEADER = "x-request-timeout"
NOTHING_KNOWN = RequestCost()


_LONG_PARAMETERS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "stop", "bad_words")


def _size(given: str | Mapping[str, float] | Sequence[str] | Sequence[int]) -> int:
    """Return the characters of texts, or the number of other entries."""
    if isinstance(given, str | Mapping):
        return len(given)
    return sum(len(item) if isinstance(item, str) else 1 for item in given)


class QueueAdmission:
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
        if not self._num_preparing and self._has_room(patience_s):
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
                raise _quota_used_up(wait_s)
        refuse_overload(load, self._limits, NOTHING_KNOWN, patience_s)

    def check_items(self, request: SamplingFields) -> None:
        """Refuses parameters whose reading alone would hold everybody up.

        Raises:
            InvalidParameter: they are too many, or too long.
        """
        sizes = {name: _size(given) for name in _LONG_PARAMETERS if (given := getattr(request, name))}
        if sum(sizes.values()) > self._max_parameter_items:
            name = max(sizes, key=lambda name: sizes[name])
            told = ", ".join(f"{name} {size}" for name, size in sizes.items())
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
        if self._has_room(patience_s):
            return
        if background:
            limits = dataclasses.replace(self._limits, max_queue_wait_s=math.inf)
            refuse_overload(self._engine.load(tenant, background=True), limits, cost, patience_s)
        else:
            refuse_overload(self._engine.load(tenant), self._limits, cost, patience_s)
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

    def _has_room(self, patience_s: float | None) -> bool:
        """Whether the deciders would let anything in: what can be at all does not wait for an idle engine.

        Estimates would matter to a caller's patience or a quota only; asking for them folds the engine's events.
        """
        return self._engine.is_idle and patience_s is None and self._quotas is None


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
