"""What LLM's own arguments may be; what is in a prompt is the input processor's matter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twostroke import LLM, SamplingParams
from twostroke.errors import InvalidParameter


@pytest.fixture(scope="module")
def llm(random_models: dict[str, Path]) -> Iterator[LLM]:
    with LLM(random_models["llama"], threads=1, num_kv_blocks=64, policy="priority") as llm:
        yield llm


ONE_TOKEN = SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"sampling_params": {"max_tokens": 1}}, "sampling_params"),
        ({"sampling_params": {}}, "sampling_params"),
        ({"sampling_params": [{"max_tokens": 1}, ONE_TOKEN]}, "sampling_params[0]"),
        ({"sampling_params": [ONE_TOKEN, None]}, "sampling_params[1]"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": 0}, "sampling_params"),
        ({"priority": [0, "1"]}, "priority[1]"),
        ({"priority": [0, True]}, "priority[1]"),
        ({"priority": "12"}, "priority"),
        ({"priority": [1]}, "priority"),
        ({"prompts": [None, "a"]}, "prompts[0]"),
        ({"prompts": None}, "prompts"),
        ({"prompts": b"a"}, "prompts"),
        ({"prompts": [[1, 2], [3]]}, "prompts[0]"),
    ],
    ids=str,
)
def test_wrong_arguments_of_generate(llm: LLM, given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        llm.generate(**{"prompts": ["a", "b"], "sampling_params": ONE_TOKEN} | given)
    assert error.value.name == name
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [[{"role": "user", "content": "a"}], ["b"]]}, "messages[1]"),
        ({"messages": [[{"role": "user", "content": "a"}]], "sampling_params": [{}]}, "sampling_params[0]"),
    ],
    ids=str,
)
def test_wrong_arguments_of_chat(llm: LLM, given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        llm.chat(**given)
    assert error.value.name == name


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], []) == []


def test_one_for_all_and_one_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [ONE_TOKEN, SamplingParams(max_tokens=2, ignore_eos=True)], priority=(1, 0))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert len(llm.generate("a", ONE_TOKEN)) == 1
