"""Two processes behind one gateway: what is told of the requests that went through both."""

from __future__ import annotations

import asyncio
import itertools
from fractions import Fraction
from pathlib import Path

from factories import submitted
from twostroke.client.engine_client import OutputStream
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.event_sinks import merged_events, read_events
from twostroke.explain.recorder import FlightRecorder
from twostroke.explain.segments import Label, Lane
from twostroke.explain.timeline import timeline_of
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.replay import replay

MAX_TOKENS = {"long": 12, "short": 2, "single": 1, "tiny": 5}
"""By the request's name; the prompt of the last one has no full block, and is not handed over."""


async def _until_it_ends(stream: OutputStream) -> None:
    wake = asyncio.Event()
    stream.listen(wake.set)
    while not any(output.finished for output in stream.take()):
        await wake.wait()
        wake.clear()


async def _run(log: Path, recorder: FlightRecorder) -> None:
    config = EngineConfig(load=LoadConfig(threads=1, event_log=log), cache=CacheConfig(num_kv_blocks=1000))
    engine = PooledEngine(config, PoolConfig(prefill=1, decode=1), listeners=(recorder,), placer=LeastBusy())
    await engine.start()
    try:
        for name, max_tokens in MAX_TOKENS.items():
            text = "x" if name == "tiny" else f"# {name}\n" + "def f(x):\n    return x\n" * 20
            prompt = engine.inputs.process(text, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
            await _until_it_ends(engine.generate(submitted(engine, prompt, name)))
        await asyncio.sleep(0.2)  # the last events
    finally:
        await engine.close()


def check_the_sum(lane: Lane) -> None:
    assert lane.is_complete
    assert lane.num_output_tokens == MAX_TOKENS[lane.sequence_id.partition("#")[0]]
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(lane.segments))
    total = sum(Fraction(s.end_s) - Fraction(s.start_s) for s in lane.segments)
    assert total == Fraction(lane.end_s) - Fraction(lane.begin_s)


def test_timelines_logs_and_replay_of_two_processes(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    asyncio.run(_run(tmp_path / "run.jsonl", recorder))
    files = [tmp_path / f"run.{name}.jsonl" for name in ("prefill-0.1", "decode-0.1", "gateway")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    for events in (list(recorder.events()), list(merged_events(files))):
        lanes = {name: timeline_of(events, name).lanes[0] for name in MAX_TOKENS}
        for lane in lanes.values():
            check_the_sum(lane)
        long, labels = lanes["long"], [segment.label for segment in lanes["long"].segments]
        assert long.processes == ("prefill-0.1", "decode-0.1")
        assert labels.index(Label.PREFILL) < labels.index(Label.TRANSFER) < labels.index(Label.DECODE)
        assert labels.count(Label.TRANSFER) == 1
        (transfer,) = [segment for segment in long.segments if segment.label is Label.TRANSFER]
        assert "MB from prefill-0.1 in" in transfer.reason
        assert (long.num_cached_tokens, lanes["single"].processes) == (0, ("prefill-0.1",))
        assert lanes["tiny"].processes == ("decode-0.1",)
    for file in files[:2]:
        assert replay(read_events(file)) is None
