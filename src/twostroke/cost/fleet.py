"""What many workers cost those in front of them: cores of the gateways, memory, connections, the KV link.

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

from twostroke.config.checks import number


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontCosts:
    """What one thing costs a gateway; microseconds are of a processor.

    Raises:
        InvalidParameter: a cost below 0, a budget outside 0 to 1.
    """

    token_us: float
    """From the engine's message to the client's socket."""
    request_us: float
    """Head, body, template, tokenizer, the answer's head and end."""
    route_us: float
    """Decision and book-keeping."""
    report_us: float
    """Decoded and taken in."""
    heartbeat_us: float
    reports_per_s: float = 5.0
    """Of a worker that runs steps, as far as the router hears of them."""
    heartbeats_per_s: float = 0.0
    """Of a worker; one that reports has none, one that has nothing to do has two."""
    journal_prompt_token_bytes: float = 36.0
    journal_token_bytes: float = 4.0
    journal_stream_bytes: float = 1024.0
    hash_bytes: float = 227.0
    budget: float = 0.7
    """Of a gateway's core: the rest is for bursts."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("token_us", "request_us", "route_us", "report_us", "heartbeat_us", "hash_bytes"):
            number(name, getattr(self, name), 0, 1e9, "0 or more")
        number("budget", self.budget, 0, 1, "more than 0 and at most 1", low_open=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpeed:
    """What one worker does."""

    decode_tokens_per_s: float
    """With all of its streams together."""
    prefill_tokens_per_s: float
    num_streams: int
    kv_bytes_per_token: int
    num_hashes: int
    """Remembered for it by a router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """A fleet that is fully busy."""

    num_workers: int
    tokens_per_s: float
    requests_per_s: float
    text_cores: float
    routing_cores: float
    membership_share: float
    """Of one core, in each gateway."""
    num_gateways: int | None
    """None: membership alone takes a gateway's budget, so no number of them is enough."""
    connections_per_gateway: int | None
    """Workers, and the clients of its streams."""
    journal_bytes: float
    prefix_bytes: float
    """In each gateway."""
    prefill_link_bytes_per_s: float
    decode_link_bytes_per_s: float


def fleet_limits(
    num_prefill: int,
    num_decode: int,
    worker: WorkerSpeed,
    costs: FrontCosts,
    num_prompt_tokens: int,
    num_output_tokens: int,
) -> FleetLimits:
    """The arithmetic above. Prefill is taken to keep up with decode.

    >>> costs = FrontCosts(token_us=25.0, request_us=500.0, route_us=250.0, report_us=50.0, heartbeat_us=5.0)
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
