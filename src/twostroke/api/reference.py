"""docs/api-fields.md, made from the wire types: `python -m twostroke.api.reference` writes it, a test compares."""

from __future__ import annotations

from pathlib import Path

from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.fields import FieldStanding, WireObject, standings
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
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
}
"""The endpoints whose requests have a schema."""

_HEAD = """\
# What becomes of each field

Made from the server's own schema by `python -m twostroke.api.reference`; the tests try every row.

- **acts**: it changes the answer.
- **bookkeeping**: the client's own notes; accepted, changes nothing.
- **refused**: it would have to change the answer and is not supported: status 400 that names it, unless its value asks
  for nothing.

A field that is not listed is named in the header `x-ignored-params` of the answer and in the log; with `--strict` the
request is refused.

What the model never sees because its chat template does not write it is named in `x-unseen-params`, and once in the
log: `tools` that it is free to call, the calls of earlier turns, and the text beside such calls (Llama 3's and
Mistral's templates write the calls alone). With `--strict` such tools are refused.

Answers have the fields of the API that they speak. One is ours: `usage.numeric_drift` is there when workers of
different numerics made an answer, which they may with `--allow-numeric-drift`. It has, for each setting in which they
differ, the values in the order in which they took part: `{"kv_cache_dtype": ["int8", "bf16"]}`. The names are those of
the settings, and `twostroke` for the version. One worker alone may have answered with other tokens
([036](decisions/036-pools-of-different-formats.md)).
"""


def fields_page() -> str:
    """The page."""
    return "\n".join([_HEAD, *(_table(path, kind) for path, kind in ENDPOINTS.items())])


def _table(path: str, kind: type[WireObject]) -> str:
    rows = sorted(standings(kind), key=lambda row: (list(FieldStanding).index(row[1]), row[0]))
    lines = [f"| `{name}` | {standing} | {description} |" for name, standing, description in rows]
    return "\n".join([f"## {path}\n", "| field | | |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(fields_page(), encoding="utf-8")
