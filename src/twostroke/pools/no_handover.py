"""The reason why a hand-over does not pay: the one change of the prefill side that would help most.

as it is      cost of the best pair > cost of computing the prompt where it decodes
if it were    idle | linked without delay | as warm | as fast    each alone: the cheapest gives the reason
              all of them, and it would still not pay            the reason is not on the prefill side
"""

from __future__ import annotations

from twostroke.config.pools import RoutingConfig
from twostroke.pools.prediction import DecodeSide, PrefillSide, hand_over_cost_s
from twostroke.pools.route import RoutePrediction, RouteReason, RouteRequest


def no_handover_reason(
    request: RouteRequest, pair: tuple[PrefillSide, DecodeSide, float], local: RoutePrediction, config: RoutingConfig
) -> RouteReason:
    """Return the reason why the decode member computes the prompt.

    Args:
        request: a request that could be handed over.
        pair: the cheapest prefill and decode members, and the seconds of the KV transfer between them.
        local: the decode member without a hand-over; it costs no more.
        config: weights of the costs.
    """
    prefill, decode, transfer_s = pair
    local_s_per_token = local.prefill_s / (request.num_prompt_tokens - local.num_cached_tokens)

    def cost_s(side: PrefillSide, travel_s: float = transfer_s) -> float:
        return hand_over_cost_s(side, decode, travel_s, config)

    def as_warm(side: PrefillSide) -> PrefillSide:
        num_cached = max(side.num_cached_tokens, local.num_cached_tokens)
        return PrefillSide.of(side.state, request, num_cached)._replace(queue_s=side.queue_s)

    def as_fast(side: PrefillSide) -> PrefillSide:
        share = min(1.0, local_s_per_token / side.state.prefill_s_per_token)
        return side._replace(prefill_s=side.prefill_s * share, late_tokens=side.late_tokens * share)

    def as_idle(side: PrefillSide) -> PrefillSide:
        return side._replace(queue_s=0.0)

    if cost_s(as_fast(as_warm(as_idle(prefill))), 0.0) >= local.cost_s:
        is_short = local.prefill_s <= config.hand_over_s
        return RouteReason.SHORT_REMAINDER if is_short else RouteReason.LOCAL_IS_CHEAPER
    changed = {
        RouteReason.PREFILL_BUSY: cost_s(as_idle(prefill)),
        RouteReason.SLOW_LINK: cost_s(prefill, 0.0),
        RouteReason.MORE_IS_CACHED: cost_s(as_warm(prefill)),
        RouteReason.SLOW_PREFILL: cost_s(as_fast(prefill)),
    }
    return min(changed, key=lambda reason: changed[reason])
