"""Generator of docs/api-fields.md from the request schemas: `python -m twostroke.api.reference`.

A test compares the page with the schemas.
"""

from __future__ import annotations

from pathlib import Path

from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.fields import FieldTreatment, WireObject, field_treatments
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.api.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.protocol.sampling import CompletionRequest, EmbeddingRequest

PAGE = Path(__file__).parents[3] / "docs" / "api-fields.md"

ENDPOINTS: dict[str, type[WireObject]] = {
    "POST /v1/completions": CompletionRequest,
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /api/chat": OllamaChatRequest,
    "POST /api/generate": OllamaGenerateRequest,
    "POST /api/embed": OllamaEmbedRequest,
    "POST /api/embeddings": OllamaEmbeddingsRequest,
    "POST /api/show": OllamaShowRequest,
}
"""Endpoints whose requests have a schema."""

_HEAD = """\
# Request fields

For programmers of clients: how the server treats each field of a request. Generated from the server's schema by
`python -m twostroke.api.reference`; tests check every row.

| state | meaning |
|---|---|
| **acts** | it changes the answer |
| **bookkeeping** | it is for the client's own records; accepted, without effect |
| **refused** | it would change the answer, but is not supported: status 400 with its name, unless its value \
has no effect |
| not listed | ignored; the answer's header `x-ignored-params` and the log name it. With `--strict` the request is \
refused |

**Not seen by the model.** A chat template may leave out parts of a chat: `tools` that the model is free to call, the
calls of earlier turns, and the text beside such calls (Llama 3's and Mistral's templates write only the calls). The
header `x-unseen-params` names such parts, and so does the log, once. With `--strict` such tools are refused.

**Numeric drift.** Answers have the fields of their API and one more: `usage.numeric_drift`. It is present when
workers with different numerics computed one answer, which `--allow-numeric-drift` permits. A single worker might have
given other tokens ([036](decisions/036-pools-of-different-formats.md)). For each setting in which the workers differ,
the field has the values in the order in which they took part: `{"kv_cache_dtype": ["int8", "bf16"]}`. Names are those
of the settings, and `twostroke` for the version.
"""


def fields_page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *(_table(path, kind) for path, kind in ENDPOINTS.items())])


def _table(path: str, kind: type[WireObject]) -> str:
    rows = sorted(field_treatments(kind), key=lambda row: (list(FieldTreatment).index(row[1]), row[0]))
    lines = [f"| `{name}` | {standing} | {description} |" for name, standing, description in rows]
    return "\n".join([f"## {path}\n", "| field | | |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(fields_page(), encoding="utf-8")
