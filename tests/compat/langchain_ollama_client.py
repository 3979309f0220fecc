"""LangChain's Ollama classes against a server: argument 1 is its URL. Runs in an environment with langchain-ollama."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

MODEL = "embedded"
CITY = {
    "title": "City",
    "type": "object",
    "properties": {"capital": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["capital", "size"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    """Make LangChain's calls; assert that each answer is what LangChain takes it for."""
    chat = ChatOllama(model=MODEL, base_url=url, temperature=0, num_predict=16, seed=3, validate_model_on_init=True)
    messages = [SystemMessage("You write Python."), HumanMessage("def add(a, b):")]
    whole = chat.invoke(messages)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 16
    chunks = list(chat.stream(messages))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == whole.content
    first, second = chat.batch([messages, [HumanMessage("class Queue:")]])
    assert first.content == whole.content != second.content
    longer = ChatOllama(model=MODEL, base_url=url, temperature=0, num_predict=64)
    city = longer.with_structured_output(CITY, method="json_schema").invoke("Paris?")
    assert city["size"] in ("small", "large")
    assert longer.bind_tools([CITY]).invoke("Paris?").response_metadata["done"]
    text = OllamaLLM(model=MODEL, base_url=url, temperature=0, num_predict=16)
    assert text.invoke("def add(a, b):\n") == "".join(text.stream("def add(a, b):\n"))
    vectors = OllamaEmbeddings(model=MODEL, base_url=url).embed_documents(["import os", "import sys"])
    assert abs(sum(x * x for x in vectors[0]) - 1) < 1e-3
    print(json.dumps({"chunks": len(chunks), "city": city, "dimensions": len(vectors[0])}))


if __name__ == "__main__":
    main(sys.argv[1])
