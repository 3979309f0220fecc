"""Streams from coroutines: in parallel, left early, refused, closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from twostroke import LLM, AsyncEngine, SamplingParams
from twostroke.errors import EngineError, InvalidPrompt, TwostrokeError


@pytest.fixture(scope="module")
def folder(random_models: dict[str, Path]) -> str:
    return str(random_models["llama"])


def params(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=6 + i, seed=i, ignore_eos=True)


async def collect(engine: AsyncEngine, i: int) -> tuple[int, ...]:
    """All updates of one stream; each extends the one before."""
    seen: tuple[int, ...] = ()
    finished = False
    async for output in engine.generate({"prompt_token_ids": [i + 1] * 20}, params(i)):
        ids = output.outputs[0].token_ids
        assert ids[: len(seen)] == seen
        assert not finished
        seen, finished = ids, output.finished
    assert finished
    return seen


def test_streams_run_together_and_equal_the_offline_answer(folder: str) -> None:
    async def main() -> list[tuple[int, ...]]:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            return await asyncio.gather(*(collect(engine, i) for i in range(8)))

    with LLM(folder, kv_cache_memory=1 << 24, threads=1) as llm:
        offline = llm.generate([{"prompt_token_ids": [i + 1] * 20} for i in range(8)], [params(i) for i in range(8)])
    assert asyncio.run(main()) == [o.outputs[0].token_ids for o in offline]


def test_leaving_early_aborts(folder: str) -> None:
    async def main() -> int:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            stream = engine.generate({"prompt_token_ids": [5] * 9}, SamplingParams(max_tokens=400, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            await collect(engine, 1)  # the engine goes on, and by now has seen the abort
            return engine._engine.engine.kv_usage.num_used

    assert asyncio.run(main()) == 0


def test_abort_by_name_ends_the_stream(folder: str) -> None:
    async def main() -> str:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            last = None
            long = SamplingParams(max_tokens=500, ignore_eos=True)
            async for output in engine.generate({"prompt_token_ids": [5] * 9}, long, request_id="x"):
                if last is None:
                    await engine.abort("x")
                last = output
            assert last is not None
            return str(last.outputs[0].finish_reason)

    assert asyncio.run(main()) == "abort"


def test_a_bad_prompt_is_refused_where_it_was_asked(folder: str) -> None:
    async def main() -> None:
        async with AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1) as engine:
            with pytest.raises(InvalidPrompt):
                async for _ in engine.generate({"prompt_token_ids": []}):
                    pass
            await collect(engine, 2)

    asyncio.run(main())


def test_closing_ends_open_streams(folder: str) -> None:
    async def main() -> None:
        engine = AsyncEngine(folder, kv_cache_memory=1 << 24, threads=1)
        long = SamplingParams(max_tokens=600, ignore_eos=True)

        async def close_at_the_first_token() -> None:
            async for _ in engine.generate({"prompt_token_ids": [5]}, long):
                await asyncio.to_thread(engine.close)

        with pytest.raises(TwostrokeError):
            await close_at_the_first_token()
        with pytest.raises(EngineError):
            await collect(engine, 0)

    asyncio.run(main())
