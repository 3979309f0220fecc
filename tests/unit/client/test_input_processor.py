"""Prompts are checked and encoded; every refusal says what is wrong, what is allowed and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import text_fakes
from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.input_processor import InputProcessor, PromptInput, TruncationSide
from twostroke.errors import InvalidParameter, InvalidPrompt, UnknownParameter
from twostroke.sampling_params import SamplingParams
from twostroke.tokenizer.tokenizer import Tokenizer


@dataclass
class Keep:
    """A request that keeps so many tokens of its prompt."""

    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None


def make(kind: str = "byte_level", **changes: Any) -> InputProcessor:
    tokenizer = text_fakes.tokenizer(kind)
    given: dict[str, Any] = {"max_model_len": 32, "vocab_size": tokenizer.vocab_size + 10, "eos_token_ids": [1]}
    return InputProcessor(tokenizer, **(given | changes))


def test_text_prompt() -> None:
    result = make().process("def hello", SamplingParams(max_tokens=5, temperature=0.5))
    assert result == PromptInput(
        prompt_text="def hello",
        prompt_token_ids=tuple(text_fakes.tokenizer("byte_level").encode("def hello")),
        params=SamplingParams(max_tokens=5, temperature=0.5),
        eos_token_ids=frozenset({1}),
    )
    assert make().process({"prompt": "def hello"}, SamplingParams(max_tokens=5, temperature=0.5)) == result


def test_token_id_prompt() -> None:
    result = make().process({"prompt_token_ids": [3, 4, 5]})
    assert result.prompt_text is None
    assert result.prompt_token_ids == (3, 4, 5)
    # Padding rows of the embedding have no token, but can be computed.
    assert make().process({"prompt_token_ids": (text_fakes.tokenizer("byte_level").vocab_size + 9,)})


def test_begin_token_is_added_once() -> None:
    assert make("byte_fallback").process("hello").prompt_token_ids[0] == 1
    assert make("byte_fallback").process("").prompt_token_ids == (1,)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        (None, "must be a string"),
        (["a", "b"], "must be a string.*Send several prompts as several requests"),
        (b"bytes", "must be a string"),
        ({"prompt": 5}, "must be a string, not a number"),
        ({"prompt": None}, "must be a string, not null"),
        ({}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": "abc"}, "must be a list of token ids, not a string"),
        ({"prompt_token_ids": 5}, "must be a list of token ids, not a number"),
        ({"prompt_token_ids": [1, True]}, r"prompt_token_ids\[1\] is true, a bool"),
        ({"prompt_token_ids": [1.0]}, r"prompt_token_ids\[0\] is 1.0, a number"),
        ({"prompt_token_ids": ["1"]}, r"prompt_token_ids\[0\] is '1', a string"),
        ({"prompt_token_ids": [0, -1]}, r"prompt_token_ids\[1\] is -1; this model's ids go from 0 to \d+"),
        ({"prompt_token_ids": [10**30]}, r"this model's ids go from 0 to \d+"),
        ("half \ud83d", "lone surrogate.* at position 5"),
        ({"prompt": "\udfff"}, "lone surrogate.* at position 0"),
        ("word " * 100, r"the prompt has \d+ tokens; with max_model_len 32 it may have 31.*--max-model-len \d+"),
        ({"prompt_token_ids": [3] * 32}, r"the prompt has 32 tokens.*--max-model-len 33 or more"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_refused_prompts(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        make().process(prompt)


def test_unknown_key_of_a_prompt() -> None:
    with pytest.raises(UnknownParameter, match="did you mean 'prompt_token_ids'"):
        make().process({"prompt_tokens_ids": [1]})  # pyright: ignore


def test_longest_prompt_leaves_one_token() -> None:
    assert make().process({"prompt_token_ids": [3] * 31}).max_tokens == 1


@pytest.mark.parametrize(("given", "expected"), [(None, 22), (5, 5), (22, 22), (23, 22), (10**9, 22)])
def test_max_tokens_is_cut_to_the_context(given: int | None, expected: int) -> None:
    result = make().process({"prompt_token_ids": [3] * 10}, SamplingParams(max_tokens=given, seed=7))
    assert result.params.max_tokens == expected
    assert result.params.seed == 7


def test_min_tokens_beyond_the_context() -> None:
    with pytest.raises(InvalidParameter, match="min_tokens=30: at most 22"):
        make().process({"prompt_token_ids": [3] * 10}, SamplingParams(max_tokens=None, min_tokens=30))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_limit(name: str) -> None:
    assert make(max_logprobs=3).process("a", SamplingParams(**{name: 3}))
    with pytest.raises(InvalidParameter, match=f"{name}=4: at most max_logprobs, which is 3.*--max-logprobs"):
        make(max_logprobs=3).process("a", SamplingParams(**{name: 4}))


def test_parameters_are_checked_against_the_model() -> None:
    with pytest.raises(InvalidParameter, match="stop_token_ids"):
        make().process("a", SamplingParams(stop_token_ids=[10**6]))


def test_bad_words_at_the_beginning_and_behind_a_space() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    result = make().process("a", SamplingParams(bad_words=["self", " self", "zqx", "\n"]))
    sequences = result.bad_words_token_ids
    assert tuple(tokenizer.encode("self")) in sequences
    assert tuple(tokenizer.encode(" self")) in sequences
    assert tuple(tokenizer.encode("zqx")) in sequences
    assert tuple(tokenizer.encode("\n")) in sequences
    assert all(sequences)


def test_bad_words_are_not_framed() -> None:
    sequences = make("byte_fallback").process("a", SamplingParams(bad_words=["self"])).bad_words_token_ids
    assert all(1 not in sequence for sequence in sequences)
    # Here a leading space only puts a mark in front of the same tokens.
    assert len(sequences) == 1


def test_bad_word_without_tokens() -> None:
    with pytest.raises(InvalidParameter, match="at least one token"):
        make("wordpiece").process("a", SamplingParams(bad_words=[" "]))


HELLO = {"role": "user", "content": "hello"}


def test_chat(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_fakes.folder("byte_fallback"), folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ mood }}")
    tokenizer = Tokenizer.from_folder(folder)
    inputs = InputProcessor(tokenizer, max_model_len=32, vocab_size=2000)
    result = inputs.process_chat(ChatInputs([HELLO], chat_template_kwargs={"mood": "!"}))
    assert result.prompt_text == "<s>hello!"
    assert result.prompt_token_ids.count(1) == 1
    assert result.prompt_token_ids == tuple(tokenizer.encode("<s>hello!", add_special_tokens=False))
    assert inputs.process_chat(ChatInputs([HELLO]), SamplingParams(max_tokens=2)).max_tokens == 2


def test_chat_without_a_template() -> None:
    with pytest.raises(InvalidPrompt, match="no default chat template"):
        make().process_chat(ChatInputs([HELLO]))


def test_nothing_of_it_loads_torch() -> None:
    import subprocess
    import sys

    modules = "client.input_processor", "client.output_processor", "client.stop_strings"
    code = "".join(f"import twostroke.{name}\n" for name in modules)
    code += "import sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, {}, 0, "greedy", SamplingParams], ids=str)
def test_sampling_parameters_of_another_type(params: Any) -> None:
    processor = make()
    for process in (lambda: processor.process("a", params), lambda: processor.process_chat(ChatInputs([]), params)):
        with pytest.raises(InvalidParameter, match="must be SamplingParams, not") as refusal:
            process()
        assert refusal.value.name == "sampling_params"


class CountingTokenizer:
    """Counts the characters that are turned into tokens.

    Args:
        tokenizer: does it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def encode_compact(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        self.num_chars += len(text)
        return self._tokenizer.encode_compact(text, add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def counting(kind: str, max_model_len: int) -> tuple[InputProcessor, CountingTokenizer]:
    tokenizer = CountingTokenizer(text_fakes.tokenizer(kind))
    given: Any = tokenizer
    return InputProcessor(given, max_model_len=max_model_len, vocab_size=tokenizer.vocab_size), tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["7" * 2_000_000, "7 " * 1_000_000, "word " * 400_000])
def test_a_text_that_is_far_too_long_is_not_read_to_its_end(kind: str, text: str) -> None:
    inputs, tokenizer = counting(kind, 1000)
    with pytest.raises(InvalidPrompt, match=r"with max_model_len 1000 it may have 999.*--max-model-len \d+"):
        inputs.process(text)
    assert tokenizer.num_chars <= 100_000


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_long_text_that_fits_has_the_same_tokens(kind: str) -> None:
    text = "def hello word " * 3000
    whole = tuple(text_fakes.tokenizer(kind).encode(text))
    inputs, tokenizer = counting(kind, len(whole) + 1)
    assert inputs.process(text).prompt_token_ids == whole
    inputs, tokenizer = counting(kind, len(whole))
    with pytest.raises(InvalidPrompt, match=f"the prompt has {len(whole)} tokens"):
        inputs.process(text)
    assert inputs.process(text, framing=Keep(9)).prompt_token_ids == whole[-9:]
    assert tokenizer.num_chars >= len(text)


class Ids(list[int]):
    """Counts the ids that are looked at."""

    num_read = 0

    def __iter__(self) -> Any:
        for token_id in super().__iter__():
            Ids.num_read += 1
            yield token_id


def test_the_number_of_token_ids_is_checked_before_they_are_looked_at() -> None:
    Ids.num_read = 0
    with pytest.raises(InvalidPrompt, match="the prompt has 500000 tokens"):
        make().process({"prompt_token_ids": Ids([3] * 500_000)})
    assert Ids.num_read == 0
    assert make().process({"prompt_token_ids": [3] * 40 + [4]}, framing=Keep(2)).prompt_token_ids == (3, 4)
