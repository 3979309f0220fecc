"""`python -m benchmarks router`: the cost of the router's decisions by the size of its pools, without a model.

Half of the members prefill, half decode. Between two decisions the chosen members are updated (`placed`) and one member
reports (`put`), as in a gateway. Times are processor times: other work on the machine lengthens them only through
caches.

In addition, the cost of the gateway of pools for a heartbeat, for a token in its journal, and for a journal that grows;
and fleets of 10 to 10,000 workers, computed from these measurements: the tables of docs/scaling.md.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from twostroke.batch import NewRequest
from twostroke.cluster.dispatcher import Dispatcher
from twostroke.cluster.engine_process import EngineProcess
from twostroke.cluster.messages import Alive, StartEngine
from twostroke.cluster.routed_placer import LeastBusy, ReadyWorker
from twostroke.config.checks import check_int
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import RoutingConfig
from twostroke.cost.fleet import FleetLimits, GatewayPrices, WorkerSpeed, fleet_limits
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.token_update import TokenUpdate
from twostroke.kv_cache.prefix_cache import hash_blocks
from twostroke.measure.report import DEFAULT_FOLDER, check_folder, median, percentiles, record, settings
from twostroke.pools.directory import PrefixDirectory
from twostroke.pools.member import Member, Role
from twostroke.pools.route import RouteRequest
from twostroke.pools.router import Router
from twostroke.sampling_params import SamplingParams
from twostroke.tables import plain_table, print_table

NUM_STREAMS, STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 1000, (16, 512), 200
NUM_HEARTBEATS, HEARTBEATS_APART_S = 2000, 0.001
_HEART = """
import sys, time
from pathlib import Path
import zmq
from twostroke.cluster.messages import Alive, encode_message
from twostroke.cluster.process_sockets import engine_ends
context = zmq.Context()
commands, reports = engine_ends(context, Path(sys.argv[1]))
commands.recv()
for _ in range(%d):
    reports.send(encode_message(Alive()))
    time.sleep(%g)
