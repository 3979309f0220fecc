"""Whether one more request may join the queue, how long it would wait, and what a request costs. Pure.

    ahead of it     num_tokens_ahead   prefills that go first, each token takes prefill_s_per_token
                    num_departures     requests that have to end before a slot is its own; of num_slots that run, each
                                       for num_output_tokens steps, one ends every num_output_tokens / num_slots steps

    wait = num_tokens_ahead x prefill_s_per_token + num_departures x num_output_tokens / num_slots x step_s

In a queue that is fair among m tenants only m times a tenant's own backlog goes before its next request. While nothing
was measured the wait is 0: the first requests are what is measured.

A queue longer than what ends in time only makes everybody late: refusing at its entrance keeps the rate of those who
are served in time where it is without overload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.client.input_processor import PromptInput
from twostroke.client.load import Load
from twostroke.errors import InvalidParameter, Overloaded

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


def predicted_wait_s(load: Load) -> float:
    """How long the next request waits before it runs.

    >>> predicted_wait_s(Load(num_slots=4, num_running=4, num_waiting=7, num_own_waiting=7,
    ...                       step_s=0.01, num_output_tokens=100.0))     # 8 of 4 have to end, one every 25 steps
    2.0
    """
    num_ahead = min(load.num_waiting, load.num_own_waiting * load.num_tenants)
    num_tokens_ahead = min(load.num_waiting_tokens, load.num_own_waiting_tokens * load.num_tenants)
    num_departures = max(0, load.num_running + num_ahead + 1 - load.num_slots)
    steps = num_departures * load.num_output_tokens / load.num_slots
    return (load.num_running_tokens + num_tokens_ahead) * load.prefill_s_per_token + steps * load.step_s


def refuse_overload(load: Load, limits: QueueLimits, cost: RequestCost, deadline_s: float | None = None) -> None:
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
