"""Arguments of LLM; the contents of prompts are tested with the input processor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twostroke import LLM, SamplingParams
from twostroke.errors import EngineError, InvalidParameter


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


TEMPLATE = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def chatty(random_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(random_models["llama"], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(folder, threads=1, num_kv_blocks=64, policy="priority", max_num_seqs=1) as llm:
        yield llm


TALK = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "the answer is"}]


@pytest.mark.parametrize(
    ("switches", "prompt"),
    [
        ({}, "<user>a question</><assistant>the answer is</><assistant>"),
        ({"add_generation_prompt": False}, "<user>a question</><assistant>the answer is</>"),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            "<user>a question</><assistant>the answer is",
        ),
    ],
    ids=str,
)
def test_how_a_chat_ends_its_prompt(chatty: LLM, switches: dict[str, bool], prompt: str) -> None:
    (output,) = chatty.chat(TALK, ONE_TOKEN, **switches)
    assert output.prompt == prompt


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": "no", "add_generation_prompt": False}, "continue_final_message"),
        ({"add_generation_prompt": "false"}, "add_generation_prompt"),
        ({"priority": [0, 1]}, "priority"),
        ({"cache_salt": 3}, "cache_salt"),
    ],
    ids=str,
)
def test_what_a_chat_refuses(chatty: LLM, given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        chatty.chat(TALK, ONE_TOKEN, **given)
    assert error.value.name == name
    assert not chatty.engine.has_work


def test_chats_have_priorities_and_a_salt(chatty: LLM) -> None:
    outputs = chatty.chat([TALK] * 3, ONE_TOKEN, priority=[2, 1, 0])
    waited = [output.metrics.queue_time_s for output in outputs if output.metrics is not None]
    assert waited == sorted(waited, reverse=True)
    assert len(waited) == 3
    assert [chatty.chat(TALK, ONE_TOKEN, cache_salt="mine")[0].num_cached_tokens > 0 for _ in range(2)] == [False, True]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], []) == []


@pytest.mark.parametrize("prompts", [[], "a"], ids=str)
def test_closed_is_closed_however_little_is_asked(random_models: dict[str, Path], prompts: Any) -> None:
    llm = LLM(random_models["llama"], threads=1, num_kv_blocks=8)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate(prompts)


def test_one_for_all_and_one_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [ONE_TOKEN, SamplingParams(max_tokens=2, ignore_eos=True)], priority=(1, 0))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert len(llm.generate("a", ONE_TOKEN)) == 1


def test_preemptions_are_counted_however_a_sequence_ends() -> None:
    """A stop string is found where the text is: the engine never says of that sequence that it has ended."""
    prompts = [f"def f{i}(" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM("embedded", threads=1, num_kv_blocks=12, max_model_len=128, max_num_seqs=16) as tight:
        whole = tight.generate(prompts, params)
        stops = [output.outputs[0].text[-12:-4] for output in whole]
        each = [replace(params, stop=(stop,), min_tokens=85) for stop in stops]
        stopped = tight.generate(prompts, each)
    assert {output.outputs[0].finish_reason for output in stopped} == {"stop"}
    counts = [output.metrics.num_preemptions for output in stopped if output.metrics]
    assert sum(counts) > 0
    assert max(counts) > 1
