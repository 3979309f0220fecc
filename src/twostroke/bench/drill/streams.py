"""Streams through two pools whose processes are killed and frozen: what became of each, and how long it paused."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.dispatcher import LeastBusy
from twostroke.engine.pooled_engine import PooledEngine
from twostroke.errors import EngineUnavailable
from twostroke.events import Event, KVImportEnded, RequestRouted
from twostroke.explain.names import name_of, sequence_of
from twostroke.packed_events import PackedEvent
from twostroke.sampling_params import SamplingParams


@dataclass
class Drill:
    """What happened."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    token_ids: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    logprobs: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    num_killed: int = 0
    num_frozen: int = 0
    num_resumed: int = 0
    num_fenced: int = 0
    num_handed_over: int = 0
    """Hand-overs that came through."""
    num_rounds: int = 0
    """How often all requests ran."""
    gaps_s: list[float] = field(default_factory=list[float])
    """Of each stream that was resumed: from when its worker was found dead to its next token."""


def prompts(number: int) -> list[tuple[str, SamplingParams]]:
    """So many requests, no two alike: greedy and sampled, short and long."""
    dice = random.Random(7)
    words = [
        "def f(x):\n",
        "    return x\n",
        "for i in range(9):\n",
        "class A:\n",
        "    pass\n",
        "import os\n",
        "x = 1\n",
    ]
    made: list[tuple[str, SamplingParams]] = []
    for i in range(number):
        text = "".join(dice.choice(words) for _ in range(dice.choice([1, 8, 30, 60]))) + f"# {i}\n"
        params = SamplingParams(
            max_tokens=dice.choice([30, 80, 120]),
            temperature=dice.choice([0.0, 0.9]),
            seed=i,
            ignore_eos=dice.random() < 0.7,
            logprobs=1,
            repetition_penalty=dice.choice([1.0, 1.1]),
        )
        made.append((text, params))
    return made


async def run(
    config: EngineConfig,
    pools: PoolConfig,
    requests: Sequence[tuple[str, SamplingParams]],
    *,
    num_faults: int = 0,
    every_s: float = 0.3,
    seed: int = 0,
    hands_over: bool = True,
) -> Drill:
    """All requests at once, again and again while faults are left; every request's answers must agree.

    Args:
        config: of each engine.
        pools: how many there are.
        requests: prompts, and what is wanted of each.
        num_faults: so many processes are killed or frozen.
        every_s: seconds between two of them, on average.
        seed: of who it is.
        hands_over: every prompt of a block or more is handed over; False: the router decides.
    """
    drill = Drill()
    seen = _Seen()
    placer = LeastBusy() if hands_over else None
    engine = PooledEngine(config, pools, on_trouble=lambda cause: None, listeners=(seen,), placer=placer)
    await engine.start()
    stop = asyncio.Event()
    faults = asyncio.create_task(_disturb(engine, drill, num_faults, every_s, random.Random(seed), stop))
    try:
        rounds = 0
        while True:
            answers = await asyncio.gather(
                *(_ask(engine, f"{rounds}-{i}", *request, seen) for i, request in enumerate(requests))
            )
            for i, (token_ids, logprobs, text) in enumerate(answers):
                name = str(i)
                known = drill.token_ids.setdefault(name, token_ids)
                assert token_ids == known, f"request {i} in round {rounds}: {token_ids} and before {known}"
                assert drill.logprobs.setdefault(name, logprobs) == logprobs
                assert drill.texts.setdefault(name, text) == text
            rounds += 1
            drill.num_rounds = rounds
            if faults.done():
                break
        stop.set()
        await faults
        await _settled(engine)
    finally:
        stop.set()
        faults.cancel()
        await asyncio.gather(faults, return_exceptions=True)
        await engine.close()
    drill.num_handed_over, drill.gaps_s = seen.num_handed_over, seen.gaps_s
    drill.num_resumed, drill.num_fenced = engine.dispatcher.num_resumed, engine.dispatcher.num_fenced
    return drill


class _Seen:
    """Counts events, and waits for tokens of streams that were resumed."""

    def __init__(self) -> None:
        self.num_handed_over = 0
        self.gaps_s: list[float] = []
        self._resumed_s: dict[str, float] = {}

    def append(self, event: Event, packed: PackedEvent) -> None:
        """One event, in order."""
        del packed
        if isinstance(event, KVImportEnded) and not event.problem:
            self.num_handed_over += 1
        elif isinstance(event, RequestRouted) and sequence_of(event.request_id) != event.request_id:
            self._resumed_s.setdefault(name_of(event.request_id), event.time_s)

    def delivered(self, name: str, now_s: float) -> None:
        """Tokens of a request have come."""
        resumed_s = self._resumed_s.pop(name, None)
        if resumed_s is not None:
            self.gaps_s.append(now_s - resumed_s)


async def _ask(
    engine: PooledEngine, name: str, text: str, params: SamplingParams, seen: _Seen
) -> tuple[list[int], list[float], str]:
    while True:
        try:
            stream = engine.generate(
                engine.inputs.process(text, params), request_id=name, arrival_time_s=engine.now_s()
            )
            break
        except EngineUnavailable:  # nobody decodes just now: ask again, as the error says
            await asyncio.sleep(0.05)
    token_ids: list[int] = []
    logprobs: list[float] = []
    said = ""
    wake = asyncio.Event()
    stream.listen(wake.set)
    while True:
        wake.clear()
        outputs = stream.take()
        if outputs:
            seen.delivered(name, engine.now_s())
        for output in outputs:
            for completion in output.outputs:
                token_ids += completion.token_ids
                logprobs += [
                    entry[t].logprob for entry, t in zip(completion.logprobs or [], completion.token_ids, strict=True)
                ]
                said += completion.text
            if output.finished:
                return token_ids, logprobs, said
        if not outputs:
            await wake.wait()


async def _disturb(
    engine: PooledEngine, drill: Drill, number: int, every_s: float, dice: random.Random, stop: asyncio.Event
) -> None:
    """Kills and freezes, one after the other; never the last that decodes, so that there is somebody to go on."""
    done = 0
    while done < number:
        await asyncio.sleep(every_s * dice.uniform(0.5, 1.5))
        pids = engine.pids
        decoders = [worker for worker in pids if worker.startswith("decode")]
        victims = [worker for worker in pids if worker.startswith("prefill") or len(decoders) > 1]
        if not victims or not engine.dispatcher.num_live:
            continue
        victim = dice.choice(victims)
        is_freeze = dice.random() < 0.4
        try:
            os.kill(pids[victim], signal.SIGSTOP if is_freeze else signal.SIGKILL)
        except ProcessLookupError:  # it was frozen before, and has just been ended for that
            continue
        drill.num_frozen += is_freeze
        drill.num_killed += not is_freeze
        done += 1


async def _settled(engine: PooledEngine) -> None:
    """Until every request has ended everywhere."""
    deadline = time.monotonic() + 30
    while engine.dispatcher.num_live:
        assert time.monotonic() < deadline, f"{engine.dispatcher.num_live} sequences are left"
        await asyncio.sleep(0.05)