reports.close()
commands.close()
context.term()
"""
"""Child process that only sends heartbeats, with a count and an interval."""


@dataclass(frozen=True, slots=True)
class GatewayCosts:
    """Costs of one gateway."""

    heartbeat_us: float
    """Processor time per heartbeat, each received separately, without other messages."""
    update_us: float
    """Processor time to receive one token of one stream and write it down."""
    journal_prompt_token_bytes: float
    """Bytes per prompt token, which the request stores as one object each."""
    journal_token_bytes: float
    """Bytes per delivered output token."""
    journal_stream_bytes: float
    """Bytes per stream, in addition to its tokens."""


def measure_gateway() -> GatewayCosts:
    """Measure the costs of a gateway."""
    few, many = STREAM_PROMPT_TOKENS
    (_, _, of_few), (update_us, token_bytes, of_many) = _journal(few), _journal(many)
    prompt_bytes = (of_many - of_few) / (many - few)
    stream_bytes = of_few - few * prompt_bytes
    return GatewayCosts(asyncio.run(_heartbeat_us()), update_us, prompt_bytes, token_bytes, stream_bytes)


async def _heartbeat_us() -> float:
    """Return the microseconds per heartbeat, with a real child, real sockets, and the event loop that wakes up for
    each."""
    heart = _HEART % (NUM_HEARTBEATS, HEARTBEATS_APART_S)
    process = await EngineProcess.spawn(StartEngine(EngineConfig()), (sys.executable, "-c", heart), final_reports_s=0.0)
    try:
        assert isinstance(await process.receive(), Alive)
        began_s, num_heard = time.process_time(), 0
        while await process.receive() is not None:
            num_heard += 1
        return 1e6 * (time.process_time() - began_s) / num_heard
    finally:
        await process.stop()


def _journal(num_prompt_tokens: int) -> tuple[float, float, float]:
    """Return microseconds of an update, bytes of an output's token, and of a stream, its prompt included."""
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(ReadyWorker("decode-0.1", Role.DECODE, None, 16))
    tracemalloc.start()
    for i in range(NUM_STREAMS):
        # as in a prompt from the network, each token id is a separate object
        prompt = tuple(int(str(1000 + token)) for token in range(num_prompt_tokens))
        params = SamplingParams(max_tokens=STREAM_OUTPUT_TOKENS + 1)
        dispatcher.add(GenerationRequest(NewRequest(f"r{i}", prompt, params, 0), 0.0, STREAM_OUTPUT_TOKENS + 1))
    empty = tracemalloc.get_traced_memory()[0]
    updates = [
        [TokenUpdate(f"r{i}", 0.0, (1000 + place,), start=place) for i in range(NUM_STREAMS)]
        for place in range(STREAM_OUTPUT_TOKENS)
    ]
    before = tracemalloc.get_traced_memory()[0]
    for step in updates[: STREAM_OUTPUT_TOKENS // 2]:
        dispatcher.process_updates("decode-0.1", step)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    began_s = time.process_time()
    for step in updates[STREAM_OUTPUT_TOKENS // 2 :]:
        dispatcher.process_updates("decode-0.1", step)
    update_us = 1e6 * (time.process_time() - began_s) / (NUM_STREAMS * STREAM_OUTPUT_TOKENS // 2)
    token_bytes = grown / (NUM_STREAMS * STREAM_OUTPUT_TOKENS // 2)
    return update_us, token_bytes, empty / NUM_STREAMS


TOKEN_US = 22.89
"""Microseconds of a processor per token in the HTTP process: benchmarks/results/server-throughput.json."""
REQUEST_US = 500.0
"""Microseconds per request: docs/decisions/017 has half a millisecond."""
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 200

MEASURED = WorkerSpeed(
    decode_tokens_per_s=290.0, prefill_tokens_per_s=925.0, num_streams=32, kv_bytes_per_token=114_688, num_hashes=264
)
"""Measured worker, benchmarks/results/compare-qwen3-bf16.json: two cores, 32 streams, 1,056 blocks; every fourth is
remembered."""
TWENTY_TIMES = WorkerSpeed(
    decode_tokens_per_s=5800.0,
    prefill_tokens_per_s=18_500.0,
    num_streams=640,
    kv_bytes_per_token=114_688,
    num_hashes=4096,
)
"""Assumed worker, not measured: an accelerator that is twenty times as fast in everything."""

WORKERS = {"measured": MEASURED, "twenty_times": TWENTY_TIMES}

Tables = dict[str, list[FleetLimits]]


def fleets(
    route_us: Mapping[int, float], report_us: Mapping[int, float], hash_bytes: float, prices: GatewayCosts
) -> Tables:
    """Return the limits of fleets of the sizes that the router was measured at, half of them prefill.

    Args:
        route_us: of a decision and its book-keeping, by number of members.
        report_us: of receiving a report, by number of members.
        hash_bytes: of a remembered hash.
        prices: of the gateway.
    """
    found: Tables = {}
    for name, worker in WORKERS.items():
        rows = found[name] = []
        for size in sorted(size for size in route_us if size >= 2):
            costs = GatewayPrices(
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
    """Return the tables for a result."""
    return {
        name: {"worker": asdict(WORKERS[name]), "fleets": [msgspec.to_builtins(row) for row in rows]}
        for name, rows in tables.items()
    }


def print_fleets(tables: Tables, console: Console | None = None) -> None:
    """Print the tables."""
    for name, rows in tables.items():
        columns = ("workers", "tokens/s", "text cores", "routing", "membership", "gateways", "connections")
        table = plain_table((), columns, f"workers: {name}")
        for row in rows:
            gateways = "none" if row.num_gateways is None else f"{row.num_gateways:,}"
            connections = "" if row.connections_per_gateway is None else f"{row.connections_per_gateway:,}"
            cores = (f"{row.text_cores:,.2f}", f"{row.routing_cores:,.2f}", f"{row.membership_share:.3f}")
            table.add_row(f"{row.num_workers:,}", f"{row.tokens_per_s:,.0f}", *cores, gateways, connections)
        print_table(table, console or Console())


BLOCK_SIZE = 16
PREFIX_BLOCKS, OWN_BLOCKS = 48, 16
NUM_PREFIXES = 500
_SEARCHED_WHOLE = 100
"""Largest pools that are also searched completely: pairs grow with the square."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Numbers of members and decisions, and the result's place."""

    members: tuple[int, ...] = ()
    """Sizes of both pools together, a row each; can be repeated. Default: 1, 10, 100, 1,000 and 10,000."""
    decisions: int = 2000
    """Measured decisions of each size, after half as many to warm up."""
    seed: int = 0
    """Seed of the members' loads and the requests."""
    name: str = "router"
    """Name of the written file."""
    results: Path = DEFAULT_FOLDER
    """Folder for the result."""

    def __post_init__(self) -> None:
        for size in self.members:
            check_int("members", size, 1, 100_000)
        check_int("decisions", self.decisions, 10)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the rows."""
        return self.members or (1, 10, 100, 1000, 10_000)


@dataclass(frozen=True, slots=True)
class RouterRow:
    """Figures of one size; microseconds of processor time."""

    members: int
    route_us: dict[str, float]
    """Percentiles of the time of a decision."""
    placed_us: float
    """Median time to record a placed request."""
    put_us: float
    """Median time to apply a member's report."""
    decode_us: float
    """Median time to decode the report before."""
    hand_overs: float
    """Share of decisions with a hand-over."""
    whole_route_us: float | None
    """Median time of a decision that compares every pair; None if pools are too large for it."""
    cost_over_whole: float | None
    """Mean predicted cost of the chosen pair, relative to the best of all pairs."""


def run_router(options: RouterOptions) -> tuple[list[RouterRow], Tables]:
    """Measure every size, compute fleets of these sizes, and save JSON."""
    check_folder(options.results)
    rows, bytes_per_hash = [_row(size, options) for size in options.sizes], _bytes_per_hash()
    route_us = {row.members: row.route_us["mean"] + row.placed_us for row in rows}
    prices = measure_gateway()
    tables = fleets(route_us, {row.members: row.put_us for row in rows}, bytes_per_hash, prices)
    record(
        "python -m benchmarks router",
        options,
        config={**settings(options), "members": list(options.sizes), "routing": asdict(RoutingConfig())},
        workload={
            "prompt_blocks": PREFIX_BLOCKS + OWN_BLOCKS,
            "shared_blocks": PREFIX_BLOCKS,
            "prefixes": NUM_PREFIXES,
            "popularity": "zipf",
            "block_size": BLOCK_SIZE,
        },
        results={
            "sizes": {str(row.members): asdict(row) for row in rows},
            "bytes_per_hash": bytes_per_hash,
            "gateway": asdict(prices),
            "computed": figures(tables),
        },
        repeats=options.decisions,
    )
    return rows, tables


def print_router(rows: Sequence[RouterRow], console: Console | None = None) -> None:
    """Print the table."""
    times = ("route us p50", "p99", "placed us", "report us", "decode us", "all pairs us")
    table = plain_table((), ("members", *times, "cost / best"))
    for row in rows:
        whole = ("", "") if row.whole_route_us is None else (f"{row.whole_route_us:,.0f}", f"{row.cost_over_whole:.4f}")
        shown = (row.route_us["p50"], row.route_us["p99"], row.placed_us, row.put_us, row.decode_us)
        table.add_row(f"{row.members:,}", *(f"{us:.0f}" for us in shown), *whole)
    print_table(table, console or Console())


def _row(size: int, options: RouterOptions) -> RouterRow:
    rng = random.Random(options.seed)
    prefixes = [[rng.randrange(1 << 16) for _ in range(PREFIX_BLOCKS * BLOCK_SIZE)] for _ in range(NUM_PREFIXES)]
    router, whole = Router(RoutingConfig()), Router(RoutingConfig(num_candidates=size))
    compares = size <= _SEARCHED_WHOLE
    told = (router, whole) if compares else (router,)
    for member in [_member(number, size, rng) for number in range(size)]:
        for one in told:
            one.put(member)
    decoder = msgspec.msgpack.Decoder(Member)
    steps, whole_us, cost_ratios = list[tuple[float, ...]](), list[float](), list[float]()
    num_warm = options.decisions // 2
    for step in range(num_warm + options.decisions):
        request = _request(prefixes, rng)
        route_us, route = _timed(lambda asked=request: router.route(asked))
        if compares and step >= num_warm and step % 10 == 0:
            taken_us, best = _timed(lambda asked=request: whole.route(asked))
            whole_us.append(taken_us)
            if route.chosen is not None and best.chosen is not None:
                cost_ratios.append(route.chosen.cost_s / best.chosen.cost_s)
        placed_us, _ = _timed(lambda asked=request, chosen=route: router.placed(asked, chosen))
        message = msgspec.msgpack.encode(_member(rng.randrange(size), size, rng))
        decode_us, reporting = _timed(lambda message=message: decoder.decode(message))
        put_us, _ = _timed(lambda member=reporting: router.put(member))
        steps.append((route_us, placed_us, put_us, decode_us, float(route.prefill_id is not None)))
        if compares:
            whole.placed(request, route)
            whole.put(reporting)
    route_us, placed_us, put_us, decode_us, hands_over = zip(*steps[num_warm:], strict=True)
    return RouterRow(
        size,
        percentiles(route_us),
        median(placed_us),
        median(put_us),
        median(decode_us),
        sum(hands_over) / options.decisions,
        median(whole_us) if compares else None,
        sum(cost_ratios) / len(cost_ratios) if cost_ratios else None,
    )


def _timed(call: Callable[[], Answer]) -> tuple[float, Answer]:
    begin_ns = time.thread_time_ns()
    answer = call()
    return (time.thread_time_ns() - begin_ns) / 1000, answer


def _member(number: int, size: int, rng: random.Random) -> Member:
    """Return a member with a random load and the speeds of a small model on a processor."""
    role = Role.BOTH if size == 1 else Role.PREFILL if number % 2 else Role.DECODE
    is_decoding = role is not Role.PREFILL
    num_running = rng.randrange(48) if is_decoding else 0
    return Member(
        member_id=f"m{number:05}",
        role=role,
        num_queued_prompt_tokens=0 if role is Role.DECODE else rng.randrange(4000),
        num_running=num_running,
        max_num_seqs=64,
        num_free_blocks=4096 - 64 * num_running,
        num_blocks=4096,
        block_size=BLOCK_SIZE,
        kv_bytes_per_token=114_688,
        num_layers=28,
        prefill_tokens_per_s=900.0 + rng.randrange(100),
        step_s=0.03 + 0.0025 * num_running,
        step_s_per_sequence=0.0025,
    )


def _request(prefixes: Sequence[Sequence[int]], rng: random.Random) -> RouteRequest:
    rank = min(NUM_PREFIXES - 1, int(NUM_PREFIXES ** rng.random()) - 1)  # log-uniform ranks: Zipf with exponent 1
    own = [rng.randrange(1 << 16) for _ in range(OWN_BLOCKS * BLOCK_SIZE)]
    tokens = [*prefixes[rank], *own, 0]
    hashes = hash_blocks(tokens, BLOCK_SIZE)
    return RouteRequest(
        num_prompt_tokens=len(tokens), num_output_tokens=200, block_hashes=hashes, block_size=BLOCK_SIZE
    )


def _bytes_per_hash() -> float:
    """Return the memory of one remembered hash of one member; half of them are another member's, too."""
    num_members, num_hashes = 20, 4096
    tracemalloc.start()
    try:
        directory = PrefixDirectory(max_holders=8)
        for number in range(num_members):
            directory.open(str(number), num_hashes)
            own = [f"{number}/{i}".encode().ljust(16) for i in range(num_hashes // 2)]
            shared = [f"{number // 2}+{i}".encode().ljust(16) for i in range(num_hashes // 2)]
            directory.add(str(number), own)
            directory.add(str(number), shared)
        return tracemalloc.get_traced_memory()[0] / (num_members * num_hashes)
    finally:
        tracemalloc.stop()
