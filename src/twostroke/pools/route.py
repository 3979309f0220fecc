"""A request to the router and its answer, with the figures behind the decision."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.config.checks import check_int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """A request as the router sees it: counts and hashes, no tokens.

    Raises:
        InvalidParameter: no prompt tokens, no output token, or more hashes than full blocks.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    """Expected output tokens; their limit if no better estimate is known."""
    block_hashes: Sequence[bytes] = ()
    """Chained hashes of the prompt's full blocks, from the start on."""
    block_size: int = 16
    """Tokens per hash: the largest block size of all members. A member whose block size does not divide it has none of
    these."""
    whole_tokens: int = 0
    """Granularity in tokens at which prefixes can be handed over between any members; 0: block_size."""
    may_be_handed_over: bool = True
    """Whether it may be handed over; False if only the decoding member can answer it, as prompt_logprobs."""

    @property
    def has_full_block(self) -> bool:
        """Whether there is KV to hand over: at least one whole block of every member's size."""
        return self.num_prompt_tokens >= (self.whole_tokens or self.block_size)

    def __post_init__(self) -> None:
        """Check that all counts are valid."""
        for name in ("num_prompt_tokens", "num_output_tokens", "block_size"):
            check_int(name, getattr(self, name), 1)
        most = self.num_prompt_tokens // self.block_size
        limit = f"at most {most} hashes, one for each full block of {self.num_prompt_tokens} tokens"
        check_int("block_hashes", len(self.block_hashes), 0, most, limit=limit)


class RouteReason(enum.StrEnum):
    """Reason for a route."""

    HAND_OVER_PAYS = "hand_over_pays"
    NOT_ALLOWED = "not_allowed"
    """The request asks for something that is not handed over."""
    NO_FULL_BLOCK = "no_full_block"
    """The prompt is shorter than a block, and only whole blocks are handed over."""
    NO_PREFILL_MEMBER = "no_prefill_member"
    """No prefill member is ready."""
    PROMPT_TOO_LARGE = "prompt_too_large"
    """No ready prefill member has KV blocks for the prompt."""
    KV_DOES_NOT_FIT = "kv_does_not_fit"
    """The decode members cannot import the KV of any ready prefill member: block or token sizes differ."""
    SHORT_REMAINDER = "short_remainder"
    """The uncached part of the prompt is computed sooner than a hand-over is arranged."""
    PREFILL_BUSY = "prefill_busy"
    """The main obstacle to a hand-over is the prefill member's queue. no_handover.py finds this and the next three
    reasons."""
    SLOW_LINK = "slow_link"
    """The main obstacle is the time of the KV transfer."""
    MORE_IS_CACHED = "more_is_cached"
    """The main obstacle is the decode member's longer cached prefix."""
    SLOW_PREFILL = "slow_prefill"
    """The main obstacle is the prefill member's slower prefill."""
    LOCAL_IS_CHEAPER = "local_is_cheaper"
    """A hand-over to an idle prefill member would not pay either: prefill at the decode member delays few streams."""
    NO_DECODE_LEFT = "no_decode_left"
    """No decode member accepts requests: a prefill member computes the prompt and decodes."""
    NO_DECODE_MEMBER = "no_decode_member"
    """No member is ready: the request cannot be routed."""
    TOO_LARGE = "too_large"
    """No member that decodes has enough KV blocks: the request cannot be routed."""


