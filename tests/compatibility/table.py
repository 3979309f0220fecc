"""docs/compatibility.md, made from what the tests of pairs run: `make compatibility` writes it, a test compares."""

from __future__ import annotations

from pathlib import Path

from compatibility.features import FEATURES, GROUPS, PAIRS, Feature, Pair
from compatibility.outcomes import idle_of, refusal_of
from model_folders import SHAPES
from oracle.naive_model import model_class

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

_HEAD = """\
# Which features can be combined

For operators who combine features. Each of the {num_pairs} pairs is tested on a small model. `make compatibility`
writes this page from the table that `tests/compatibility` runs; a test compares both.

| mark | pairs | meaning |
|---|---|---|
| **✓** | {num_work} | the engine runs with both, and both have an effect. Tokens, log-probabilities and hidden \
states are, bit for bit, those of a reference engine, which computes each request from its beginning, one after the \
other. The reference has only those of the two features that change numbers, such as a KV format |
| **≈** | {num_drift} | the engine runs with both, and both have an effect. The pools have different numerics, so \
tokens may differ from those of one engine; `usage.numeric_drift` says so |
| **✗** | {num_refused} | refused at start; the number points to the message |
| **○** | {num_idle} | the same answers, but one of the two has no effect; the number points to the reason |
| **·** | | two values of one setting |

Every run has greedy and seeded requests with filters and penalties. Some share a prefix, and some arrive while others
decode. The model is a small Llama unless the pair names another. Blocks, KV memory and token budgets are small; all
other settings have the defaults of `twostroke serve --help-all`.
"""

_FAMILIES = """\

## The families

{num_families} architectures. Each is tested on a small model (`tests/invariance/test_every_family.py`,
`tests/unit/planner/test_memory.py`) with:

- chunks, other requests in the batch, and cached prefixes,
- weights in float32, bfloat16, int8 and int4, and KV in int8 and int4,
- two and four ranks, and hand-over between engines of one, two and four ranks,
- planned bytes, and native kernels compared with torch's operators.

{names}
"""


class _Notes:
    """Footnotes by their text, in the order in which they are first needed."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    def lines(self) -> list[str]:
        return [f"{number}. {text}" for text, number in self._numbers.items()]


def markdown() -> str:
    """Return the whole page."""
    notes = _Notes()
    rows = [_row(number, feature, notes) for number, feature in enumerate(FEATURES, 1)]
    refused = [pair for pair in PAIRS if refusal_of(pair) is not None]
    idle = [pair for pair in PAIRS if idle_of(pair) is not None]
    num_drift = sum(_drifts(pair) for pair in PAIRS if refusal_of(pair) is None and idle_of(pair) is None)
    head = _HEAD.format(
        num_pairs=len(PAIRS),
        num_work=len(PAIRS) - len(refused) - len(idle) - num_drift,
        num_drift=num_drift,
        num_refused=len(refused),
        num_idle=len(idle),
    )
    columns = " | ".join(map(str, range(1, len(FEATURES) + 1)))
    lines = [head, "## The pairs", "", f"| | | {columns} |", "|---:|---|" + ":---:|" * len(FEATURES), *rows, ""]
    lines += [*notes.lines(), "", "## The features", "", "| | | switched on by | |", "|---:|---|---|---|"]
    for group, features in GROUPS.items():
        for feature in features:
            number = FEATURES.index(feature) + 1
            lines.append(f"| {number} | {feature.name} | {_code(feature.how)} | {group} |")
    names = {f"`{model_class(kind).__name__}`" for kind, _ in SHAPES.values()}
    lines.append(_FAMILIES.format(num_families=len(names), names=", ".join(sorted(names))).rstrip())
    return "\n".join(lines) + "\n"


def _row(number: int, feature: Feature, notes: _Notes) -> str:
    marks = [_mark(feature, other, notes) for other in FEATURES]
    return f"| {number} | {feature.name} | {' | '.join(marks)} |"


def _mark(feature: Feature, other: Feature, notes: _Notes) -> str:
    if feature is other:
        return ""
    pair = next((pair for pair in PAIRS if feature in pair and other in pair), None)
    if pair is None:
        return "·"
    refusal, idle = refusal_of(pair), idle_of(pair)
    if refusal is not None:
        return f"✗ {notes.number(f'`{refusal}`')}"
    if idle is not None:
        return f"○ {notes.number(f'{idle.name}: {idle.why}')}"
    return "≈" if _drifts(pair) else "✓"


def _drifts(pair: Pair) -> bool:
    return any(feature.may_drift for feature in pair)


def _code(how: str) -> str:
    return f"`{how}`" if how.startswith("--") else how


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
