"""Structured outputs from the request to the text: every kind, every model, every face, beside every other rule."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

import gguf_files
from twostroke import LLM, AsyncEngine, RequestOutput, SamplingParams, StructuredOutputs
from twostroke.batch import NewRequest
from twostroke.client.output_processor import OutputKind
from twostroke.cluster.messages import Add, decode_command, encode_message
from twostroke.engine.generation import GenerationRequest
from twostroke.errors import InvalidParameter, UnknownParameter
from twostroke.grammar import guidance
from twostroke.outputs import JoinedDeltas
from twostroke.request import FinishReason
from twostroke.sampling_params import MAX_STRUCTURE_BYTES

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "n", "kind"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[Any, Any]] = {
    "json": ({"json": SCHEMA}, lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
    "json as text": ({"json": json.dumps(SCHEMA)}, lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
    "regex": ({"regex": "[a-f]{2,8}-[0-9]{3}"}, re.compile("[a-f]{2,8}-[0-9]{3}").fullmatch),
    "choice": ({"choice": ["left", "right", "straight on"]}, ("left", "right", "straight on").__contains__),
    "lark": ({"grammar": 'start: "(" start? ")"'}, re.compile(r"\(+\)+").fullmatch),
    "gbnf": ({"grammar": 'root ::= [a-z]+ " = " [0-9]'}, re.compile("[a-z]+ = [0-9]").fullmatch),
}
MODELS = ["llama", "qwen3", "embedded"]
PROMPT = {"prompt_token_ids": list(range(10, 30))}


@pytest.fixture(scope="module")
def engines(random_models: dict[str, Path]) -> dict[str, LLM]:
    return {
        model: LLM(str(random_models.get(model, model)), kv_cache_memory=1 << 24, threads=1, max_model_len=600)
        for model in MODELS
    }


def one(llm: LLM, wanted: object, **params: Any) -> Any:
    """The one sequence of a request."""
    given = {"max_tokens": 500, "temperature": 1.0, "seed": 1} | params
    (output,) = llm.generate(PROMPT, SamplingParams(structured_outputs=wanted, **given))
    return output.outputs[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_have_the_form(engines: dict[str, LLM], model: str, form: str) -> None:
    wanted, is_right = FORMS[form]
    params = [
        SamplingParams(structured_outputs=wanted, max_tokens=500, temperature=temperature, seed=seed, n=2)
        for seed, temperature in enumerate((0.3, 1.0, 2.0))
    ]
    for output in engines[model].generate([PROMPT] * len(params), params):
        for sequence in output.outputs:
            if sequence.finish_reason == "stop":
                assert is_right(sequence.text), sequence.text
            else:  # a random model may open parentheses for ever
                assert (form, sequence.finish_reason) in {("lark", "length"), ("gbnf", "length")}


@pytest.mark.parametrize("name", ["llama-q8_0", "qwen3-q8_0", "llama3-f32"])
def test_tokenizers_of_gguf_files(name: str) -> None:
    """SentencePiece and byte-level BPE as llama.cpp's files hold them."""
    with LLM(str(gguf_files.fixture(name)), kv_cache_memory=1 << 24, threads=1) as llm:
        for form in ("regex", "choice", "json"):
            wanted, is_right = FORMS[form]
            params = [SamplingParams(structured_outputs=wanted, max_tokens=400, seed=seed) for seed in range(4)]
            sequences = [output.outputs[0] for output in llm.generate(["a"] * 4, params)]
            assert any(sequence.finish_reason == "stop" for sequence in sequences)
            assert all(is_right(s.text) for s in sequences if s.finish_reason == "stop"), sequences


def test_any_json_object(engines: dict[str, LLM]) -> None:
    sequence = one(engines["embedded"], {"json_object": True}, temperature=2.0, max_tokens=500)
    if sequence.finish_reason == "stop":
        assert isinstance(json.loads(sequence.text), dict)
    assert sequence.text.startswith("{")


