"""/v1/completions against the same model offline: the server adds words around the tokens and changes none."""

from __future__ import annotations

from typing import Any

import pytest

from server_process import ServerProcess
from twostroke import LLM, RequestOutput, SamplingParams

PROMPT = "def fibonacci(n):\n"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", GREEDY | body)
    assert response.status_code == 200, response.text
    return response.json()


def offline(llm: LLM, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    given: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
    return llm.generate([prompt], SamplingParams(**(given | params)))[0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 50},
        {"temperature": 1.0, "seed": 5, "min_p": 0.1, "repetition_penalty": 1.2},
        {"temperature": 0.8, "seed": 6, "n": 3},
        {"stop": ["\n\n", "return"]},
        {"stop": ["return"], "include_stop_str_in_output": True},
        {"min_tokens": 20, "max_tokens": 40, "stop": ["\n"]},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_offline_api(server: ServerProcess, llm: LLM, params: dict[str, Any]) -> None:
    expected = offline(llm, **params)
    answer = complete(server, **params, return_token_ids=True)
    assert [tuple(choice["token_ids"]) for choice in answer["choices"]] == [o.token_ids for o in expected.outputs]
    assert [choice["text"] for choice in answer["choices"]] == [o.text for o in expected.outputs]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [o.finish_reason for o in expected.outputs]
    assert [choice["stop_reason"] for choice in answer["choices"]] == [o.stop_reason for o in expected.outputs]
    num_tokens = sum(len(o.token_ids) for o in expected.outputs)
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 6, "n": 3}, {"stop": ["return"]}], ids=str)
def test_a_stream_adds_up_to_the_answer(server: ServerProcess, params: dict[str, Any]) -> None:
    body = GREEDY | params | {"return_token_ids": True, "logprobs": 2}
    whole = complete(server, **body)
    events = server.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in events}) == 1
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [i for piece in pieces for i in piece["token_ids"]] == choice["token_ids"]
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for piece in pieces for x in piece["logprobs"][name]] == choice["logprobs"][name]


