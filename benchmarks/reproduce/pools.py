"""Two pools on one machine compared with one process: start time, cost and benefit.

start       seconds until the engine takes requests, one prefill and one decode process / one process
P idle      tokens per second of a decode process with all threads, while the prefill process is idle / one
            process with as many threads: the cost of the gateway's journal, the heartbeats and an idle process
split       half of the threads each, every prompt handed over. With half of the threads a process takes P' seconds for
            all prompts, D' for all answers to prompts that are cached, each while another process does the
            other; p' for one such prompt and d' for one such answer:

                split           max(P' + d', p' + D')        both at once, the slower one counts; D begins after the
                                                             first prompt, and has the last answer left when P ends
                one process     measured                     its steps do both: it takes less than P and D one by one

R7: goodput with and without disaggregation, on equal hardware, over the speed of the link between the two pools.

One process with all threads against a prefill and a decode process with half of them each. Goodput is the rate of
requests that keep both limits of an SLO; each set-up is offered the same Poisson loads, and its best counts.

    one process     prefills are chunks in the steps of decodes, which delay their tokens
    two pools       no token waits for a prompt, but each phase has half of the processor, and KV has to be transferred

The link carries at most    link bytes/s / (prompt tokens x KV bytes of a token)    requests per second. The crossover
is where that equals the rate of one process: below, disaggregation cannot win, whatever else it saves. The link is the
loopback of a network namespace, slowed down (needs root and iproute2), or shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.alternating import alternate, columns
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.handover.link import slow_loopback, why_no_link
from benchmarks.pools.clients import Engine, answer_all, started
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart
from twostroke.measure.report import median, percentiles
from twostroke.measure.workload import Lengths, Workload
from twostroke.outputs import RequestTimes

GOAL_START, GOAL_IDLE = 1.5, 0.95
SLOTS = 16
TWO = PoolConfig(prefill=1, decode=1)


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measure everything alternately, round by round."""
    threads = options.threads or len(os.sched_getaffinity(0))
    rounds, num_requests = (7, 48) if options.full else (1, 8)
    found = asyncio.run(_measure(options, threads, rounds, num_requests))
    start, idle, split, predicted = (median(found[name]) for name in ("start", "idle", "split", "split_predicted"))
    claims = (
        Claim.at_most("start of both pools / of one process", GOAL_START, start, 1.0).judged(options.full),
        Claim.at_least("tokens/s while P is idle / one process", GOAL_IDLE, idle, 1.0).judged(options.full),
        Claim.reported("requests/s with half of the threads each / one process", split, predicted),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, "threads": threads, "slots": SLOTS},
        workload={"requests": num_requests, "decode": DECODES, "prefill": PREFILLS, "mixed": MIXED},
        details=found,
        draw=bar_chart(
            ["time to start", "tokens/s,\nP idle", "requests/s,\nhalf of the threads each"],
            {"predicted": [1.0, 1.0, predicted], "measured": [start, idle, split]},
            "two pools / one process",
            lines=(1.0,),
        ),
        repeats=rounds,
        warmup=1,
    )


PREFILLS, DECODES, MIXED = (512, 1), (16, 96), (512, 96)
"""Prompt and output tokens of a request: all prefill, nearly all decode, and both."""


