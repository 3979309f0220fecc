"""Parser of docs/metrics.md and of expositions, and the comparison of both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_OF_ALL = frozenset({"model_name", "engine"})
_OF_SGLANG = _OF_ALL | {"engine_type", "tp_rank", "pp_rank"}
_ROW = re.compile(r"^\| `(\w+):(\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*?) \| (.*) \|$", re.MULTILINE)
_WITHOUT = re.compile(r"It has no label `(\w+)`\.")
_SGLANGS_OWN = re.compile(r"For SGLang there are also\s+(.*?), which are derived", re.DOTALL)


@cache
def documented() -> dict[str, frozenset[str]]:
    """Return every metric on the page by its full name, with its labels."""
    return dict(_documented(PAGE.read_text(encoding="utf-8")))


def _documented(page: str) -> Iterator[tuple[str, frozenset[str]]]:
    for prefix, name, _, labels, vllm, sglang, meaning in _ROW.findall(page):
        own = frozenset(re.findall(r"`(\w+)`", labels))
        yield f"{prefix}:{name}", (own | _OF_ALL) - set(_WITHOUT.findall(meaning))
        if vllm:
            assert vllm == "same", name
            yield f"vllm:{name}", own | _OF_ALL
        if sglang:
            yield f"sglang:{name if sglang == 'same' else sglang.strip('`')}", own | _OF_SGLANG
    (own_names,) = _SGLANGS_OWN.findall(page)
    for name in re.findall(r"`(\w+)`", own_names):
        yield f"sglang:{name}", _OF_SGLANG


def to_metric(text: str) -> dict[str, frozenset[str]]:
    """Return every metric of an exposition by its full name, with the labels of its samples."""
    found: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
    return found


def check_documented(text: str) -> dict[str, frozenset[str]]:
    """Check that the page has every exposed metric with its labels; return the exposed metrics."""
    page, found = documented(), to_metric(text)
    assert found, "nothing is exposed"
    assert set(found) <= set(page), f"not in docs/metrics.md: {sorted(set(found) - set(page))}"
    for name, labels in found.items():
        assert labels <= page[name], f"{name}: labels not in docs/metrics.md: {sorted(labels - page[name])}"
    return found
