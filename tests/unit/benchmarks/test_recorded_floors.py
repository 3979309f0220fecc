"""No step of a recorded run is faster than the floor from the limits in the same record, before any is raised.

Every committed result that has limits is read, and every event log among the fixtures. Where a record does not say
which bytes a step reads, all weights and the prompt's KV count, which is more than it reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.engine.event_sinks import read_events
from twostroke.events import EngineStarted
from twostroke.planner.after_run import observed_step_costs

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
LOGS = sorted((ROOT / "tests/fixtures/event_logs").glob("*.jsonl"))

PASSED = {
    "compare-avx512-qwen3-int8: decode, batch 1": (
        "Limits were measured before and after the rounds, at 51 GB/s. In the second round the host gave this guest "
        "more of its memory's bandwidth, as in the comparisons of 07:58 and 08:00 on that day (74 and 76 GB/s). Since "
        "then limits are measured before every round, too."
    ),
    "compare-avx2-Qwen2.5-Coder-1.5B.Q4_K_M: prefill 256": (
        "One round of three reached 1.045 of the products' limit, which was measured beside other processes; the "
        "record calls it an estimate."
    ),
    "engine.jsonl: step 7": (
        "The limits were measured beside other processes, by torch's sum of one large piece of memory; the record "
        "calls them an estimate. Since then a model that fits into a cache is held against reads from there."
    ),
}
"""Steps that passed the limits of their records, with the reason; a new measurement removes its entry."""
MOST_PASSED = 3
"""May only become smaller."""
NO_STEP_BYTES = {"compare-gpt-oss-4l.MXFP4", "compare-qwen3-3b-a0.6b.Q4_K"}
"""Models with experts, of which a step reads some; these records do not say how many bytes."""


EMBEDDINGS = {
    "qwen3": 155.6e6,
    "qwen3-3b": 311.2e6,
    "Qwen2.5-Coder-1.5B": 466.7e6,
    "SmolLM2-135M": 28.3e6,
    "gemma-3-270m": 167.8e6,
    "gpt-oss-4l": 1158.3e6,
    "llama1b": 262.7e6,
}
"""Parameters of a model's embedding and LM head, by the longest fitting start of its name: a prompt's tokens are not
multiplied with them."""


class Recorded(NamedTuple):
    """One measured time, and its floor at the limits of its record."""

    what: str
    seconds: float
    floor_s: float


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} in {text}"
    return float(found[1].replace(",", ""))


def _of_comparison(name: str, record: dict[str, Any]) -> Iterator[Recorded]:
    results, config = record["results"], record["config"]
    limits, ours = results["limits"], results["engines"]["twostroke"]
    startup = ours["about"]["startup"]
    weight_bytes, kv_bytes = (_number(rf"([\d,]+) bytes {of}", startup) for of in ("of weights", "per token"))
    per_token = re.search(r"([\d,.]+) M for a token", startup)
    num_parameters = 1e6 * (
        _number(r"([\d,.]+) M parameters", startup) if per_token is None else _number("(.*)", per_token[1])
    )
    model = max((name for name in EMBEDDINGS if config["model"].startswith(name)), key=len)
    num_parameters -= EMBEDDINGS[model]
    most_operations = 1e9 * max(rate for rate_name, rate in limits.items() if rate_name.endswith("gflop_s"))
    for kind, figure in ours["figures"].items():
        rate = max(figure["tok_s"])
        if kind.startswith("prefill"):
            yield Recorded(kind, 1 / rate, 2 * num_parameters / most_operations)
        elif kind.startswith("decode") and name not in NO_STEP_BYTES:
            batch = int(kind.rsplit(" ", 1)[1])
            num_bytes = weight_bytes + batch * kv_bytes * config["prompt_length"]
            yield Recorded(kind, batch / rate, num_bytes / (1e9 * limits["read_gb_s"]))


def _of_sweep(_: str, record: dict[str, Any]) -> Iterator[Recorded]:
    results = record["results"]
    assert results["raised"] is None, "its floors are those of raised limits; unraised ones have to be computed"
    for part, time in (("ttft", "ttft_s"), ("tpot_by_context", "tpot_s"), ("by_batch", "tpot_s")):
        for place, point in enumerate(results[part]):
            yield Recorded(f"{part} {place}", point[time], point["floor_s"])


def _of_claims(_: str, record: dict[str, Any]) -> Iterator[Recorded]:
    claims = {claim["what"]: claim for claim in record["results"]["claims"]}
    raised = claims.get("bandwidth that steps show, over the measured", {"measured": 1.0})["measured"]
    for what, claim in claims.items():
        if what.endswith(", ms") or " ms" in what:
            yield Recorded(what, claim["measured"], claim["predicted"] * raised)
        if "share" in what and "floor" in what:
            yield Recorded(what, 1.0, claim["measured"] * raised)


def _of_kernels(_: str, record: dict[str, Any]) -> Iterator[Recorded]:
    for kernel in record["results"]["kernels"]:
        if kernel["share_of_limit"] is not None:
            what = " ".join(kernel[part] for part in ("operator", "kind", "backend", "shape"))
            yield Recorded(what, kernel["seconds"], kernel["seconds"] * kernel["share_of_limit"])


READERS: dict[str, Callable[[str, dict[str, Any]], Iterator[Recorded]]] = {
    "compare-": _of_comparison,
    "sweep-": _of_sweep,
    "r13": _of_claims,
    "card": _of_claims,
    "kernels-": _of_kernels,
}


def _has_limits(record: dict[str, Any]) -> bool:
    limits = record.get("results", {}).get("limits")
    return isinstance(limits, dict) and ("read_gb_s" in limits or "bytes_per_s" in limits)


def _recorded(path: Path) -> list[Recorded] | None:
    """Return the times of a result with limits; None for any other."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not _has_limits(record):
        return None
    reader = next((of for start, of in READERS.items() if path.stem.startswith(start)), None)
    assert reader is not None, f"{path.name} has limits: say in READERS where its times are"
    return list(reader(path.stem, record))


def _passed(times: list[Recorded]) -> list[str]:
    return [one.what for one in times if one.floor_s > one.seconds * (1 + 1e-9)]


def _steps_of_log(path: Path) -> list[Recorded]:
    """Return the steps of a log at the limits of its start; empty for a log without limits."""
    events = list(read_events(path))
    limits = next((event.machine for event in events if isinstance(event, EngineStarted)), None)
    steps = observed_step_costs(events)
    assert (limits is None) == (not steps)
    return [
        Recorded(f"step {place}", one.seconds, limits.floor_s(one.cost)) for place, one in enumerate(steps) if limits
    ]


def test_no_recorded_time_is_below_the_floor_of_its_record() -> None:
    recorded = {path.stem: times for path in RESULTS if (times := _recorded(path)) is not None}
    assert len(recorded) >= 20
    assert all(recorded.values()), "each has times"
    logs = {path.name: times for path in LOGS if (times := _steps_of_log(path))}
    assert len(logs) >= 3
    passed = {f"{name}: {what}" for name, times in (recorded | logs).items() for what in _passed(times)}
    assert passed == set(PASSED)
    assert len(PASSED) <= MOST_PASSED


def test_a_faster_step_is_found() -> None:
    """The check bites: the same records with limits of a third."""
    times = _recorded(ROOT / "benchmarks/results/compare-qwen3-bf16.json")
    assert times is not None
    assert _passed([one._replace(floor_s=3 * one.floor_s) for one in times])