_WORDS = {
    RouteReason.HAND_OVER_PAYS: "the hand-over is predicted to pay",
    RouteReason.NOT_ALLOWED: "the request asks for results that cannot be handed over with its KV",
    RouteReason.NO_FULL_BLOCK: "the prompt is shorter than one KV block, and only whole blocks are handed over",
    RouteReason.NO_PREFILL_MEMBER: "no prefill member is ready",
    RouteReason.PROMPT_TOO_LARGE: "no prefill member that is ready has KV memory for the prompt",
    RouteReason.KV_DOES_NOT_FIT: "no prefill member is ready whose KV the decode members can take",
    RouteReason.SHORT_REMAINDER: "what is not cached is computed sooner than a hand-over is arranged",
    RouteReason.PREFILL_BUSY: "the prefill pool's queue is too long",
    RouteReason.SLOW_LINK: "the link is too slow for so much KV",
    RouteReason.NO_DECODE_LEFT: "no decode member takes requests, and it decodes until one does",
    RouteReason.MORE_IS_CACHED: "more of the prompt is cached where the request decodes",
    RouteReason.SLOW_PREFILL: "the prefill member computes prompts more slowly",
    RouteReason.LOCAL_IS_CHEAPER: "the decode member has time for the prompt",
}
_ASSUMED_WORDS = {
    RouteReason.SLOW_LINK: "the link is assumed too slow for so much KV",
    RouteReason.SLOW_PREFILL: "the prefill member is assumed to compute prompts more slowly",
}
"""Words for these reasons if a rate behind them was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePrediction:
    """Prediction for one way to run the request; seconds from now. The formulas are in prediction.py."""

    prefill_id: str | None
    """Member that computes the prompt; None: the one that decodes."""
    decode_id: str
    num_cached_tokens: int
    """Tokens that are probably cached where the prompt is computed."""
    queue_s: float
    """Time until its prefill starts."""
    prefill_s: float
    transfer_s: float
    """Time of the transfer of all its KV, without overlap."""
    exposed_s: float
    """Part of transfer and slot that the prefill does not hide: the gap between the first and the second token."""
    ttft_s: float
    late_tokens: float
    """Tokens of other streams that its prefill delays, each by the TPOT target."""
    decode_s: float
    """Time to decode its output."""
    cost_s: float
    """Cost by which ways are compared."""
    assumed_tokens_per_s: float | None = None
    """Prefill rate of the member that computes the prompt, if it is assumed; else None."""
    assumed_bytes_per_s: float | None = None
    """Rate of the link, if it is assumed; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The members that run a request, and why."""

    prefill_id: str | None
    """Member that computes the prompt and lends its KV; None: no hand-over."""
    decode_id: str | None
    """Member that decodes, and also prefills without a hand-over; None: no member can take the request now."""
    reason: RouteReason
    hand_over: RoutePrediction | None
    """Prediction for the cheapest hand-over; None if none was possible."""
    local: RoutePrediction | None
    """Prediction for the cheapest way without a hand-over."""
    detail: str = ""
    """Value, limit and remedy, if the request cannot be routed."""

    @property
    def chosen(self) -> RoutePrediction | None:
        """Prediction for the way that was chosen."""
        return None if self.decode_id is None else self.local if self.prefill_id is None else self.hand_over

    @property
    def words(self) -> str:
        """Route and reason in words.

        >>> Route(prefill_id=None, decode_id="d0", reason=RouteReason.SLOW_LINK, hand_over=None, local=None).words
        'd0 computes the prompt itself: the link is too slow for so much KV'
        """
        if self.decode_id is None:
            return self.detail
        why = self._why
        if self.local is not None and self.hand_over is not None:
            costs = f"predicted cost {self.local.cost_s:.3f} s alone, {self.hand_over.cost_s:.3f} s handed over"
            why += f" ({'; '.join((costs, *self._assumptions))})"
        if self.prefill_id is None:
            return f"{self.decode_id} computes the prompt itself: {why}"
        return f"{self.prefill_id} computes the prompt for {self.decode_id}: {why}"

    @property
    def _why(self) -> str:
        """Reason in words; it is called an assumption if a rate behind it was not measured."""
        ways = [way for way in (self.local, self.hand_over) if way is not None]
        is_assumed = {
            RouteReason.SLOW_LINK: any(way.assumed_bytes_per_s is not None for way in ways),
            RouteReason.SLOW_PREFILL: any(way.assumed_tokens_per_s is not None for way in ways),
        }
        return (_ASSUMED_WORDS if is_assumed.get(self.reason) else _WORDS)[self.reason]

    @property
    def _assumptions(self) -> list[str]:
        """Assumed rates behind the predicted costs; the link's only if it is the reason."""
        found: dict[str, str] = {}
        for way in (self.local, self.hand_over):
            if way is not None and way.assumed_tokens_per_s is not None:
                found[way.prefill_id or way.decode_id] = f"{way.assumed_tokens_per_s:,.0f} prompt tokens/s"
        if self.reason is RouteReason.SLOW_LINK and self.hand_over is not None and self.hand_over.assumed_bytes_per_s:
            found["the link"] = f"{self.hand_over.assumed_bytes_per_s / 1e9:,.3g} GB/s"
        rates = ", ".join(f"{rate} of {name}" for name, rate in found.items())
        return [f"assumed, as not measured yet: {rates}"] if rates else []