def test_the_last_token_of_a_finished_form_ends_it(engines: dict[str, LLM]) -> None:
    """No step is spent on drawing an end-of-text token where nothing else could come."""
    for model in MODELS:
        sequence = one(engines[model], {"regex": "[0-9]{4}"}, allowed_token_ids=range(256), logprobs=0)
        assert sequence.finish_reason == "stop"
        assert sequence.stop_reason is None
        assert re.fullmatch("[0-9]{4}", sequence.text)
        if model != "embedded":  # of bytes alone
            assert len(sequence.token_ids) == len(sequence.logprobs) == 4


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "stop"),
        ({"max_tokens": 4}, "stop"),  # with its last token
        ({"max_tokens": 3}, "length"),
        ({"ignore_eos": True}, "stop"),
        ({"min_tokens": 10}, "stop"),
        ({"allowed_token_ids": range(300)}, "stop"),
    ],
)
def test_beside_what_else_ends_a_text(engines: dict[str, LLM], params: dict[str, Any], reason: str) -> None:
    params = {"max_tokens": 40} | params
    sequence = one(engines["llama"], {"regex": "[0-9]{4}"}, **params)
    assert sequence.finish_reason == reason
    assert len(sequence.text) == (4 if reason == "stop" else params["max_tokens"])


def test_where_the_text_may_end_or_go_on(engines: dict[str, LLM]) -> None:
    likes_to_end = {"logit_bias": {256: 100.0}, "max_tokens": 12, "temperature": 0.0}
    llm = engines["llama"]
    assert one(llm, {"regex": "a+"}, **likes_to_end).text == "a"
    assert one(llm, {"regex": "a+"}, **likes_to_end, min_tokens=5).text == "a" * 5
    assert one(llm, {"regex": "a+"}, **likes_to_end, ignore_eos=True).text == "a" * 12
    assert one(llm, {"regex": "a{1,7}"}, **likes_to_end, ignore_eos=True).text == "a" * 7
    stopped = one(llm, {"regex": "[ab]+"}, max_tokens=200, stop=["ab"], ignore_eos=True)
    assert stopped.stop_reason == "ab"
    assert re.fullmatch("b*a*", stopped.text)


def test_bad_words_and_allowed_tokens_narrow_the_form(engines: dict[str, LLM]) -> None:
    llm = engines["llama"]
    for seed in range(8):
        assert one(llm, {"choice": ["no", "yes"]}, bad_words=["y"], seed=seed).text == "no"
    allowed = llm.engine.prepare("abyes").prompt_token_ids
    assert one(llm, {"choice": ["no", "yes"]}, allowed_token_ids=allowed).text == "yes"


def test_nothing_left_ends_that_request_alone(engines: dict[str, LLM]) -> None:
    wanted = [{"choice": ["yes"]}, {"regex": "[a-c]{5}"}]
    params = [
        SamplingParams(structured_outputs=wanted[0], bad_words=["y"]),
        SamplingParams(structured_outputs=wanted[1]),
        SamplingParams(max_tokens=5, ignore_eos=True),
    ]
    bad, good, plain = engines["llama"].generate([PROMPT] * 3, params)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert "structured_outputs" in bad.error
    assert re.fullmatch("[a-c]{5}", good.outputs[0].text)
    assert plain.outputs[0].finish_reason == "length"
    assert len(plain.outputs[0].token_ids) == 5


