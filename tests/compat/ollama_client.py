"""Ollama's Python client against a server: argument 1 is its URL. Runs in an environment with ollama."""

from __future__ import annotations

import json
import sys

import ollama

MODEL = "embedded"
CITY = {
    "type": "object",
    "properties": {"capital": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["capital", "size"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    """Make the client's calls; assert that each answer is what the client takes it for."""
    client = ollama.Client(host=url)
    assert [model.model for model in client.list().models] == [MODEL]
    assert client.show(MODEL).details.family == "llama"
    assert client.ps().models[0].context_length == 4096
    options = {"temperature": 0, "num_predict": 16, "seed": 3}
    messages = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "def add(a, b):"}]
    whole = client.chat(model=MODEL, messages=messages, options=options, keep_alive="5m")
    assert whole.message.content
    assert (whole.eval_count, whole.done_reason) == (16, "length")
    pieces = list(client.chat(model=MODEL, messages=messages, options=options, stream=True))
    assert len(pieces) > 2
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    city = client.chat(model=MODEL, messages=messages, format=CITY, options={"temperature": 0})
    assert json.loads(city.message.content)["size"] in ("small", "large")
    tool = {"type": "function", "function": {"name": "city", "description": "A city.", "parameters": CITY}}
    assert client.chat(model=MODEL, messages=messages, tools=[tool], options=options).done
    raw = client.generate(model=MODEL, prompt="def add(a, b):\n", raw=True, options=options)
    streamed = client.generate(model=MODEL, prompt="def add(a, b):\n", raw=True, options=options, stream=True)
    assert "".join(piece.response for piece in streamed) == raw.response
    assert client.generate(model=MODEL).done_reason == "load"
    vectors = client.embed(model=MODEL, input=["import os", "import sys"]).embeddings
    assert abs(sum(x * x for x in vectors[0]) - 1) < 1e-3
    assert client.embeddings(model=MODEL, prompt="import os").embedding == vectors[0]
    assert refusal_of(client, "absent") == (404, "the model 'absent' does not exist; this server has 'embedded'.")
    print(json.dumps({"pieces": len(pieces), "dimensions": len(vectors[0]), "city": city.message.content}))


def refusal_of(client: ollama.Client, model: str) -> tuple[int, str]:
    """Return status and message of the error that a chat with a model ends with."""
    try:
        client.chat(model=model, messages=[{"role": "user", "content": "a"}])
    except ollama.ResponseError as error:
        return error.status_code, error.error
    raise AssertionError(f"{model} has answered")


if __name__ == "__main__":
    main(sys.argv[1])
