"""LangChain's OpenAI classes against a server: argument 1 is its URL. Runs in an environment with langchain-openai."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

MODEL = "embedded"
CITY = {
    "title": "City",
    "type": "object",
    "properties": {"capital": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["capital", "size"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    """Send requests in every way that LangChain has; assert that the answers are as expected."""
    shared = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none"}
    chat = ChatOpenAI(**shared, temperature=0, max_tokens=16, seed=3)
    messages = [SystemMessage("You write Python."), HumanMessage("def add(a, b):")]
    whole = chat.invoke(messages)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 16
    assert whole.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream(messages, stream_usage=True))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata] == [16]
    first, second = chat.batch([messages, [HumanMessage("class Queue:")]])
    assert first.content == whole.content != second.content
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(messages).response_metadata["logprobs"]["content"]
    assert len(logprobs) == 16

    longer = ChatOpenAI(**shared, temperature=0, max_tokens=64)
    city = longer.with_structured_output(CITY, method="json_schema").invoke("Paris?")
    assert isinstance(city["capital"], bool)
    assert city["size"] in ("small", "large")
    called = longer.bind_tools([CITY], tool_choice="City").invoke("Paris?")
    assert [call["name"] for call in called.tool_calls] == ["City"]
    assert called.tool_calls[0]["args"].keys() == {"capital", "size"}

    completion = OpenAI(**shared, temperature=0, max_tokens=16)
    assert completion.invoke("def add(a, b):\n") == "".join(completion.stream("def add(a, b):\n"))
    embeddings = OpenAIEmbeddings(**shared, check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(["import os", "import sys"])
    assert len(vectors) == 2
    assert abs(sum(x * x for x in vectors[0]) - 1) < 1e-3
    print(json.dumps({"chunks": len(chunks), "tool_call": called.tool_calls[0]["args"], "dimensions": len(vectors[0])}))


if __name__ == "__main__":
    main(sys.argv[1])
