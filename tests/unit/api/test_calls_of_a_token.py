"""Count the Python functions that the server calls for one token of a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import text_fakes
from twostroke.api.completions import Completion
from twostroke.api.generation import AnswerHead
from twostroke.api.protocol.sampling import CompletionRequest
from twostroke.client.input_processor import InputProcessor
from twostroke.client.output_processor import OutputKind, OutputProcessor
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.sampling_params import SamplingParams

TOKENIZER = text_fakes.tokenizer("byte_level")


def called(work: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that are called in the block."""
    names: list[str] = []

    def hear(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        work()
    finally:
        sys.setprofile(before)
    return names


def test_an_event_between_the_first_and_the_last() -> None:
    engine: Any = SimpleNamespace(tokenizer=TOKENIZER, facts=SimpleNamespace(uses_priority=False))
    request = CompletionRequest(model="m", prompt="a", stream=True)
    completion = Completion(engine, request, AnswerHead("c", "m", 0))

    def event() -> bytes:
        part = CompletionOutput(0, "x", (5,), None, None, None, None, 0)
        made = completion.events(0, RequestOutput("c", "a", (1,), None, [part]))
        assert isinstance(made, bytes)
        return made

    event()
    second = event()
    assert event() == second
    assert len(called(event)) <= 6, called(event)  # this test's own among them


def test_an_update_between_the_first_and_the_last() -> None:
    inputs = InputProcessor(TOKENIZER, max_model_len=64, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[])
    processor = OutputProcessor(TOKENIZER)
    prompt = inputs.process("def f", SamplingParams(max_tokens=None))
    (name,) = processor.add("r", prompt, seeds=[0], arrival_time_s=10.0, kind=OutputKind.DELTA)
    (token_id,) = TOKENIZER.encode("a")
    processor.process([TokenUpdate(name, 11.0, (token_id,), status=SequenceStatus(scheduled_time_s=10.5))])

    def step() -> None:
        (output,) = processor.process([TokenUpdate(name, 12.0, (token_id,))]).outputs
        assert output.outputs[0].text == "a"

    assert len(called(step)) <= 9, called(step)  # this test's own among them
