"""Cost of many workers for the gateways: cores, memory, connections, the KV link.

    W workers, P of them prefill, D decode; t output tokens/s of a decode worker; N prompt, o output tokens of a request

    tokens/s     T = D t                requests/s  R = T / o            live streams  S = D x streams of a worker
    text         T x a token + R x a request                             of G gateways together
    routing      R x a decision                                          of G gateways together
    membership   W x (reports/s x a report + heartbeats/s x a heartbeat) of EACH gateway: all hear of all workers
    gateways     G = ceil((text + routing) / (budget - membership))      none, where membership eats the budget
    KV link      KV bytes of a token x tokens/s prefilled                out of a P worker; P / D of it into a D worker
    journal      S x (N x bytes of a prompt's token + o x bytes of an output's + bytes of a stream)
                                                                         of G gateways together
    prefixes     W x hashes of a worker x bytes of a hash                of each gateway

docs/scaling.md says where the figures come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.config.checks import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPrices:
    """Cost of each kind of work for a gateway; microseconds are processor time.

    Raises:
        InvalidParameter: a cost below 0, a budget outside 0 to 1.
    """

    token_us: float
    """One output token, from the engine's message to the client's socket."""
    request_us: float
    """One request: head, body, template, tokenizer, and start and end of the response."""
    route_us: float
    """One routing decision and its bookkeeping."""
    report_us: float
    """Decoding and applying one worker report."""
    heartbeat_us: float
    reports_per_s: float = 5.0
    """Reports of a worker that runs steps, as far as the router receives them."""
    heartbeats_per_s: float = 0.0
    """Heartbeats of a worker: none while it reports, two per second while it is idle."""
    journal_prompt_token_bytes: float = 36.0
    journal_token_bytes: float = 4.0
    journal_stream_bytes: float = 1024.0
    hash_bytes: float = 227.0
    budget: float = 0.7
    """Share of a gateway's core to use; the rest is for bursts."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("token_us", "request_us", "route_us", "report_us", "heartbeat_us", "hash_bytes"):
            check_number(name, getattr(self, name), 0, 1e9, "0 or more")
        check_number("budget", self.budget, 0, 1, "more than 0 and at most 1", low_open=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpeed:
    """Throughput of one worker."""

    decode_tokens_per_s: float
    """Sum over all of its streams."""
    prefill_tokens_per_s: float
    num_streams: int
    kv_bytes_per_token: int
    num_hashes: int
    """Prefix hashes that a router keeps for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """Load on the gateways of a fully busy fleet."""

    num_workers: int
    tokens_per_s: float
    requests_per_s: float
    text_cores: float
    routing_cores: float
    membership_share: float
    """Share of one core, in each gateway."""
    num_gateways: int | None
    """None: membership alone exceeds a gateway's budget, so no number of gateways is enough."""
    connections_per_gateway: int | None
    """Connections to workers and to the clients of its streams."""
    journal_bytes: float
    prefix_bytes: float
    """Bytes in each gateway."""
    prefill_link_bytes_per_s: float
    decode_link_bytes_per_s: float


def fleet_limits(
    num_prefill: int,
    num_decode: int,
    worker: WorkerSpeed,
    costs: GatewayPrices,
    num_prompt_tokens: int,
    num_output_tokens: int,
) -> FleetLimits:
    """Return the gateways' load by the arithmetic above; prefill is assumed to keep up with decode.

    >>> costs = GatewayPrices(token_us=25.0, request_us=500.0, route_us=250.0, report_us=50.0, heartbeat_us=5.0)
    >>> worker = WorkerSpeed(decode_tokens_per_s=400.0, prefill_tokens_per_s=1000.0, num_streams=32,
    ...                      kv_bytes_per_token=100_000, num_hashes=256)
    >>> few, many = (fleet_limits(n, n, worker, costs, 500, 200) for n in (50, 5000))
    >>> few.num_gateways, round(few.text_cores, 2), round(few.membership_share, 3)
    (1, 0.55, 0.025)
    >>> many.num_gateways, round(many.text_cores, 1), round(many.membership_share, 2)
    (None, 55.0, 2.5)
    """
    num_workers = num_prefill + num_decode
    tokens_per_s = num_decode * worker.decode_tokens_per_s
    requests_per_s = tokens_per_s / num_output_tokens
    num_streams = num_decode * worker.num_streams
    text = (tokens_per_s * costs.token_us + requests_per_s * costs.request_us) / 1e6
    routing = requests_per_s * costs.route_us / 1e6
    per_worker_us = costs.reports_per_s * costs.report_us + costs.heartbeats_per_s * costs.heartbeat_us
    membership = num_workers * per_worker_us / 1e6
    left = costs.budget - membership
    num_gateways = max(1, math.ceil((text + routing) / left)) if left > 0 else None
    stream_bytes = (
        num_prompt_tokens * costs.journal_prompt_token_bytes
        + num_output_tokens * costs.journal_token_bytes
        + costs.journal_stream_bytes
    )
    prefill_link = worker.kv_bytes_per_token * worker.prefill_tokens_per_s
    return FleetLimits(
        num_workers=num_workers,
        tokens_per_s=tokens_per_s,
        requests_per_s=requests_per_s,
        text_cores=text,
        routing_cores=routing,
        membership_share=membership,
        num_gateways=num_gateways,
        connections_per_gateway=None if num_gateways is None else num_workers + math.ceil(num_streams / num_gateways),
        journal_bytes=num_streams * stream_bytes,
        prefix_bytes=num_workers * worker.num_hashes * costs.hash_bytes,
        prefill_link_bytes_per_s=prefill_link,
        decode_link_bytes_per_s=prefill_link * num_prefill / num_decode,
    )
