"""The token budget of a step, and how much of a prompt goes into it.

Both strokes draw on one budget, decodes first; prompts get what is left:

    budget 1,024    |dddd… 32 decodes|######## 992 prompt tokens ########|

So a prompt of 8,192 tokens takes 8 steps when it runs alone and 9 beside 32 decodes (9 x 992 >= 8,192 > 8 x 992). The
other rule, a budget for prompt tokens only, would let the length of a step depend on the number of decodes.
"""

from __future__ import annotations

from typing import Protocol

from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter


class TokenBudget:
    """Query tokens that a step may still take on."""

    __slots__ = ("limit", "num_prefills", "remaining")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.remaining = limit
        """Below zero after a whole prompt that is longer than the budget."""
        self.num_prefills = 0
        """Requests that draw on it for the first stroke."""


class ChunkRule(Protocol):
    """How many of a request's tokens to compute now."""

    def num_tokens_now(self, num_tokens_left: int, budget: TokenBudget) -> int:
        """At most `num_tokens_left`, 0 to let it wait for another step."""
        ...

    def max_tokens_per_step(self, num_tokens: int) -> int:
        """Most tokens that one step may take of a request of `num_tokens`."""
        ...


class ChunkedPrefill:
    """As many as the budget has left: no step exceeds it, and whoever decodes is never held up longer than that."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._limit = max_num_batched_tokens

    def num_tokens_now(self, num_tokens_left: int, budget: TokenBudget) -> int:
        """The rest of the prompt or the rest of the budget, whichever is shorter."""
        return min(num_tokens_left, budget.remaining)

    def max_tokens_per_step(self, num_tokens: int) -> int:
        """The budget."""
        return min(num_tokens, self._limit)


class WholePrefill:
    """The baseline: a prompt is computed in one step.

    One that does not fit into what is left waits for the next step; one that fits into no step at all is the only
    prompt of its step and exceeds the budget, beside the decodes that go into every step. This is the stall that
    chunks avoid.
    """

    def num_tokens_now(self, num_tokens_left: int, budget: TokenBudget) -> int:
        """All or nothing."""
        fits = num_tokens_left <= budget.remaining
        never_fits = num_tokens_left > budget.limit
        return num_tokens_left if fits or (never_fits and not budget.num_prefills) else 0

    def max_tokens_per_step(self, num_tokens: int) -> int:
        """All of them."""
        return num_tokens


def make_chunk_rule(config: SchedulerConfig, keeps_computed_kv: bool) -> ChunkRule:
    """The rule that the settings ask for.

    Raises:
        InvalidParameter: chunks of a prompt whose earlier chunks nobody keeps.
    """
    if not config.enable_chunked_prefill:
        return WholePrefill()
    if not keeps_computed_kv:
        remedy = "Switch it off as well (--no-enable-chunked-prefill)."
        raise InvalidParameter("enable_chunked_prefill", True, "needs the KV cache", remedy)
    return ChunkedPrefill(config.max_num_batched_tokens)
