"""A stop string fires whichever tokens write it: letters, or a special token that the text leaves out."""

from __future__ import annotations

from typing import Any

import pytest

import text_fakes
from twostroke.client.input_processor import PromptInput
from twostroke.client.output_processor import OutputKind, OutputProcessor
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.outputs import CompletionOutput
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams

TOKENIZER = text_fakes.tokenizer("byte_level")
END = "<|end|>"
SPECIAL = TOKENIZER.token_id(END)


def ids(*parts: str) -> list[int]:
    """Tokens of texts; the name of the special token alone is that token."""
    found: list[int] = []
    for part in parts:
        letters = [TOKENIZER.encode(letter, add_special_tokens=False) for letter in part]
        found += [SPECIAL] if part == END and SPECIAL is not None else [token for letter in letters for token in letter]
    return found


def answer(token_ids: list[int], *stop: str, **params: Any) -> CompletionOutput:
    sampling = SamplingParams(stop=stop, max_tokens=500, **params)
    processor = OutputProcessor(TOKENIZER)
    given = PromptInput(prompt_text="", prompt_token_ids=(5,), params=sampling)
    (name,) = processor.add("r", given, seeds=(0,), arrival_time_s=0.0, kind=OutputKind.FINAL)
    begun, ended = SequenceStatus(scheduled_time_s=0.0), SequenceStatus(finish_reason=FinishReason.LENGTH)
    updates = [
        *(TokenUpdate(name, 0.0, (token,), status=begun) for token in token_ids),
        TokenUpdate(name, 0.0, status=ended),
    ]
    (output,) = (output for update in updates for output in processor.process([update]).outputs)
    return output.outputs[0]


@pytest.mark.parametrize("stop", [END, f"a{END}", f"{END}b", f"a{END}b"])
def test_a_special_token_that_is_left_out_writes_a_stop_string(stop: str) -> None:
    before, after = stop.split(END)
    found = answer(ids("xx" + before, END, after + "yy"), "zz", stop)
    assert (found.text, found.finish_reason, found.stop_reason) == ("xx", FinishReason.STOP, stop)
    assert len(found.token_ids) == len(ids("xx" + before, END, after))


def test_letters_write_it_as_well() -> None:
    letters = [token for letter in f"xx{END}yy" for token in TOKENIZER.encode(letter, add_special_tokens=False)]
    found = answer(letters, END)
    assert (found.text, found.stop_reason) == ("xx", END)


def test_a_token_that_completes_nothing_stays_left_out() -> None:
    found = answer(ids("a", END, "c"), f"{END}b")
    assert (found.text, found.finish_reason) == ("ac", FinishReason.LENGTH)
    found = answer(ids("a", END, "c", END), f"{END}b")
    assert (found.text, found.finish_reason) == ("ac", FinishReason.LENGTH)


def test_the_stop_string_can_be_kept() -> None:
    assert answer(ids("a", END, "b"), f"{END}b", include_stop_str_in_output=True).text == f"a{END}b"


def test_tokens_that_are_shown_are_text() -> None:
    found = answer(ids("a", END, "c"), END, skip_special_tokens=False)
    assert (found.text, found.stop_reason) == ("a", END)


def test_the_first_tokens_end_nothing() -> None:
    found = answer(ids("a", END, "b", END, "c"), END, min_tokens=2)
    assert (found.text, found.stop_reason) == ("ab", END)
