"""Fleets of 10 to 10,000 workers, worked out from what was measured: the tables of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.gateway import GatewayPrices
from twostroke.cost.fleet import FleetLimits, FrontCosts, WorkerSpeed, fleet_limits
from twostroke.tables import print_table

TOKEN_US = 28.69
"""benchmarks/results/server-throughput.json: the HTTP process, microseconds of a processor a token."""
REQUEST_US = 500.0
"""docs/decisions/017: a request's own half millisecond."""
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 200

MEASURED = WorkerSpeed(
    decode_tokens_per_s=290.0, prefill_tokens_per_s=925.0, num_streams=32, kv_bytes_per_token=114_688, num_hashes=264
)
"""benchmarks/results/compare-qwen3-bf16.json: two cores, 32 streams, 1,056 blocks; every fourth is remembered."""
TWENTY_TIMES = WorkerSpeed(
    decode_tokens_per_s=5800.0,
    prefill_tokens_per_s=18_500.0,
    num_streams=640,
    kv_bytes_per_token=114_688,
    num_hashes=4096,
)
"""A worker that is assumed, not measured: an accelerator that does twenty times as much of everything."""

Tables = dict[str, list[FleetLimits]]


def fleets(
    route_us: Mapping[int, float], report_us: Mapping[int, float], hash_bytes: float, prices: GatewayPrices
) -> Tables:
    """Limits of fleets of the sizes that the router was measured at, half of them prefill.

    Args:
        route_us: of a decision and its book-keeping, by number of members.
        report_us: of a report that is taken in, by number of members.
        hash_bytes: of a remembered hash.
        prices: of the gateway.
    """
    found: Tables = {}
    for name, worker in (("measured", MEASURED), ("twenty_times", TWENTY_TIMES)):
        rows = found[name] = []
        for size in sorted(size for size in route_us if size >= 2):
            costs = FrontCosts(
                token_us=TOKEN_US,
                request_us=REQUEST_US,
                route_us=route_us[size],
                report_us=report_us[size],
                heartbeat_us=prices.heartbeat_us,
                hash_bytes=hash_bytes,
                journal_prompt_token_bytes=prices.journal_prompt_token_bytes,
                journal_token_bytes=prices.journal_token_bytes,
                journal_stream_bytes=prices.journal_stream_bytes,
            )
            rows.append(fleet_limits(size // 2, size - size // 2, worker, costs, PROMPT_TOKENS, OUTPUT_TOKENS))
    return found


def figures(tables: Tables) -> dict[str, Any]:
    """For a result."""
    workers = {"measured": MEASURED, "twenty_times": TWENTY_TIMES}
    return {
        name: {"worker": asdict(workers[name]), "fleets": [msgspec.to_builtins(row) for row in rows]}
        for name, rows in tables.items()
    }


def print_fleets(tables: Tables, console: Console | None = None) -> None:
    """The tables, for people."""
    for name, rows in tables.items():
        table = Table(title=f"workers: {name}", box=None, pad_edge=False, header_style="bold", title_justify="left")
        for column in ("workers", "tokens/s", "text cores", "routing", "membership", "gateways", "connections"):
            table.add_column(column, justify="right")
        for row in rows:
            gateways = "none" if row.num_gateways is None else f"{row.num_gateways:,}"
            connections = "" if row.connections_per_gateway is None else f"{row.connections_per_gateway:,}"
            cores = (f"{row.text_cores:,.2f}", f"{row.routing_cores:,.2f}", f"{row.membership_share:.3f}")
            table.add_row(f"{row.num_workers:,}", f"{row.tokens_per_s:,.0f}", *cores, gateways, connections)
        print_table(table, console or Console())
