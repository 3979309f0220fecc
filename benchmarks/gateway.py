"""What the gateway of pools pays for a heartbeat, for a token in its journal, and for a journal that grows."""

from __future__ import annotations

import asyncio
import sys
import time
import tracemalloc
from dataclasses import dataclass

from twostroke.batch import NewRequest
from twostroke.cluster.dispatcher import Dispatcher, LeastBusy, ReadyWorker
from twostroke.cluster.engine_process import EngineProcess
from twostroke.cluster.messages import Alive
from twostroke.config.engine import EngineConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.token_update import TokenUpdate
from twostroke.pools.member import Role
from twostroke.sampling_params import SamplingParams

NUM_STREAMS, _PROMPTS, _OUTPUT = 1000, (16, 512), 200
NUM_HEARTBEATS, HEARTBEATS_APART_S = 2000, 0.001
_HEART = """
import sys, time
from pathlib import Path
import zmq
from twostroke.cluster.messages import REPORTS, Alive
from twostroke.cluster.wires import engine_ends
context = zmq.Context()
commands, reports = engine_ends(context, Path(sys.argv[1]))
commands.recv()
for _ in range(%d):
    reports.send(REPORTS.encode(Alive()))
    time.sleep(%g)
reports.close()
commands.close()
context.term()
"""
"""A child that does nothing else, so many times and so far apart."""


@dataclass(frozen=True, slots=True)
class GatewayPrices:
    """Of one gateway."""

    heartbeat_us: float
    """Of processor time, each on its own: nobody else had anything to say in the same moment."""
    update_us: float
    """Of processor time, to take in one token of one stream and write it down."""
    journal_prompt_token_bytes: float
    """The request itself has them, and text made them: an object each."""
    journal_token_bytes: float
    """Of those that were delivered."""
    journal_stream_bytes: float
    """Beside its tokens."""


def gateway_prices() -> GatewayPrices:
    """Measures them."""
    few, many = _journal(_PROMPTS[0]), _journal(_PROMPTS[1])
    prompt_bytes = (many.stream_bytes - few.stream_bytes) / (_PROMPTS[1] - _PROMPTS[0])
    stream_bytes = few.stream_bytes - _PROMPTS[0] * prompt_bytes
    return GatewayPrices(asyncio.run(_heartbeat_us()), many.update_us, prompt_bytes, many.token_bytes, stream_bytes)


async def _heartbeat_us() -> float:
    """A real child and the real sockets, and the loop that wakes up for each."""
    heart = _HEART % (NUM_HEARTBEATS, HEARTBEATS_APART_S)
    process = await EngineProcess.spawn(EngineConfig(), (sys.executable, "-c", heart), last_words_s=0.0)
    try:
        assert isinstance(await process.receive(), Alive)
        began_s, num_heard = time.process_time(), 0
        while await process.receive() is not None:
            num_heard += 1
        return 1e6 * (time.process_time() - began_s) / num_heard
    finally:
        await process.stop()


@dataclass(frozen=True, slots=True)
class _Journal:
    update_us: float
    token_bytes: float
    stream_bytes: float
    """Prompt included."""


def _journal(num_prompt_tokens: int) -> _Journal:
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(ReadyWorker("decode-0.1", Role.DECODE, None, 16, NUM_STREAMS))
    tracemalloc.start()
    for i in range(NUM_STREAMS):
        # a prompt comes off the wire: its numbers are objects of its own, as they would be
        prompt = tuple(int(str(1000 + token)) for token in range(num_prompt_tokens))
        params = SamplingParams(max_tokens=_OUTPUT + 1)
        dispatcher.add(GenerationRequest(NewRequest(f"r{i}", prompt, params, 0), 0.0, _OUTPUT + 1))
    empty = tracemalloc.get_traced_memory()[0]
    updates = [
        [TokenUpdate(f"r{i}", 0.0, (1000 + place,), start=place) for i in range(NUM_STREAMS)]
        for place in range(_OUTPUT)
    ]
    before = tracemalloc.get_traced_memory()[0]
    for step in updates[: _OUTPUT // 2]:
        dispatcher.take_in("decode-0.1", step)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    began_s = time.process_time()
    for step in updates[_OUTPUT // 2 :]:
        dispatcher.take_in("decode-0.1", step)
    update_us = 1e6 * (time.process_time() - began_s) / (NUM_STREAMS * _OUTPUT // 2)
    token_bytes = grown / (NUM_STREAMS * _OUTPUT // 2)
    return _Journal(update_us, token_bytes, empty / NUM_STREAMS)
