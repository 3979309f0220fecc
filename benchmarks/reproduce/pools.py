"""Two pools on one machine beside one process: how long they take to start, and what they cost and bring.

start       seconds until the engine takes requests, one prefill and one decode process / one process
P idle      tokens per second of a decode process with all threads, while the prefill process has nothing to do / one
            process with as many: what the gateway's journal, the heartbeats and a sleeping process cost
split       half of the threads each, every prompt handed over. With half of the threads a process takes P' seconds for
            all prompts, D' for all answers to prompts that are cached, each beside another process that does the
            other; p' for one such prompt and d' for one such answer:

                split           max(P' + d', p' + D')        both at once, the slower one counts; D begins behind the
                                                             first prompt, and has the last answer left when P ends
                one process     measured                     its steps do both: it takes less than P and D one by one
"""

from __future__ import annotations

import asyncio
import os
import time

from benchmarks.pools.clients import Engine, answer_all, started
from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart
from twostroke.measure.report import median
from twostroke.measure.workload import Workload, of_lengths

GOAL_START, GOAL_IDLE = 1.5, 0.95
SLOTS = 16
TWO = PoolConfig(prefill=1, decode=1)


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measures everything in turn, round by round."""
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
            {"predicted": ([1.0, 1.0, predicted], PREDICTED), "measured": ([start, idle, split], MEASURED)},
            "two pools / one process",
            lines=(1.0,),
        ),
        repeats=rounds,
        warmup=1,
    )


PREFILLS, DECODES, MIXED = (512, 1), (16, 96), (512, 96)
"""Prompt and output tokens of a request: all prefill, nearly all decode, and both."""
PARTS = (
    "one prefill",
    "one decode",
    "half prefill",
    "half decode",
    "first prompt",
    "last answer",
    "one mixed",
    "split mixed",
)
"""What the split is predicted from, and what it is, in seconds."""


async def _measure(options: ReproduceOptions, threads: int, rounds: int, num_requests: int) -> dict[str, list[float]]:
    names = ("start", "idle", "split", "split_predicted", *PARTS)
    found: dict[str, list[float]] = {name: [] for name in names}
    whole, half = _config(options, threads), _config(options, max(1, threads // 2))
    for _ in range(rounds):
        one_s, two_s = await _start_s(whole, None), await _start_s(whole, TWO)
        found["start"].append(two_s / one_s)

    def load(lengths: tuple[int, int], seed: int, number: int = num_requests) -> Workload:
        """With a new seed new prompts: nothing of them is cached."""
        return of_lengths([lengths] * number, vocab_size=options.vocab_size(), seed=seed)

    async with started(whole) as one, started(whole, TWO) as idle:
        for i in range(rounds + 1):
            alone_s = await _took_s(one, load(DECODES, i))
            beside_s = await _took_s(idle, load(DECODES, i))
            found["idle"] += [alone_s / beside_s] if i else []
    half_each = started(half, TWO, placer=LeastBusy())
    async with started(whole) as one, started(half) as left, started(half) as right, half_each as split:
        for i in range(rounds + 1):
            mixed, prompts, single = load(MIXED, 200 + i), load(PREFILLS, i), load(MIXED, 300 + i, 1)
            one_s, split_s = await _took_s(one, mixed), await _took_s(split, mixed)
            prefill_s, decode_s = await _took_s(one, prompts), await _took_s(one, mixed)  # these are cached now
            await answer_all(right, mixed)
            half_prefill_s, half_decode_s = await asyncio.gather(_took_s(left, prompts), _took_s(right, mixed))
            both_s, last_s = await _took_s(left, single), await _took_s(left, single)
            first_s = max(0.0, both_s - last_s)
            parts = (prefill_s, decode_s, half_prefill_s, half_decode_s, first_s, last_s, one_s, split_s)
            if i:
                for name, seconds in zip(PARTS, parts, strict=True):
                    found[name].append(seconds)
                predicted_s = max(half_prefill_s + last_s, first_s + half_decode_s)
                found["split"].append(one_s / split_s)
                found["split_predicted"].append(one_s / predicted_s)
    return found


def _config(options: ReproduceOptions, threads: int) -> EngineConfig:
    return EngineConfig.from_keywords(
        model=options.model,
        threads=threads,
        max_model_len=sum(MIXED) + 16,
        max_num_seqs=SLOTS,
        num_kv_blocks=4 * SLOTS * (sum(MIXED) // 16 + 2),
    )


async def _start_s(config: EngineConfig, pools: PoolConfig | None) -> float:
    began_s = time.perf_counter()
    async with started(config, pools):
        return time.perf_counter() - began_s


async def _took_s(engine: Engine, workload: Workload) -> float:
    began_s = time.perf_counter()
    await answer_all(engine, workload)
    return time.perf_counter() - began_s
