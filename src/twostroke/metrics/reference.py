"""Table of docs/metrics.md, generated from the definitions: `python -m twostroke.metrics.reference` prints it."""

from __future__ import annotations

import sys

from twostroke.metrics.exposition import PREFIX
from twostroke.metrics.families import FAMILIES, Family, Kind


def markdown() -> str:
    """Return the table in Markdown, one row per metric, with a final line break."""
    rows = ["| metric | kind | labels | vLLM | SGLang | meaning |", "|---|---|---|---|---|---|"]
    rows += [_row(family) for family in FAMILIES]
    return "\n".join(rows) + "\n"


def _row(family: Family) -> str:
    suffix = "_total" if family.kind is Kind.COUNTER else ""
    labels = ", ".join(f"`{label}`" for label in family.labels)
    vllm = "same" if family.in_vllm else ""
    sglang = "" if family.sglang is None else f"`{family.sglang}{suffix}`"
    if family.sglang == family.name:
        sglang = "same"
    return f"| `{PREFIX}:{family.name}{suffix}` | {family.kind} | {labels} | {vllm} | {sglang} | {family.help} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
