"""Embeddings with OpenAI's own client against a real server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from server_process import ServerProcess

TEXTS = ["import os", "def add(a, b):", "the quick brown fox"]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(client: Any, given: Any, **fields: Any) -> np.ndarray:
    answer = client.embeddings.create(**{"model": "embedded", "input": given, **fields})
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data], np.float32)


def tokens(server: ServerProcess, text: str) -> list[int]:
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_four_kinds_of_input_say_the_same(client: Any, server: ServerProcess) -> None:
    ids = [tokens(server, text) for text in TEXTS]
    expected = vectors(client, TEXTS)
    assert expected.shape == (3, 256)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-6)
    assert np.array_equal(vectors(client, ids), expected)
    assert np.array_equal(vectors(client, TEXTS[1])[0], expected[1])
    assert np.array_equal(vectors(client, ids[2])[0], expected[2])
    assert np.abs(expected[0] - expected[1]).max() > 0.01


def test_formats_have_the_same_numbers(server: ServerProcess) -> None:
    """The client asks for base64 by itself; a server that only wrote numbers would not be found out."""
    body = {"input": TEXTS[0]}
    numbers = server.post("/v1/embeddings", body | {"encoding_format": "float"}).json()["data"][0]["embedding"]
    packed = server.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert isinstance(numbers, list)
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.array(numbers, np.float32))
    assert server.post("/v1/embeddings", body).json()["data"][0]["embedding"] == numbers


def test_dimensions_keep_the_first(client: Any) -> None:
    whole, part = vectors(client, TEXTS), vectors(client, TEXTS, dimensions=16)
    expected = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(part, expected, rtol=1e-5)


def test_truncation_keeps_the_last_tokens(client: Any, server: ServerProcess) -> None:
    ids = tokens(server, TEXTS[2] * 3)
    cut = vectors(client, ids, extra_body={"truncate_prompt_tokens": 4})
    assert np.array_equal(cut, vectors(client, ids[-4:]))
    assert not np.array_equal(cut, vectors(client, ids))


def test_usage_counts_every_input(client: Any, server: ServerProcess) -> None:
    usage = client.embeddings.create(model="embedded", input=TEXTS).usage
    assert usage.prompt_tokens == usage.total_tokens == sum(len(tokens(server, text)) for text in TEXTS)


def test_embeddings_beside_completions_have_the_same_bits(client: Any, server: ServerProcess) -> None:
    expected = vectors(client, TEXTS)
    stream = client.completions.create(model="embedded", prompt="import", max_tokens=200, stream=True)
    next(iter(stream))
    assert np.array_equal(vectors(client, TEXTS), expected)
    stream.close()
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dimensions": 257}, "dimensions=257: must be at most 256"),
        ({"dimensions": 0}, "dimensions=0"),
        ({"encoding_format": "hex"}, "encoding_format='hex'"),
        ({"input": []}, "input is an empty list"),
        ({"input": ""}, "empty"),
        ({"input": [1, 10**6]}, "1000000"),
        ({"input": "x" * 200_000}, "max_model_len"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({}, "input"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded(server: ServerProcess, fields: dict[str, Any], named: str) -> None:
    answer = server.post("/v1/embeddings", ({"input": TEXTS[0]} if fields else {}) | fields)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_special_tokens_and_priority_are_handed_on(server: ServerProcess) -> None:
    body = {"input": TEXTS[0], "add_special_tokens": False, "priority": 3, "cache_salt": "a", "user": "u"}
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200
    assert "x-ignored-params" not in answer.headers
    assert server.post("/v1/embeddings", body | {"wish": 1}).headers["x-ignored-params"] == "wish"
    assert server.post("/v1/embeddings", body | {"model": "other"}).status_code == 404
