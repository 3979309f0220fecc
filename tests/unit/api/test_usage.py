"""The usage of an answer: its cost, and the numerics of its workers."""

from __future__ import annotations

from twostroke.api.generation import UsageCount
from twostroke.outputs import NumericDrift, RequestOutput


def output(drift: NumericDrift, *, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, (1, 2, 3), None, finished=finished, numeric_drift=drift)


def test_drift_is_named_where_workers_differed_and_absent_where_not() -> None:
    usage = UsageCount()
    usage.add(0, output({}))
    assert "numeric_drift" not in usage.as_json()
    usage.add(0, output({"kv_cache_dtype": ["int8", "bf16"]}, finished=True))
    usage.add(1, output({"kernels": ["amx", "avx2"]}, finished=True))
    assert usage.as_json()["numeric_drift"] == {"kv_cache_dtype": ["int8", "bf16"], "kernels": ["amx", "avx2"]}
