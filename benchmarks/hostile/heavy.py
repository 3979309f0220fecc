"""Requests as large as they may be, some a little larger: each parameter that takes much, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Heavy = tuple[str, str, bytes]
"""Name, route, and body."""
_MOST_ITEMS = 30_000
"""Entries and characters of sampling parameters, together; --max-parameter-items is a little more."""
_SCHEMA_PROPERTIES = 400
_USER = {"role": "user", "content": "x"}
_CHAT: dict[str, Any] = {"messages": [_USER], "max_tokens": 1}


def heavy_requests(max_model_len: int, divisor: int = 1) -> Iterator[Heavy]:
    """Yield the requests.

    Args:
        max_model_len: of the server.
        divisor: how many times smaller each is.
    """
    return ((name, route, json.dumps(body).encode()) for name, route, body in _bodies(max_model_len, divisor))


def long_texts(num_bytes: int) -> Iterator[Heavy]:
    """Yield requests with a text that no context holds, whose tokens are counted, cut, or sent back."""
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
    items, prompt = _MOST_ITEMS // divisor, [7 + i % 50 for i in range(max_model_len // divisor - 8)]
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