def test_a_grammar_that_outgrows_its_limits_ends_that_request_alone(
    engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time anew: a request that comes later goes as far, and no further."""
    monkeypatch.setattr(guidance, "refusal_reason", lambda _: "")  # the trial has a clock
    wanted = {"regex": "b{300}(a{1,1000}){1,1000}"}
    params = [
        # without min_tokens the text may end before
        SamplingParams(structured_outputs=wanted, max_tokens=600, min_tokens=500, seed=1),
        SamplingParams(max_tokens=60, ignore_eos=True),
    ]
    num_tokens: list[int] = []
    for _ in range(2):
        bad, plain = engines["embedded"].generate([PROMPT] * 2, params)
        assert bad.outputs[0].finish_reason == "error"
        assert bad.error is not None
        assert "structured_outputs cannot continue" in bad.error
        assert "a{1,1000}" not in bad.error
        assert len(plain.outputs[0].token_ids) == 60
        num_tokens.append(len(bad.outputs[0].token_ids))
    assert num_tokens[0] == num_tokens[1] > 300


def test_streamed_pieces_are_the_whole(engines: dict[str, LLM]) -> None:
    engine = engines["embedded"].engine
    params = SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=500, seed=3)
    engine.submit("# settings\n", params, kind=OutputKind.DELTA)
    deltas = JoinedDeltas()
    while engine.has_work:
        for delta in engine.step():
            deltas.add(delta)
    (whole,) = engines["embedded"].generate("# settings\n", params)
    assert deltas.joined().outputs[0].text == whole.outputs[0].text
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(whole.outputs[0].text))


def test_from_coroutines(random_models: dict[str, Path]) -> None:
    async def last(engine: AsyncEngine, seed: int) -> RequestOutput:
        params = SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA), max_tokens=500, seed=seed)
        outputs = [output async for output in engine.generate(PROMPT, params)]
        return outputs[-1]

    async def main() -> list[RequestOutput]:
        async with AsyncEngine(str(random_models["qwen3"]), kv_cache_memory=1 << 24, threads=1) as engine:
            return await asyncio.gather(*(last(engine, seed) for seed in range(4)))

    for output in asyncio.run(main()):
        assert output.outputs[0].finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(output.outputs[0].text))


def test_a_request_taken_over_goes_on_in_its_form(engines: dict[str, LLM]) -> None:
    """Tokens that were generated elsewhere have been read by the grammar."""
    llm = engines["llama"]
    params = SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=500, seed=5)
    (whole,) = llm.generate(PROMPT, params)
    token_ids = whole.outputs[0].token_ids
    prompt = llm.engine.prepare(PROMPT, params)
    engine = llm.engine.engine
    for num_before in (1, len(token_ids) // 2, len(token_ids) - 1):
        new = NewRequest(
            "resumed",
            prompt.prompt_token_ids,
            prompt.params,
            seed=5,
            output_token_ids=token_ids[:num_before],
            eos_token_ids=tuple(prompt.eos_token_ids),
            grammar=prompt.grammar,
        )
        engine.add_request(GenerationRequest(new, 0.0, 500))
        tokens: list[int] = []
        reason = None
        while engine.has_work:
            for update in engine.step():
                tokens += update.token_ids
                reason = update.finish_reason
        assert (*token_ids[:num_before], *tokens) == token_ids
        assert reason is FinishReason.STOP


def test_what_was_compiled_travels_to_another_process(engines: dict[str, LLM]) -> None:
    prompt = engines["llama"].engine.prepare(PROMPT, SamplingParams(structured_outputs={"json": SCHEMA}))
    assert prompt.grammar is not None
    assert '"maxLength": 8' in prompt.grammar
    request = GenerationRequest(NewRequest("a", (1,), prompt.params, seed=0, grammar=prompt.grammar), 0.0, 9)
    again = decode_command(encode_message(Add(request)))
    assert isinstance(again, Add)
    assert again.request == request


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ["a"]}, r"\['regex', 'choice'\]: must have exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"json_object": 1}, "must be true or false"),
        ({"json": "{"}, "must be a JSON schema; Expecting property name"),
        ({"json": "[]"}, "must be a JSON schema, an object"),
        ({"json": "[" * 50_000}, "not nested as deeply"),
        ({"json": {"maximum": float("nan")}}, "not JSON compliant"),
        ({"json": {"enum": [object()]}}, "not JSON serializable"),
        ({"regex": 3}, "must be a string, not a number"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * (MAX_STRUCTURE_BYTES + 1)}, "has 65537 bytes in UTF-8; at most 65536 are allowed"),
        ({"grammar": ["a"]}, "must be a string, not a list"),
        ({"choice": []}, "at least one text"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": {"a": 1}}, "must be a sequence"),
        ({"choice": ["é" * 100] * 400}, "80000 bytes"),
    ],
)
def test_what_is_no_structure_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as error:
        SamplingParams(structured_outputs=given)
    assert error.value.name.startswith("structured_outputs")


def test_fields_that_are_not_ours_are_refused() -> None:
    with pytest.raises(UnknownParameter, match="did you mean 'regex'"):
        StructuredOutputs(regexp="a")  # pyright: ignore[reportCallIssue]
    with pytest.raises(UnknownParameter, match="disable_any_whitespace"):
        SamplingParams(structured_outputs={"regex": "a", "disable_any_whitespace": True})
    with pytest.raises(InvalidParameter, match="an object with one of its fields"):
        SamplingParams(structured_outputs="[a-z]")


def test_structures_are_keys() -> None:
    a, b = StructuredOutputs(json=SCHEMA), StructuredOutputs(json=json.dumps(SCHEMA))
    assert a == b
    assert len({SamplingParams(structured_outputs=a), SamplingParams(structured_outputs=b), SamplingParams()}) == 2
    assert SamplingParams(structured_outputs={"choice": "yes"}).structured_outputs == StructuredOutputs(choice=("yes",))
    assert a.kind == "json"


def test_what_this_model_cannot_follow_is_refused_at_once(engines: dict[str, LLM]) -> None:
    with pytest.raises(InvalidParameter, match="Unimplemented keys"):
        engines["llama"].engine.prepare(PROMPT, SamplingParams(structured_outputs={"json": {"not": {}}}))
    assert not engines["llama"].engine.has_work
