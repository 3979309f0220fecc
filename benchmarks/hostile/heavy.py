"""Hostile requests by size.

heavy         as large as allowed, some a little larger: each large parameter once
many parts    very many small parts, in every place that takes some: each costs little, all together cost much
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Heavy = tuple[str, str, bytes]
"""Name, route, and body."""
_MAX_ITEMS = 30_000
"""Entries and characters of sampling parameters, together; --max-parameter-items is a little more."""
_SCHEMA_PROPERTIES = 400
_USER = {"role": "user", "content": "x"}
_CHAT: dict[str, Any] = {"messages": [_USER], "max_tokens": 1}


def heavy_requests(max_model_len: int, divisor: int = 1) -> Iterator[Heavy]:
    """Yield the heavy requests.

    Args:
        max_model_len: of the server.
        divisor: factor by which each is smaller.
    """
    return ((name, route, json.dumps(body).encode()) for name, route, body in _bodies(max_model_len, divisor))


def long_texts(num_bytes: int) -> Iterator[Heavy]:
    """Yield requests with a text longer than any context, whose tokens are counted, truncated, or returned."""
    for kind, text in ("digits", "7" * num_bytes), ("words", "some words " * (num_bytes // 11)):
        messages = [{"role": "user", "content": text}]
        bodies: dict[str, tuple[str, dict[str, Any]]] = {
            "token texts": ("/tokenize", {"prompt": text, "return_token_strs": True}),
            "the last tokens": ("/v1/completions", {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 16}),
            "the first tokens": (
                "/v1/completions",
                {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 16, "truncation_side": "right"},
            ),
            "of a chat": (
                "/v1/chat/completions",
                {"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": 16},
            ),
            "of an embedding": ("/v1/embeddings", {"input": text, "truncate_prompt_tokens": 16}),
            "a chat in tokens": ("/tokenize", {"messages": messages, "return_token_strs": True}),
        }
        for name, (route, body) in bodies.items():
            yield f"{kind}: {name}", route, json.dumps(body).encode()


def _bodies(max_model_len: int, divisor: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    items, prompt = _MAX_ITEMS // divisor, [7 + i % 50 for i in range(max_model_len // divisor - 8)]
    scores = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20}
    yield "scores of a prompt", "/v1/completions", scores
    yield "scores that echo", "/v1/completions", {"prompt": prompt[::-1], "max_tokens": 1, "echo": True, "logprobs": 20}
    text = "some words " * (len(prompt) // 4)
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    yield "scores of a chat", "/v1/chat/completions", chat | {"prompt_logprobs": 20}
    one: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
    yield "biases", "/v1/completions", one | {"logit_bias": {str(i): 1 for i in range(min(items, 4000))}}
    yield "ids that are allowed", "/v1/completions", one | {"allowed_token_ids": [i % 4000 for i in range(items)]}
    yield "ids that end", "/v1/completions", one | {"stop_token_ids": [i % 4000 for i in range(items)]}
    yield "words that are bad", "/v1/completions", one | {"bad_words": [f"w{i}" for i in range(items // 8)]}
    yield "stop strings", "/v1/completions", one | {"stop": [f"stop {i}" for i in range(items // 12)]}
    yield "a long stop string", "/v1/completions", one | {"stop": ["ab" * (items // 3)]}
    yield "stop strings of a chat", "/v1/chat/completions", _CHAT | {"stop": ["a" * (items // 4)] * 3}
    properties = {f"p{i}": {"type": "string", "description": "d" * 60} for i in range(_SCHEMA_PROPERTIES // divisor)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    yield "a schema", "/v1/chat/completions", _CHAT | {"response_format": wanted}
    choices = {"choice": [f"choice {i}" for i in range(5000 // divisor)]}
    yield "choices", "/v1/completions", one | {"structured_outputs": choices}
    yield "a pattern", "/v1/completions", one | {"structured_outputs": {"regex": "(ab|cd)" * (8000 // divisor)}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": "d" * 900, "parameters": {"type": "object"}}}
        for i in range(1000 // divisor)
    ]
    yield "tools", "/v1/chat/completions", _CHAT | {"tools": tools}
    yield "tools to count", "/tokenize", {"messages": [_USER], "tools": tools}
    yield (
        "tools of which one has to be called",
        "/v1/chat/completions",
        _CHAT | {"tools": tools, "tool_choice": "required"},
    )
    messages = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y" * 100}] * (4000 // divisor)
    yield "messages", "/v1/chat/completions", {"messages": [*messages, _USER], "max_tokens": 1}
    yield "messages of Anthropic's", "/v1/messages", {"messages": [*messages, _USER], "max_tokens": 1}
    yield "messages to count", "/v1/messages/count_tokens", {"messages": [*messages, _USER]}
    yield "items", "/v1/responses", {"input": [*messages, _USER], "max_output_tokens": 16}
    documents = [{"title": "t", "text": "d" * 100}] * (8000 // divisor)
    yield "documents", "/v1/chat/completions", _CHAT | {"documents": documents}
    yield "variables", "/v1/chat/completions", _CHAT | {"chat_template_kwargs": {f"v{i}": "x" for i in range(items)}}
    yield "bookkeeping", "/v1/chat/completions", _CHAT | {"metadata": {f"k{i}": "x" * 60 for i in range(items // 2)}}
    yield "prompts", "/v1/completions", {"prompt": ["x"] * (2048 // divisor), "max_tokens": 1}
    yield "inputs", "/v1/embeddings", {"input": ["some words"] * (2048 // divisor)}
    yield "ids to see as text", "/detokenize", {"tokens": [7 + i % 4000 for i in range(2**19 // divisor)]}


_FIELDS = 200_000
_LISTS = 300_000
_CALLS = 8000
_TOOLS = 350
_SCHEMA_LEVELS = 40
_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize")
_RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [_USER], "max_tokens": 1},
    "/v1/messages": {"messages": [_USER], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
}


def many_parts(divisor: int = 1) -> Iterator[Heavy]:
    """Yield the requests with many parts.

    Args:
        divisor: factor by which each has fewer parts.
    """
    fields = ",".join(f'"k{i}":1' for i in range(_FIELDS // divisor))
    lists = ",".join(["[]"] * (_LISTS // divisor))
    again = ',"model":null' * (_FIELDS // divisor)
    levels = "[" * (_LISTS // divisor) + "]" * (_LISTS // divisor)
    for route in _ROUTES:
        right = _json(_RIGHT[route])[:-1]
        yield f"unknown fields of {route}", route, f"{right},{fields}}}".encode()
        yield f"an unknown field of objects of {route}", route, f'{right},"zz":{{{fields}}}}}'.encode()
        yield f"an unknown field of lists of {route}", route, f'{right},"zz":[{lists}]}}'.encode()
        yield f"one field again and again of {route}", route, f"{right}{again}}}".encode()
        yield f"an unknown field of levels of {route}", route, f'{right},"zz":{levels}}}'.encode()
    yield from ((name, route, _json(body).encode()) for name, route, body in _within(divisor, fields, lists))


def _within(divisor: int, fields: str, lists: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield bodies with many parts in special places."""
    few = {f"k{i}": 1 for i in range(_FIELDS // 2 // divisor)}
    chat, message, item = "/v1/chat/completions", {"max_tokens": 1}, {"max_output_tokens": 16}
    for name, text in (("lists", f'{{"a":[{lists}]}}'), ("fields", f"{{{fields}}}"), ("no object", f"[{lists}]")):
        yield f"arguments of {name}, as a text", chat, {"messages": [_USER, _called([text])], **message}
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": text}
        yield f"arguments of {name}, as an item", "/v1/responses", {"input": [_USER, call], **item}
        yield f"a schema of {name}, as a text", "/v1/completions", {"prompt": "x", "structured_outputs": {"json": text}}
    yield "arguments as an object", chat, {"messages": [_USER, _called([few])], **message}
    used = {"type": "tool_use", "id": "a", "name": "f", "input": few}
    yield "input of a tool", "/v1/messages", {"messages": [_USER, {"role": "assistant", "content": [used]}], **message}
    yield "fields of a message", chat, {"messages": [{**_USER, **few}], **message}
    part = {"type": "text", "text": "x", **few}
    yield "fields of a part", chat, {"messages": [{"role": "user", "content": [part]}], **message}
    yield "variables of lists", chat, {**_RIGHT[chat], "chat_template_kwargs": {"a": [[7]] * (30_000 // divisor)}}
    yield "variables of numbers", chat, {**_RIGHT[chat], "chat_template_kwargs": {"a": [7] * (_LISTS // divisor)}}
    yield "documents", chat, {**_RIGHT[chat], "documents": [{"a": [7] * 70}] * (8000 // divisor)}
    calls = _CALLS // divisor
    yield "calls", chat, {"messages": [_USER, _called(['{"a":1}'] * calls)], **message}
    items = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(calls)]
    yield "calls as items", "/v1/responses", {"input": [_USER, *items], **item}
    odd = [{"type": "text", "text": "x", f"k{i}": 1} for i in range(calls)]
    yield "parts with a field of their own", chat, {"messages": [{"role": "user", "content": odd}] * 2, **message}
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(_SCHEMA_LEVELS):
        schema = {"type": "object", "properties": {"a": schema}}
    functions = [{"name": f"f{i}", "parameters": schema} for i in range(_TOOLS // divisor)]
    tools = [{"type": "function", "function": function} for function in functions]
    for choice in ("auto", "required"):
        yield f"tools with deep schemas, {choice}", chat, {**_RIGHT[chat], "tools": tools, "tool_choice": choice}
    wide = {"type": "object", "properties": {"a": {"enum": [f"v{i}" for i in range(_LISTS // divisor)]}}}
    for choice in ("auto", "required"):
        one = {"type": "function", "function": {"name": "f", "parameters": wide}}
        yield f"a tool with a long enum, {choice}", chat, {**_RIGHT[chat], "tools": [one], "tool_choice": choice}
    lists_of_ids = [[7] * 150] * (2048 // divisor)
    yield "prompts of ids", "/v1/completions", {"prompt": lists_of_ids, "max_tokens": 1}
    yield "inputs of ids", "/v1/embeddings", {"input": lists_of_ids}
    yield "choices of many prompts", "/v1/completions", {"prompt": ["x"] * (2048 // divisor), "n": 128, "max_tokens": 1}


def _called(arguments: list[Any]) -> dict[str, Any]:
    functions = [{"name": "f", "arguments": given} for given in arguments]
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "tool_calls": calls}


def _json(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"))
