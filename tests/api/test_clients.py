"""OpenAI's own client, unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from server_process import ServerProcess


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


CHAT: Any = {"model": "embedded", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="embedded", prompt="import ", max_tokens=8, temperature=0, logprobs=2)
    chunks = list(
        client.completions.create(model="embedded", prompt="import ", max_tokens=8, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens is not None
    assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text


def test_the_program_of_the_page_about_serving(server: ServerProcess) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(from openai.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:8000/v1" in script
    script = script.replace("http://127.0.0.1:8000", server.url)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_chats(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    stream = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert whole._request_id


def test_parsed_answers(client: openai.OpenAI) -> None:
    class Point(BaseModel):
        x: int
        y: bool

    parsed = client.chat.completions.parse(**{**CHAT, "max_tokens": 64}, response_format=Point)
    assert isinstance(parsed.choices[0].message.parsed, Point)


def test_the_stream_helper_collects_tool_calls(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    with client.chat.completions.stream(**{**CHAT, "max_tokens": 64}, tools=[tool], tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "chunk" in kinds
    assert final.choices[0].message.tool_calls
    assert final.choices[0].message.tool_calls[0].function.name == "now"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert client.models.retrieve("embedded").id == "embedded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**CHAT, "temperature": -1})
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="embedded", prompt="word " * 9000)
    assert long.value.code == "context_length_exceeded"
