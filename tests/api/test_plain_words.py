"""Errors about wrong values name the field, the value and the allowed values, but no Python class."""

from __future__ import annotations

import re
from typing import Any

import pytest

from server_process import ServerProcess
from twostroke.api.protocol.fields import field_treatments
from twostroke.api.reference import ENDPOINTS

MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "import", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
}
WRONG: list[Any] = [{"a": 1}, [[]], "a text", 3.5, True, [{"b": [None]}]]
CLASS_NAMES = re.compile(
    r"\b(NoneType|int|str|dict|tuple|pydantic|Value error|instance of|[A-Z][a-z]+[A-Z]\w*|\w+Error)\b|<class"
)
OURS = re.compile(r"'[^']*'|\"[^\"]*\"|\{[^}]*\}|OpenAI|SamplingParams\(max_tokens=16\)")
"""What a message quotes is the caller's."""


@pytest.mark.parametrize("path", MINIMAL)
def test_no_field_names_a_class(server: ServerProcess, path: str) -> None:
    names = [name for name, _, _ in field_treatments(ENDPOINTS[f"POST {path}"])]
    refusals: dict[str, str] = {}
    for name in names:
        for wrong in WRONG:
            answer = server.post(path, {**MINIMAL[path], name: wrong, "stream": False})
            if answer.status_code != 200:
                assert answer.status_code in (400, 404), answer.text
                refusals[f"{name}={wrong!r}"] = answer.json()["error"]["message"]
    assert len(refusals) > 2 * len(names)
    found = {given: told for given, told in refusals.items() if CLASS_NAMES.search(OURS.sub("", told))}
    assert found == {}
