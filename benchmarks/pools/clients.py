"""Requests to an EngineClient at given times, all in one loop, and the times of their tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from twostroke.client.engine_client import OutputStream
from twostroke.client.input_processor import Prompt
from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.cluster.engine_process import COMMAND
from twostroke.cluster.launcher import LocalLauncher
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.cluster.routed_placer import Placer
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.measure.workload import Workload, WorkloadRequest
from twostroke.outputs import RequestOutput, RequestTimes
from twostroke.sampling_params import SamplingParams

Engine = RemoteEngine | PooledEngine


@contextlib.asynccontextmanager
async def started(
    config: EngineConfig,
    pools: PoolConfig | None = None,
    *,
    placer: Placer | None = None,
    prefix: tuple[str, ...] = (),
) -> AsyncGenerator[Engine]:
    """Start an engine, and close it at the end.

    Args:
        config: of each process.
        pools: sizes of the pools; None: one process does everything.
        placer: instead of the router.
        prefix: in front of the command that starts a process.
    """
    command = (*prefix, *COMMAND)
    engine: Engine
    if pools is None:
        engine = RemoteEngine(config, command=command)
    else:
        engine = PooledEngine(config, pools, placer=placer, launcher=LocalLauncher(command))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def answer_all(engine: Engine, workload: Workload) -> list[RequestTimes]:
    """Send every request when it arrives, and return when all have ended; times count from the start."""
    began_s = engine.now_s()
    return await asyncio.gather(
        *(_answer(engine, f"r{i}-{began_s}", request, began_s) for i, request in enumerate(workload.requests))
    )


async def _answer(engine: Engine, name: str, request: WorkloadRequest, began_s: float) -> RequestTimes:
    await asyncio.sleep(began_s + request.arrival_s - engine.now_s())
    params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos, seed=request.seed)
    prompt: Prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    stream = asked(engine, name, prompt, params, began_s + request.arrival_s)
    times = RequestTimes(request.arrival_s)
    async for outputs in outputs_of(stream):
        num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        times.token_times_s += [engine.now_s() - began_s] * num_tokens
    return times


def asked(engine: Engine, name: str, prompt: Prompt, params: SamplingParams, arrival_s: float) -> OutputStream:
    """Return the stream of a request that has just been sent."""
    checked = engine.inputs.process(prompt, params)
    return engine.generate(Submission(prompt=checked, request_id=name, arrival_time_s=arrival_s, kind=OutputKind.DELTA))


async def outputs_of(stream: OutputStream) -> AsyncGenerator[list[RequestOutput]]:
    """Yield a stream's outputs whenever there are some, until its request has ended."""
    wake = asyncio.Event()
    stream.listen(wake.set)
    while True:
        wake.clear()
        outputs = stream.take()
        if outputs:
            yield outputs
            if any(output.finished for output in outputs):
                return
        else:
            await wake.wait()
