"""`bench sweep`: the fit on made-up times, and the sweep itself on a tiny model. Times are never judged."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.claim import ReproduceOptions
from benchmarks.reproduce.run import reproduce
from gguf_files import fixture
from twostroke.config.load import LoadConfig
from twostroke.cost.step_cost import MachineLimits, StepCost
from twostroke.errors import InvalidParameter
from twostroke.kernels import native
from twostroke.measure import limits
from twostroke.measure.sweep import run as sweep_run
from twostroke.measure.sweep.points import DecodePoint, PrefillPoint, fit_quadratic
from twostroke.measure.sweep.run import Sweep, SweepOptions, print_sweep, run_sweep

LENGTHS = (16, 64, 256, 1024, 4096)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "_SIDES", (64,))


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    fit = fit_quadratic(LENGTHS, [3e-3 + 1e-3 * n + 2e-8 * n * n for n in LENGTHS])
    assert (fit.a, fit.b, fit.c) == pytest.approx((3e-3, 1e-3, 2e-8))
    assert fit.r_squared == pytest.approx(1.0)
    assert max(map(abs, fit.residuals)) < 1e-9
    assert fit.at(2000) == pytest.approx(3e-3 + 2.0 + 0.08)


def test_noise_shows_in_residuals_and_r_squared() -> None:
    noise = np.random.default_rng(0).normal(0, 0.3, len(LENGTHS))
    values = [1e-3 * n + float(extra) for n, extra in zip(LENGTHS, noise, strict=True)]
    fit = fit_quadratic(LENGTHS, values)
    assert 0.9 < fit.r_squared < 0.9999
    assert [fit.at(n) + r for n, r in zip(LENGTHS, fit.residuals, strict=True)] == pytest.approx(values)
    # least squares: no other curve nearby is better
    squares = sum(r * r for r in fit.residuals)
    for a, b in ((1e-2, 0), (-1e-2, 0), (0, 1e-5), (0, -1e-5)):
        assert sum((v - fit.at(n) - a - b * n) ** 2 for n, v in zip(LENGTHS, values, strict=True)) > squares


def test_two_lengths_determine_no_curve() -> None:
    with pytest.raises(InvalidParameter, match="three"):
        fit_quadratic([1, 2, 2], [1.0, 2.0, 3.0])


def test_the_floor_is_the_longer_of_arithmetic_and_memory() -> None:
    cost = StepCost(1000.0, 300.0, 150.0, 50.0, 2.0, "compute", 0.0)
    assert MachineLimits(100.0, 100.0).floor_s(cost) == 10.0
    assert MachineLimits(1000.0, 100.0).floor_s(cost) == 5.0


def test_limits_that_points_pass_are_raised_to_them() -> None:
    cost = StepCost(1000.0, 300.0, 150.0, 50.0, 2.0, "compute", 10.0)
    prompts = tuple(PrefillPoint(n, seconds, (cost, cost)) for n, seconds in ((1, 5.0), (2, 30.0), (3, 40.0)))
    points = (DecodePoint(1, 8, 4.0, cost), DecodePoint(1, 16, 90.0, cost))
    sweep = Sweep(prompts, fit_quadratic([1, 2, 3], [5.0, 30.0, 40.0]), points, points)
    measured = MachineLimits(100.0, 100.0)
    raised = sweep.raised(measured)
    told = sweep.as_json(raised)
    shares = [point["share_of_floor"] for name in ("ttft", "tpot_by_context", "by_batch") for point in told[name]]
    assert max(shares) == pytest.approx(1.0)
    assert max(share for share in shares) <= 1 + 1e-12
    assert raised.flops_per_s > measured.flops_per_s
    assert sweep.raised(raised) == raised, "once is enough"
    fast_enough = MachineLimits(1e6, 1e6)
    assert sweep.raised(fast_enough) is fast_enough


def test_a_sweep_saves_every_point_beside_its_floor(
    random_models: dict[str, Path], tmp_path: Path, small_limits: None
) -> None:
    options = SweepOptions(
        prompt_lengths="4,8,16,600",
        contexts="8,500",
        batch_sizes="1,3",
        batch_context=8,
        steps=4,
        price_per_hour=7.2,
        results=tmp_path,
    )
    result = run_sweep(options, LoadConfig(model=str(random_models["llama"]), threads=1))
    (path,) = tmp_path.glob("sweep-*.json")
    text = path.read_text()
    found = json.loads(text)["results"]
    assert [point["prompt_length"] for point in found["ttft"]] == [4, 8, 16, 600]
    assert [(point["context"], point["num_requests"]) for point in found["tpot_by_context"]] == [(8, 1), (500, 1)]
    assert [point["num_requests"] for point in found["by_batch"]] == [1, 3]
    # what a step costs grows with what it sees, and a prompt beyond the budget costs two steps
    floors = [point["floor_s"] for point in (*found["tpot_by_context"], *found["ttft"])]
    assert floors[0] < floors[1]
    assert floors[2] < floors[3] < floors[4] < floors[5]
    for point in (*found["ttft"], *found["tpot_by_context"], *found["by_batch"]):
        assert point["share_of_floor"] == pytest.approx(point["floor_s"] / point.get("ttft_s", point.get("tpot_s")))
    fit = found["fit"]
    assert len(fit["residuals"]) == 4
    assert set(found["device_seconds_per_1k_tokens"]) == {"input", "output_alone", "output_in_the_largest_batch"}
    for name, seconds in found["device_seconds_per_1k_tokens"].items():
        assert found["cost_per_million_tokens"][name] == pytest.approx(7.2 / 3600 * seconds * 1000)
    assert str(tmp_path) not in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=200, file=io.StringIO())
    print_sweep(result.results, console)
    decodes = (fit["a"] + 1000 * fit["b"] + 1e6 * fit["c"]) / found["by_batch"][0]["tpot_s"]
    assert f"a prompt of 1,000 tokens takes as long as {decodes:,.3g} decode steps of one request" in (
        console.export_text()
    )


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"prompt_lengths": "1,2"}, "prompt_lengths"),
        ({"prompt_lengths": "1,2,x"}, "prompt_lengths"),
        ({"contexts": "0"}, "contexts"),
        ({"batch_sizes": ""}, "batch_sizes"),
        ({"steps": 0}, "steps"),
        ({"price_per_hour": -1.0}, "price_per_hour"),
        ({"name": "../x"}, "name"),
    ],
    ids=str,
)
def test_sweeps_over_nothing_are_refused(bad: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        SweepOptions(**bad)
    assert refusal.value.name == name


def test_a_length_beyond_the_context_is_refused(
    random_models: dict[str, Path], tmp_path: Path, small_limits: None
) -> None:
    options = SweepOptions(prompt_lengths="4,8,640", contexts="8", results=tmp_path, plots=False)
    with pytest.raises(InvalidParameter, match="641 tokens"):
        run_sweep(options, LoadConfig(model=str(random_models["llama"]), threads=1))


def test_r13_reports_a_small_model_and_claims_nothing(
    random_models: dict[str, Path], tmp_path: Path, small_limits: None
) -> None:
    options = ReproduceOptions(model=str(random_models["llama"]), threads=1, results=tmp_path)
    (found,) = reproduce(["r13"], options, Console(quiet=True))
    assert len(found.claims) == 7
    assert all(claim.holds is None for claim in found.claims)
    assert found.remarks


def test_a_gguf_file_is_swept_at_the_rate_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = limits.MachineRates(1e15, {"float32": 1e15, "bfloat16": 2e15, "int8": 4e15})  # no step passes these
    monkeypatch.setattr(sweep_run, "measure_limits", lambda *_: known)
    model = fixture("llama-q4_0")
    options = SweepOptions(
        prompt_lengths="4,8,16", contexts="8", batch_sizes="1", batch_context=8, steps=4, results=tmp_path, plots=False
    )
    found = run_sweep(options, LoadConfig(model=str(model), threads=1)).results
    assert found["machine"]["flops_per_s"] == (4e15 if native.is_built() else 2e15)  # torch multiplies their values
    saved = (tmp_path / "sweep-llama-q4_0.gguf.json").read_text()
    assert json.loads(saved)["config"]["load"]["model"] == model.name
    assert str(model) not in saved