async def _measure(options: ReproduceOptions, threads: int, rounds: int, num_requests: int) -> dict[str, list[float]]:
    """Return ratios, and the seconds that the prediction of the split needs."""
    start: list[float] = []
    idles: list[float] = []
    parts: list[dict[str, float]] = []
    whole, half = (_config(options, max(1, threads // share), sum(MIXED)) for share in (1, 2))
    for _ in range(rounds):
        one_s, two_s = await _start_s(whole, None), await _start_s(whole, TWO)
        start.append(two_s / one_s)

    def load(lengths: tuple[int, int], seed: int, number: int = num_requests) -> Workload:
        """Return a load; a new seed gives new prompts, none of which is cached."""
        return options.workload_of_lengths([lengths] * number, seed=seed)

    async with started(whole) as one, started(whole, TWO) as idle:
        for i in range(rounds + 1):
            alone_s = await _took_s(one, load(DECODES, i))
            beside_s = await _took_s(idle, load(DECODES, i))
            idles.append(alone_s / beside_s)
    half_each = started(half, TWO, placer=LeastBusy())
    async with started(whole) as one, started(half) as left, started(half) as right, half_each as split:
        for i in range(rounds + 1):
            mixed, prompts, single = load(MIXED, 200 + i), load(PREFILLS, i), load(MIXED, 300 + i, 1)
            one_s, split_s = await _took_s(one, mixed), await _took_s(split, mixed)
            prefill_s, decode_s = await _took_s(one, prompts), await _took_s(one, mixed)  # their prompts are cached now
            await answer_all(right, mixed)
            half_prefill_s, half_decode_s = await asyncio.gather(_took_s(left, prompts), _took_s(right, mixed))
            both_s, last_s = await _took_s(left, single), await _took_s(left, single)
            first_s = max(0.0, both_s - last_s)
            parts.append(
                {
                    "split": one_s / split_s,
                    "split_predicted": one_s / max(half_prefill_s + last_s, first_s + half_decode_s),
                    "one prefill": prefill_s,
                    "one decode": decode_s,
                    "half prefill": half_prefill_s,
                    "half decode": half_decode_s,
                    "first prompt": first_s,
                    "last answer": last_s,
                    "one mixed": one_s,
                    "split mixed": split_s,
                }
            )
    return {"start": start, "idle": idles[1:], **columns(parts[1:])}  # the first rounds warm up


def _config(options: ReproduceOptions, threads: int, num_tokens: int) -> EngineConfig:
    """Return settings with KV memory for four requests of so many tokens per slot."""
    return EngineConfig.from_keywords(
        model=options.model,
        threads=threads,
        max_model_len=num_tokens + 16,
        max_num_seqs=SLOTS,
        num_kv_blocks=4 * SLOTS * (num_tokens // 16 + 2),
    )


async def _start_s(config: EngineConfig, pools: PoolConfig | None) -> float:
    began_s = time.perf_counter()
    async with started(config, pools):
        return time.perf_counter() - began_s


async def _took_s(engine: Engine, workload: Workload) -> float:
    began_s = time.perf_counter()
    await answer_all(engine, workload)
    return time.perf_counter() - began_s


PROMPT, OUTPUT = 768, 64
LINKS_MBIT = (30, 100, 1000)
SHARES = (0.5, 0.85)
"""Offered loads, as shares of the rate of one process that always has work."""
TTFT_TIMES, TPOT_TIMES = 6.0, {"loose": 8.0, "tight": 2.0}
"""SLO: multiples of the TTFT and the TPOT of a request that runs alone."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration that serves the load."""

    pools: PoolConfig | None = None
    hands_over: bool = False
    """Whether every prompt is handed over; False: the router decides."""
    link_mbit: int | None = None


def reproduce_disaggregation(options: ReproduceOptions) -> Reproduction:
    """Measure one request alone and the capacity of one process, then the goodput of every set-up."""
    threads = options.threads or len(os.sched_getaffinity(0))
    for_s, rounds = (8.0, 3) if options.full else (2.0, 1)
    no_link = why_no_link()
    links = () if no_link else LINKS_MBIT if options.full else LINKS_MBIT[:1]
    found = _measure_goodput(options, threads, for_s, links, rounds)
    goodputs: dict[str, dict[str, float]] = found["goodput"]
    bytes_each = PROMPT * found["kv_bytes_per_token"]
    one = {slo: goodputs[slo]["one process"] for slo in TPOT_TIMES}
    best = {slo: max(rate for name, rate in goodputs[slo].items() if name != "one process") for slo in TPOT_TIMES}
    claims = [
        Claim.reported(f"goodput, {slo} TPOT: the best of two pools / one process", best[slo] / one[slo])
        for slo in TPOT_TIMES
        if one[slo]
    ]
    crossover = one["loose"] * bytes_each * 8 / 1e6
    claims.append(Claim.reported("link below which two pools cannot win, Mbit/s, loose TPOT", crossover))
    for mbit in links:
        carries = mbit * 1e6 / 8 / bytes_each
        most = min(carries, found["split_most"])
        claims.append(
            Claim.at_most(
                f"requests/s over {mbit} Mbit/s, each handed over", 1.1 * most, found["done"][f"{mbit} Mbit/s"], most
            ).judged(options.full)
        )
    return Reproduction(
        claims=tuple(claims),
        config={"model": options.model_name, "threads": threads, "slots": SLOTS},
        workload={"prompt": PROMPT, "output": OUTPUT, "shares": SHARES, "seconds": for_s},
        details={**found, "crossover_mbit": crossover},
        remarks=(f"no slow links: {no_link}",) if no_link else (),
        draw=lambda figure: _draw(figure, goodputs),
        figure_size=(9.0, 3.6),
        repeats=rounds,
    )


def _measure_goodput(
    options: ReproduceOptions, threads: int, for_s: float, links: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Measure all set-ups alternately, in each round with other loads; return medians."""
    whole, half = (_config(options, max(1, threads // share), PROMPT + OUTPUT) for share in (1, 2))
    alone, capacity, kv_bytes_per_token = asyncio.run(_one_process(options, whole))
    split_most = asyncio.run(_each_phase(options, half))
    ttft_s = TTFT_TIMES * median([times.ttft_s for times in alone])
    token_s = median([times.tpot_s or 0.0 for times in alone])
    limits_s = {slo: times * token_s for slo, times in TPOT_TIMES.items()}
    shm, tcp = (PoolConfig(prefill=1, decode=1, kv_transport=transport) for transport in ("shm", "tcp"))
    set_ups = {
        "one process": Configuration(),
        **{f"{mbit} Mbit/s": Configuration(tcp, hands_over=True, link_mbit=mbit) for mbit in links},
        "shared memory": Configuration(shm, hands_over=True),
        **{f"{mbit} Mbit/s, routed": Configuration(tcp, link_mbit=mbit) for mbit in links[:1]},
        "shared memory, routed": Configuration(shm),
    }

    def serve(name: str, number: int) -> list[list[RequestTimes]]:
        """Return the answers to each load."""
        loads = [_load(options, 4.0, 0.25 * capacity, seed=100 * number + 7)]
        for i, share in enumerate(SHARES, 1):  # new prompts for each, none of which is cached
            loads.append(_load(options, for_s, share * capacity, seed=100 * number + 1000 * i))
        return asyncio.run(_answers(set_ups[name], half if set_ups[name].pools else whole, loads))

    served = {name: list(zip(*of, strict=True)) for name, of in alternate(rounds, set_ups, serve).items()}
    good = {
        slo: {
            name: [[_rate(answers, for_s, ttft_s, limit_s) for answers in of_share] for of_share in by_share]
            for name, by_share in served.items()
        }
        for slo, limit_s in limits_s.items()
    }
    return {
        "goodput": {slo: {name: max(map(median, of)) for name, of in names.items()} for slo, names in good.items()},
        "goodput_by_share_and_round": good,
        "done": {name: median([_rate(answers, for_s) for answers in of[-1]]) for name, of in served.items()},
        "latencies": {
            f"{name} at {share:g}": [_latencies(answers) for answers in of_share]
            for name, by_share in served.items()
            for share, of_share in zip(SHARES, by_share, strict=True)
        },
        "slo": {"ttft_s": ttft_s, **{f"tpot_{slo}_s": limit for slo, limit in limits_s.items()}},
        "capacity": capacity,
        "split_most": split_most,
        "kv_bytes_per_token": kv_bytes_per_token,
    }


async def _one_process(options: ReproduceOptions, config: EngineConfig) -> tuple[list[RequestTimes], float, int]:
    """Return the times of requests that run alone, requests per second, and KV bytes per token."""
    async with started(config) as one:
        _, *alone = [
            (await answer_all(one, options.workload_of_lengths([(PROMPT, OUTPUT)], seed=1 + i)))[0] for i in range(6)
        ]
        capacity = _rate(await answer_all(one, options.workload_of_lengths([(PROMPT, OUTPUT)] * 3 * SLOTS, seed=9)))
        return alone, capacity, one.facts.kv_bytes_per_token


async def _each_phase(options: ReproduceOptions, config: EngineConfig) -> float:
    """Return the requests per second of the slower phase, with one process for each."""
    async with started(config) as half:
        prefill = _rate(await answer_all(half, options.workload_of_lengths([(PROMPT, 1)] * SLOTS, seed=10)))
        decode = _rate(await answer_all(half, options.workload_of_lengths([(16, OUTPUT)] * 3 * SLOTS, seed=11)))
    return min(prefill, decode)


async def _answers(set_up: Configuration, config: EngineConfig, loads: Sequence[Workload]) -> list[list[RequestTimes]]:
    """Return the answers of a set-up to each load but the first, which warms up."""
    with _network(set_up) as prefix:
        placer = LeastBusy() if set_up.hands_over else None
        async with started(config, set_up.pools, placer=placer, prefix=prefix) as engine:
            return [await answer_all(engine, load) for load in loads][1:]


def _load(options: ReproduceOptions, for_s: float, rate: float, seed: int) -> Workload:
    count = max(2, round(for_s * rate))
    return options.drawn(count, Lengths.fixed(PROMPT), Lengths.fixed(OUTPUT), rate=rate, seed=seed)


def _rate(
    answers: Sequence[RequestTimes], least_s: float = 0.0, ttft_s: float = math.inf, tpot_s: float = math.inf
) -> float:
    """Return the requests per second within both limits; the run counts at least `least_s` seconds."""
    took_s = max(least_s, *(times.arrival_s + times.e2e_s for times in answers))
    return sum(times.ttft_s <= ttft_s and (times.tpot_s or 0.0) <= tpot_s for times in answers) / took_s


def _latencies(answers: Sequence[RequestTimes]) -> dict[str, Any]:
    return {
        "ttft_s": percentiles([times.ttft_s for times in answers]),
        "tpot_s": percentiles([times.tpot_s for times in answers if times.tpot_s is not None]),
    }


@contextlib.contextmanager
def _network(set_up: Configuration) -> Generator[tuple[str, ...]]:
    """Yield the prefix for the command of a process that uses this link."""
    if set_up.link_mbit is None:
        yield ()
        return
    with slow_loopback(set_up.link_mbit / 1000) as prefix:
        yield prefix


def _draw(figure: Any, goodputs: dict[str, dict[str, float]]) -> None:
    for axes, (slo, rates) in zip(figure.subplots(1, len(goodputs), sharey=True), goodputs.items(), strict=True):
        names = list(rates)
        colours = [PREDICTED if name == "one process" else MEASURED for name in names]
        axes.barh(names, [rates[name] for name in names], color=colours)
        axes.axvline(rates["one process"], color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel(f"requests/s that keep the SLO, {slo} TPOT")
