"""A sweep for people: tables of the points beside their floors, and three plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from twostroke.measure.figure import MEASURED, PREDICTED
from twostroke.measure.limits import words_of_limits
from twostroke.tables import print_table


def print_sweep(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Every point, the fit, and what follows from them."""
    console = console or Console()
    print_table(
        _table(
            "TTFT",
            {"prompt": "prompt_length", "ms": "ttft_s", "fitted": "fitted_s", "tok/s": "tok_s", "floor": "floor_s"},
            results["ttft"],
        ),
        console,
    )
    fit = results["fit"]
    console.print(
        f"TTFT(n) = {1e3 * fit['a']:.3g} ms + {1e6 * fit['b']:.3g} us n + {1e9 * fit['c']:.3g} ns n^2, "
        f"R^2 = {fit['r_squared']:.5f}\n",
        highlight=False,
    )
    columns = {"tok/s": "tok_s", "floor": "floor_s"}
    print_table(
        _table("TPOT over context", {"context": "context", "ms": "tpot_s"} | columns, results["tpot_by_context"]),
        console,
    )
    print_table(_table("Batch", {"requests": "num_requests", "ms": "tpot_s"} | columns, results["by_batch"]), console)
    for title, name in (
        ("prefill / decode, tokens per second", "prefill_to_decode"),
        ("device-seconds per 1,000 tokens", "device_seconds_per_1k_tokens"),
        ("cost of a million tokens", "cost_per_million_tokens"),
    ):
        if results[name] is None:
            continue
        parts = ", ".join(f"{key.replace('_', ' ')} {value:,.4g}" for key, value in results[name].items())
        console.print(f"{title}: {parts}", highlight=False)
    console.print(
        f"a prompt of 1,000 tokens takes as long as {decodes_of_a_thousand(results):,.3g} decode steps of one request",
        highlight=False,
    )
    console.print(words_of_limits(results["limits"]), highlight=False)
    raised = results.get("raised")
    if raised:
        rates = f"{raised['flops_per_s'] / 1e9:,.4g} GFLOP/s, {raised['bytes_per_s'] / 1e9:,.4g} GB/s"
        console.print(f"points were faster than these allow; floors are at what was seen: {rates}", highlight=False)


def _table(title: str, columns: Mapping[str, str], points: Sequence[Mapping[str, float]]) -> Table:
    rows = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in (*columns, "of floor"):
        rows.add_column(name, justify="right")
    for point in points:
        # seconds are shown as milliseconds
        values = (1e3 * point[key] if key.endswith("_s") and key != "tok_s" else point[key] for key in columns.values())
        rows.add_row(*(f"{value:,.4g}" for value in values), f"{point['share_of_floor']:.0%}")
    return rows


def draw(figure: Any, results: Mapping[str, Any]) -> None:
    """TTFT with its fit, TPOT over context and throughput over batch size, each beside its floor."""
    ttft, tpot, batch = figure.subplots(1, 3)
    fit = results["fit"]
    lengths = [point["prompt_length"] for point in results["ttft"]]
    smooth = np.linspace(0, lengths[-1], 100)
    _dots(ttft, lengths, [1e3 * point["ttft_s"] for point in results["ttft"]])
    curve = 1e3 * (fit["a"] + fit["b"] * smooth + fit["c"] * smooth**2)
    ttft.plot(smooth, curve, color=MEASURED, linewidth=1, label=f"fit, R² = {fit['r_squared']:.4f}")
    _floor(ttft, lengths, [1e3 * point["floor_s"] for point in results["ttft"]])
    contexts = [point["context"] for point in results["tpot_by_context"]]
    _dots(tpot, contexts, [1e3 * point["tpot_s"] for point in results["tpot_by_context"]])
    _floor(tpot, contexts, [1e3 * point["floor_s"] for point in results["tpot_by_context"]])
    tpot.set_ylim(bottom=0)
    sizes = [point["num_requests"] for point in results["by_batch"]]
    _dots(batch, sizes, [point["tok_s"] for point in results["by_batch"]])
    _floor(batch, sizes, [point["num_requests"] / point["floor_s"] for point in results["by_batch"]])
    labels = (("prompt tokens", "TTFT, ms"), ("context", "TPOT, ms"), ("requests at once", "output tokens per second"))
    for axes, (x, y) in zip((ttft, tpot, batch), labels, strict=True):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def _dots(axes: Any, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(x, y, "o", color=MEASURED, label="measured")


def _floor(axes: Any, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(x, y, "--", color=PREDICTED, label="limit of this machine")


def decodes_of_a_thousand(results: Mapping[str, Any]) -> float:
    """Return how many decode steps of one request take as long as a prompt of 1,000 tokens, by the fitted curve."""
    fit = results["fit"]
    prompt_s = fit["a"] + 1e3 * fit["b"] + 1e6 * fit["c"]
    return prompt_s / (results["device_seconds_per_1k_tokens"]["output_alone"] / 1000)
