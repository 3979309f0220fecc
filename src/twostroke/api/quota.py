"""How many tokens a key may use: a bucket that fills at a steady rate. Pure; the caller brings the clock."""

from __future__ import annotations

from dataclasses import dataclass

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
