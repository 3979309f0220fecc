"""Metrics that scrapers, dashboards and gateways read are present under every requested name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from alone_metrics import AloneMetrics
from explain_loads import random_load
from twostroke.events import EngineStarted
from twostroke.metrics import reference
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.metrics.exposition import Compat, EngineCollector, exposition
from twostroke.metrics.families import FAMILIES, CountedBy, Kind

REPOSITORY = Path(__file__).parents[3]
OF_ENGINES = [family for family in FAMILIES if family.counted_by is CountedBy.ENGINE]

VLLMS_DASHBOARDS = [
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
]
"""The families that the dashboards shipped with vLLM query."""

SGLANGS_DASHBOARD = [
    "sglang:e2e_request_latency_seconds_bucket",
    "sglang:time_to_first_token_seconds_bucket",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
]


@pytest.fixture(scope="module")
def metrics() -> EngineMetrics:
    metrics = AloneMetrics("some model", engine="1")
    for event in random_load(3):
        metrics.observe(event)
    return metrics


def families(metrics: EngineMetrics, *compat: Compat) -> dict[str, Metric]:
    text = exposition(EngineCollector(metrics, compat=compat)).decode()
    found = list(text_string_to_metric_families(text))
    names = [family.name for family in found]
    assert len(names) == len(set(names)), "a family is described twice"
    return {family.name: family for family in found}


def sample_names(metrics: EngineMetrics, *compat: Compat) -> set[str]:
    return {sample.name for family in families(metrics, *compat).values() for sample in family.samples}


def test_only_our_names_unless_asked(metrics: EngineMetrics) -> None:
    assert {name.partition(":")[0] for name in families(metrics)} == {"twostroke"}
    assert len(families(metrics)) == len(OF_ENGINES)


@pytest.mark.parametrize("prefix", ["twostroke", "vllm"])
def test_what_vllms_dashboards_query_is_there(metrics: EngineMetrics, prefix: str) -> None:
    names = sample_names(metrics, Compat.VLLM)
    histograms = {family.name for family in FAMILIES if family.kind is Kind.HISTOGRAM}
    for name in VLLMS_DASHBOARDS:
        series = [f"{name}_bucket", f"{name}_sum", f"{name}_count"] if name in histograms else [name]
        for one in series:
            assert f"{prefix}:{one}" in names


def test_what_sglangs_dashboard_queries_is_there(metrics: EngineMetrics) -> None:
    names = sample_names(metrics, Compat.SGLANG)
    assert set(SGLANGS_DASHBOARD) <= names
    assert "sglang:num_requests_total" in names
    assert not any(name.startswith("vllm:") for name in names)


def test_other_names_have_the_same_numbers(metrics: EngineMetrics) -> None:
    found = families(metrics, *Compat)
    for family in OF_ENGINES:
        ours = found[f"twostroke:{family.name}"]
        others = [f"vllm:{family.name}"] * family.in_vllm + [f"sglang:{family.sglang}"] * (family.sglang is not None)
        for other in others:
            theirs = found[other]
            assert theirs.type == ours.type == family.kind
            assert [sample.value for sample in theirs.samples] == [sample.value for sample in ours.samples]
            assert all(dict(sample.labels).items() >= metrics.labels.items() for sample in theirs.samples)


def test_the_gateways_contract(metrics: EngineMetrics) -> None:
    """Queued, running, KV utilization as gauges from 0 to 1, and the blocks of the cache as labels."""
    found = families(metrics, Compat.VLLM)
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert found[f"vllm:{name}"].type == "gauge"
        assert len(found[f"vllm:{name}"].samples) == 1
    (info,) = found["vllm:cache_config_info"].samples
    assert info.value == 1
    assert info.labels["num_gpu_blocks"].isdigit()
    assert info.labels["block_size"].isdigit()


def test_the_cache_info_names_the_format_that_is_used(metrics: EngineMetrics) -> None:
    """The engine started with `kv_cache_dtype` "auto", which does not say what a block holds."""
    (started,) = [event for event in random_load(3) if isinstance(event, EngineStarted)]
    (info,) = families(metrics, Compat.VLLM)["vllm:cache_config_info"].samples
    assert started.cache["kv_cache_dtype"] == "auto"
    assert info.labels["cache_dtype"] == started.layout["kv_format"] == "f32"


def test_histograms_are_well_formed(metrics: EngineMetrics) -> None:
    for name, family in families(metrics).items():
        if family.type != "histogram":
            continue
        counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in family.samples if sample.name == f"{name}_count"]
        assert bounds == sorted(set(bounds)), name
        assert counts == sorted(counts), name
        assert (bounds[-1], counts[-1]) == (float("inf"), count)


def test_two_engines_share_families_and_differ_in_labels(metrics: EngineMetrics) -> None:
    other = AloneMetrics("some model", engine="2")
    text = exposition(EngineCollector(metrics, other)).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    running = found["twostroke:num_requests_running"].samples
    assert [sample.labels["engine"] for sample in running] == ["1", "2"]


def test_the_page_of_definitions_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert reference.markdown() in page, (
        "put the output of `python -m twostroke.metrics.reference` into docs/metrics.md"
    )


def test_every_definition_says_something() -> None:
    assert len({family.help for family in FAMILIES}) == len(FAMILIES)
    assert all(family.help.endswith(".") and "|" not in family.help for family in FAMILIES)


# ---------------------------------------------------------------------- the dashboard


def dashboard() -> dict[str, object]:
    return json.loads((REPOSITORY / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))


def expressions() -> list[str]:
    panels = dashboard()["panels"]
    assert isinstance(panels, list)
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_every_series_of_the_dashboard_is_exposed(metrics: EngineMetrics) -> None:
    names = sample_names(metrics)
    queried = {name for expression in expressions() for name in re.findall(r"twostroke:\w+", expression)}
    assert len(queried) > 15, "the dashboard shows little"
    assert queried <= names, f"not exposed: {queried - names}"


def test_every_label_of_the_dashboard_is_exposed(metrics: EngineMetrics) -> None:
    labels: dict[str, set[str]] = {}
    for family in families(metrics).values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in expressions():
        for name, selectors in re.findall(r"(twostroke:\w+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)=~?\"", selectors))
            assert used <= labels[name], f"{expression}: {used - labels[name]}"
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            used = {label.strip() for label in grouped.split(",")}
            known = set().union(*(labels[name] for name in re.findall(r"twostroke:\w+", expression)))
            assert used <= known, f"{expression}: {used - known}"


def test_panels_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert isinstance(panels, list)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & mine, f"{panel['title']} covers another panel"
        cells |= mine