def test_continuous_usage_counts_up(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/completions", GREEDY | {"max_tokens": 5, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 5]


def test_continuous_usage_needs_usage(server: ServerProcess) -> None:
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        asked = GREEDY | {"max_tokens": 5, "stream_options": options}
        assert not any("usage" in event for event in server.events("/v1/completions", asked))
        assert not any("usage" in event for event in server.events("/v1/completions", asked | {"logprobs": 1}))


def test_prompts_of_every_kind(server: ServerProcess, llm: LLM) -> None:
    ids = offline(llm).prompt_token_ids
    for prompt in (PROMPT, [PROMPT], list(ids), [list(ids)]):
        assert complete(server, prompt=prompt)["choices"][0]["text"] == offline(llm).outputs[0].text
    several = complete(server, prompt=["import ", PROMPT, "class Queue:\n"], n=2, temperature=0.7, seed=1)
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    for number, prompt in enumerate(["import ", PROMPT, "class Queue:\n"]):
        expected = offline(llm, prompt, n=2, temperature=0.7, seed=1)
        assert [c["text"] for c in several["choices"][2 * number : 2 * number + 2]] == [
            o.text for o in expected.outputs
        ]


def test_several_prompts_in_one_stream(server: ServerProcess) -> None:
    body = GREEDY | {"prompt": ["import ", PROMPT, "class Queue:\n"], "n": 2}
    whole = complete(server, **body)
    chunks = [chunk["choices"][0] for chunk in server.events("/v1/completions", body)]
    for choice in whole["choices"]:
        assert "".join(c["text"] for c in chunks if c["index"] == choice["index"]) == choice["text"]


def test_echo_scores_the_prompt_as_evaluation_harnesses_want_it(server: ServerProcess, llm: LLM) -> None:
    expected = offline(llm, max_tokens=1, logprobs=1, prompt_logprobs=1)
    answer = complete(server, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert answer["text"] == PROMPT + expected.outputs[0].text
    logprobs = answer["logprobs"]
    count = len(expected.prompt_token_ids) + 1
    assert [len(logprobs[name]) for name in logprobs] == [count] * 4
    assert logprobs["token_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert [
        answer["text"][o : o + len(t)] for o, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == (logprobs["tokens"])
    assert expected.prompt_logprobs is not None
    for position in range(1, count - 1):
        entry = expected.prompt_logprobs[position]
        assert entry is not None
        chosen = entry[expected.prompt_token_ids[position]].logprob
        assert logprobs["token_logprobs"][position] == chosen
        top = logprobs["top_logprobs"][position]
        assert top[logprobs["tokens"][position]] == chosen
        assert (chosen == max(top.values())) == (entry[expected.prompt_token_ids[position]].rank == 1)


def test_echo_of_nothing_more(server: ServerProcess) -> None:
    answer = complete(server, echo=True, logprobs=0, max_tokens=0)
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    assert server.post("/v1/completions", GREEDY | {"max_tokens": 0}).status_code == 400
    refused = server.post("/v1/completions", GREEDY | {"max_tokens": 0, "echo": True, "min_tokens": 1})
    assert refused.json()["error"]["param"] == "min_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 1.0},
        {"stop_token_ids": list(range(4096))},
        {"stop": [" ", "\n", "r", "e"], "include_stop_str_in_output": True},
        {"logit_bias": {"0": 100}},
        {"prompt": ["a", "b", PROMPT]},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"return_token_ids": True},
        {"best_of": 3, "temperature": 1.0},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
    ids=str,
)
def test_an_echo_of_nothing_more_ends_in_one_way(server: ServerProcess, fields: dict[str, Any]) -> None:
    """Whatever the token is that was made and left out."""
    asked: dict[str, Any] = {"echo": True, "max_tokens": 0, **fields}
    whole = complete(server, **asked)
    assert {(choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]} == {("length", None)}
    assert whole["usage"]["completion_tokens"] == 0
    if "best_of" in fields:
        return
    ends: dict[int, list[str]] = {}
    texts: dict[int, str] = {}
    for event in server.events("/v1/completions", GREEDY | asked):
        for choice in event["choices"]:
            assert choice["stop_reason"] is None
            ends.setdefault(choice["index"], []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert ends == {choice["index"]: ["length"] for choice in whole["choices"]}
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}


def test_what_was_not_asked_for_is_null_as_vllm_has_it(server: ServerProcess) -> None:
    choice = complete(server)["choices"][0]
    assert [choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    for event in server.events("/v1/completions", GREEDY):
        assert [event["choices"][0][name] for name in ("token_ids", "prompt_token_ids")] == [None] * 2
    scored = complete(server, prompt_logprobs=0)["choices"][0]
    assert scored["prompt_logprobs"][0] is None
    assert scored["prompt_token_ids"] is None
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = server.post("/v1/chat/completions", chat).json()
    assert [answer[name] for name in ("prompt_logprobs", "prompt_token_ids")] == [None] * 2
    assert answer["choices"][0]["token_ids"] is None
    first, *others = server.events("/v1/chat/completions", chat)
    assert first["prompt_token_ids"] is None
    assert not any("prompt_token_ids" in event for event in others)
    ids = server.post("/v1/chat/completions", chat | {"return_token_ids": True}).json()["prompt_token_ids"]
    assert server.events("/v1/chat/completions", chat | {"return_token_ids": True})[0]["prompt_token_ids"] == ids


@pytest.mark.parametrize(("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))])
def test_a_prompt_is_cut_off_where_it_is_asked_for(server: ServerProcess, side: str | None, kept: slice) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    cut = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        answer = complete(server, prompt=prompt, **cut, echo=True)["choices"][0]
        assert answer["prompt_token_ids"] == ids[kept]
        assert answer["text"].startswith(server.post("/detokenize", {"tokens": ids[kept]}).json()["prompt"])
    assert complete(server, **cut | {"truncate_prompt_tokens": 999})["choices"][0]["prompt_token_ids"] == ids
    assert complete(server, **cut | {"truncate_prompt_tokens": None})["choices"][0]["prompt_token_ids"] == ids
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    whole = server.post("/tokenize", {"messages": chat["messages"]}).json()["tokens"]
    assert server.post("/v1/chat/completions", chat | cut).json()["prompt_token_ids"] == whole[kept]
    vectors = [
        server.post("/v1/embeddings", {"input": given, **fields}).json()["data"][0]["embedding"]
        for given, fields in ((ids, {name: cut[name] for name in cut if "trunc" in name}), (ids[kept], {}))
    ]
    assert vectors[0] == vectors[1]


def test_a_side_that_there_is_not_is_refused(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", GREEDY | {"truncate_prompt_tokens": 3, "truncation_side": "middle"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncation_side")


def test_best_of_takes_the_most_likely_per_token(server: ServerProcess, llm: LLM) -> None:
    expected = offline(llm, temperature=1.0, seed=3, n=5, logprobs=0)

    def mean(index: int) -> float:
        output = expected.outputs[index]
        assert output.cumulative_logprob is not None
        return output.cumulative_logprob / len(output.token_ids)

    best = sorted(range(5), key=mean, reverse=True)[:2]
    answer = complete(server, temperature=1.0, seed=3, best_of=5, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [expected.outputs[i].text for i in best]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == sum(len(o.token_ids) for o in expected.outputs)


@pytest.mark.parametrize(
    "text", ["def f(x):\n", "naïve café, 東京 👩‍👩‍👧 🎉", "\x00\x01\x7f\t\r\n\x1b[0m", "x" * 100], ids=ascii
)
def test_pieces_and_ids_of_a_text_and_back(server: ServerProcess, llm: LLM, text: str) -> None:
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == list(offline(llm, text, max_tokens=1).prompt_token_ids)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == text


def test_a_prefix_that_was_seen_is_counted_as_cached(server: ServerProcess) -> None:
    body = {"prompt": "# a comment that nobody else writes\n" * 12, "max_tokens": 1}
    assert complete(server, **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert complete(server, **body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert complete(server, **body, cache_salt="mine")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.post("/reset_prefix_cache", None).json()["had_blocks"]
    assert complete(server, **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("body", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 1}], ids=str)
def test_every_choice_of_a_stream_has_what_is_said_of_the_prompt(server: ServerProcess, body: dict[str, Any]) -> None:
    """A choice whose first token comes after those of others, or before the prompt is scored, has it as well."""
    asked = {"prompt": "x = 1; y = 2; " * 20, "max_tokens": 3, "n": 4, "seed": 1, **body}
    complete(server, **asked)  # now all but the first find the prompt in the cache
    whole = complete(server, **asked)["choices"]
    found: dict[int, list[dict[str, Any]]] = {}
    for event in server.events("/v1/completions", GREEDY | asked):
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    for choice in whole:
        pieces = found[choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[0].get("prompt_logprobs") == choice.get("prompt_logprobs")
        if choice["logprobs"] is not None:
            for name in choice["logprobs"]:
                assert [x for piece in pieces for x in piece["logprobs"][name]] == choice["logprobs"][name]


def test_offsets_of_characters_that_several_tokens_spell(server: ServerProcess) -> None:
    answer = complete(
        server, prompt="é😀", echo=True, max_tokens=20, logprobs=1, structured_outputs={"choice": ["é漢😀 ok"]}
    )["choices"][0]
    offsets = answer["logprobs"]["text_offset"]
    assert answer["text"] == "é😀é漢😀 ok"
    assert offsets == sorted(offsets)
    assert set(range(8)) >= set(offsets) >= {0, 1, 2, 3, 4}
