"""Every figure of the live view beside `/metrics` and the timelines of the same run: tiles, percentiles, columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import expect
from prometheus_client.parser import text_string_to_metric_families

from browsing import chromium, opened
from server_process import ServerProcess

PROMPT = "def area(width, height):\n    return width * height\n"


def test_tiles_percentiles_and_columns_are_those_of_metrics_and_timelines(
    find_program: Callable[[str, str], str],
) -> None:
    """With preemptions and prefix hits; idle, so that nothing changes between two looks."""
    server = ServerProcess("--max-num-seqs", "4", "--max-model-len", "256", num_kv_blocks=18)
    bodies = [{"prompt": PROMPT * (1 + i % 3), "max_tokens": 80, "seed": i, "ignore_eos": True} for i in range(16)]
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{server.url}/#live") as (page, complaints),
    ):
        with ThreadPoolExecutor(6) as clients:
            assert {r.status_code for r in clients.map(lambda body: server.post("/v1/completions", body), bodies)} == {
                200
            }
        server.wait_until_idle()
        metrics = values_of(server.http.get("/metrics").text)
        assert metrics["num_preemptions_total"] > 0
        assert metrics["prefix_cache_hits_total"] > 0
        tiles = {
            "running": f"{metrics['num_requests_running']:.0f}",
            "waiting": f"{metrics['num_requests_waiting']:.0f}",
            "preempted": f"0 / {metrics['num_preemptions_total']:.0f}",
            "kv": f"{100 * metrics['kv_cache_usage_perc']:.0f} %",
            "hits": share(metrics["prefix_cache_hits_total"] / metrics["prefix_cache_queries_total"]),
            "decode": "0 tok/s",  # rates are of the last second
        }
        for name, text in tiles.items():
            expect(page.locator(f"#tile-{name}")).to_have_text(text)
        for kind, family in (
            ("ttft", "time_to_first_token_seconds"),
            ("tpot", "request_time_per_output_token_seconds"),
            ("itl", "inter_token_latency_seconds"),
        ):
            told = page.locator(f"#told-{kind}").inner_text()
            shown = [float(found) for found in re.findall(r"p\d+ ([\d.]+) ms", told)]
            expected = [1e3 * quantile(metrics[f"{family}_bucket"], of_all) for of_all in (0.5, 0.9, 0.99)]
            assert shown == pytest.approx(expected, rel=0.01), told
            assert f"{metrics[f'{family}_count']:,.0f} values" in told
        rows = server.http.get("/live/state").json()
        names = rows["fields"]["request"]
        requests = [dict(zip(names, row, strict=True)) for row in rows["engines"]["engine"]["requests"]]
        assert len(requests) == len(bodies)
        for request in requests:
            name = request["id"].partition("#")[0]
            (lane,) = server.http.get(f"/v1/requests/{name}/timeline").json()["lanes"]
            cells = page.locator("#requests tbody tr", has=page.locator(f"button[title='{request['id']}']")).locator(
                "td"
            )
            texts = dict(zip(headings(page), cells.all_inner_texts(), strict=False))
            assert int(texts["Cached"]) == lane["num_cached_tokens"]
            assert int(texts["Prompt tokens"]) == lane["num_prompt_tokens"]
            assert texts["Output tokens"] == f"{lane['num_output_tokens']} of 80"
            assert float(texts["TTFT"].split()[0]) == pytest.approx(lane["ttft_ms"], rel=0.01)
            assert texts["Preemptions"] == (f"{lane['num_preemptions']}" if lane["num_preemptions"] else "\N{EN DASH}")
        assert not complaints
    server.stop()


def headings(page: Any) -> list[str]:
    return page.locator("#requests thead th").all_inner_texts()


def share(value: float) -> str:
    return f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def values_of(text: str) -> dict[str, Any]:
    """Return samples by name; of histograms the buckets, as (upper bound, cumulative count)."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("twostroke:")
            if name.endswith("_bucket"):
                found.setdefault(name, []).append((float(sample.labels["le"]), sample.value))
            else:
                found[name] = sample.value
    return found


def quantile(buckets: list[tuple[float, float]], of_all: float) -> float:
    """Return a percentile, interpolated within its bucket."""
    rank = of_all * buckets[-1][1]
    for (low, before), (high, up_to) in itertools.pairwise([(0.0, 0.0), *buckets]):
        if up_to >= rank:
            return low + (high - low) * (rank - before) / (up_to - before)
    raise AssertionError(f"{of_all} of {buckets}")
