"""Statements about KV formats equal the measured figures."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from twostroke import LLM
from twostroke.config import cache
from twostroke.config.kv_format import (
    INT4_PERPLEXITY_RISE,
    INT8_PERPLEXITY_RISE,
    INT8_PERPLEXITY_RISE_OF_CODER,
    kv_format_warning,
)

ROOT = Path(__file__).parents[3]


def test_the_warning_tells_the_measured_rise() -> None:
    found = json.loads((ROOT / "benchmarks/results/quality-smollm2.json").read_text())["results"]
    for name, told in (("int4", INT4_PERPLEXITY_RISE), ("int8", INT8_PERPLEXITY_RISE)):
        assert told == pytest.approx(found[f"kv_cache_dtype={name}"]["perplexity_rise"], abs=5e-5)
    other = json.loads((ROOT / "benchmarks/results/quality-qwen-coder.json").read_text())["results"]
    assert other["kv_cache_dtype=int4"]["perplexity_rise"] > 100, "unusable"
    rise = other["kv_cache_dtype=int8"]["perplexity_rise"]
    assert pytest.approx(rise, abs=5e-5) == INT8_PERPLEXITY_RISE_OF_CODER
    for told in (INT8_PERPLEXITY_RISE, INT8_PERPLEXITY_RISE_OF_CODER):
        assert f"int8: {told:.1%}" in (kv_format_warning("int4") or "")


def test_help_and_readme_tell_the_same() -> None:
    for text in (inspect.getsource(cache), (ROOT / "README.md").read_text(), (ROOT / "docs/gpu.md").read_text()):
        assert f"{INT4_PERPLEXITY_RISE:.1%}" in text


def test_an_engine_warns_at_start_of_int4_alone(random_models: dict[str, Path]) -> None:
    for kv_cache_dtype, count in (("int4", 1), ("int8", 0)):
        options = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory": 1 << 22, "threads": 1}
        with LLM(str(random_models["llama"]), **options) as llm:
            assert sum(line == f"note     {kv_format_warning('int4')}" for line in llm.engine.startup_lines) == count
