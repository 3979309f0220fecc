"""Embeddings: the model's hidden state of the last token, scaled to length 1. This module has no HTTP.

Same definition as vLLM's for generative models: the state after the final norm, pooled at the last token,
normalised.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.api.generation import (
    AnswerHead,
    Caller,
    GenerationCall,
    input_size,
    prompts_of,
    run_in_thread_if_long,
)
from twostroke.api.protocol.sampling import EmbeddingRequest
from twostroke.client.engine_client import EngineClient
from twostroke.client.input_processor import PromptInput
from twostroke.errors import InvalidParameter

Object = dict[str, Any]


class Embeddings(GenerationCall):
    """One call of /v1/embeddings.

    Args:
        engine: engine that runs it.
        request: request that matches the schema.
        head: head of the answer.
    """

    def __init__(self, engine: EngineClient, request: EmbeddingRequest, head: AnswerHead) -> None:
        super().__init__(engine, head)
        self._request = request

    async def open(self, caller: Caller) -> None:
        """Check everything and queue the inputs; raise what Completion.open raises."""
        request = self._request
        most = self.engine.facts.hidden_size
        if request.dimensions is not None and request.dimensions > most:
            raise InvalidParameter(
                "dimensions", request.dimensions, f"must be at most {most}, this model's hidden size"
            )
        given = prompts_of(request.input, "input")

        def prepare() -> list[PromptInput]:
            return [self.engine.inputs.process_embedding(prompt, request) for prompt in given]

        inputs = await run_in_thread_if_long(prepare, input_size(given))
        self._begin(request, inputs, caller, streams=False)

    async def answer(self) -> Object:
        """Return the whole answer; raise what AnswerGeneration.whole raises."""
        data: list[Object] = []
        num_tokens = 0
        for index, output in enumerate(await self.generation.whole()):
            assert output.hidden_state is not None, f"{output.request_id} ended without a hidden state"
            num_tokens += len(output.prompt_token_ids)
            state = np.frombuffer(output.hidden_state, np.float32)
            embedding = self._written(unit_vector(state, self._request.dimensions))
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self.head.model, "usage": usage}

    def _written(self, embedding: npt.NDArray[np.float32]) -> str | list[float]:
        if self._request.encoding_format == "base64":
            return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
        return embedding.tolist()


def unit_vector(state: npt.NDArray[np.float32], dimensions: int | None) -> npt.NDArray[np.float32]:
    """Return the first dimensions of a hidden state (default all), scaled to length 1.

    A shortened vector is meaningful (Matryoshka embeddings, arXiv:2205.13147) only if the model was trained for it.

    >>> unit_vector(np.array([3, 4, 12], np.float32), 2).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    kept = state[:dimensions].astype(np.float64)
    length = np.linalg.norm(kept)
    return (kept / length if length else kept).astype(np.float32)
