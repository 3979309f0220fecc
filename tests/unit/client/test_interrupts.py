"""Ctrl-C at any moment: the engine goes on as if the call had never been, or says plainly that it cannot."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twostroke import LLM, SamplingParams
from twostroke.client.text_engine import hold_interrupts
from twostroke.engine.event_sinks import read_events
from twostroke.errors import EngineError
from twostroke.scheduler.replay import replay
from twostroke.startup.ranks import spawn_rank

PROMPT = "def a"
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, seed=3)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler: a shell that runs the tests in the background has them ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(random_models: dict[str, Path]) -> str:
    return str(random_models["llama"])


def tokens(llm: LLM) -> tuple[int, ...]:
    return llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


def test_an_interrupt_waits_for_the_end_of_the_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, kv_cache_memory=1 << 24, threads=1) as llm:
        expected = tokens(llm)
        model = llm.engine.engine._executor._runner._model  # type: ignore[attr-defined]
        forward, ended = model.forward, list[bool]()

        def interrupted(*args: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            ended.append(True)
            return forward(*args)

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT, PROMPT], PARAMS)
        assert ended[0], "it did not wait"
        assert not llm.engine.has_work
        assert tokens(llm) == expected


def test_whoever_insists_gets_out_and_the_engine_says_so(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, kv_cache_memory=1 << 24, threads=1) as llm:
        model = llm.engine.engine._executor._runner._model  # type: ignore[attr-defined]

        def interrupted(*_: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one did not wait")

        monkeypatch.setattr(model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, PROMPT], PARAMS)
        with pytest.raises(EngineError, match="a step of this engine was interrupted"):
            tokens(llm)


def test_interrupts_at_random_instants(folder: str, tmp_path: Path) -> None:
    """A real signal from a timer, many times; the log of all of it replays."""
    rng, log = random.Random(5), tmp_path / "log"
    interrupted = 0
    with LLM(folder, kv_cache_memory=1 << 24, threads=1, event_log=str(log)) as llm:
        expected = tokens(llm)
        for _ in range(40):
            timer = threading.Timer(rng.uniform(0.0, 0.02), signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()
                llm.generate([PROMPT] * 8, PARAMS)
                timer.join()  # a signal that is too late for the call is caught here
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert tokens(llm) == expected
    assert interrupted == 40
    assert replay(read_events(log)) is None


def test_a_program_with_its_own_handler_keeps_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: seen.append(signum))
    try:
        with hold_interrupts() as let_through:
            signal.raise_signal(signal.SIGINT)
            assert not seen
            let_through()
            assert seen == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_hears_no_ctrl_c_from_its_first_moment_on() -> None:
    process = spawn_rank(1, 2, "127.0.0.1:9")
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()  # pyright: ignore
        (blocked,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
        assert int(blocked, 16) & 1 << (signal.SIGINT - 1)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        process.kill()
        process.wait(10)
