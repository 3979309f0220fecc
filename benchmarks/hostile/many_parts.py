"""Bodies of very many small parts, in every place that takes some: each part costs little, and all together much."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.hostile.heavy import _USER, Heavy

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
    """Yield the requests.

    Args:
        divisor: how many times fewer parts each has.
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
    """Yield bodies with many parts at places of their own."""
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
