"""The machine's own limits: what it does at best, found without waiting for what it does at worst."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from twostroke.config.engine import EngineConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.kernels import native, reference
from twostroke.kernels.dispatch import operators_for
from twostroke.runner import machine_limits
from twostroke.startup.preparation import prepare

CPU = torch.device("cpu")
READ = operators_for(CPU, torch.bfloat16).read_stream


def test_a_type_that_is_slow_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without bfloat16: a large product would take seconds, and float32, which kernels widen to, counts."""
    timed: list[tuple[str, float]] = []
    probe = machine_limits.MachineProbe(torch.bfloat16, CPU)
    kinds = {product.work: product for product in probe._products}

    def best_of(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
        product = kinds.get(cast(Any, work))
        if product is None:
            return 1e-3
        timed.append((product.kind, product.operations))
        return product.operations / (1e11 if product.kind == "torch.float32" else 1e9)

    monkeypatch.setattr(machine_limits, "_best_of", best_of)
    assert [probe.measure().flops_per_s for _ in range(3)] == [1e11] * 3
    assert [kind for kind, _ in timed] == ["torch.float32", "torch.bfloat16", *["torch.float32"] * 2]
    assert timed[1][1] == 2 * 256**3, "the small product"


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.bfloat16, ["torch.float32 1024", "torch.bfloat16 256", "torch.bfloat16 1024", "int8 1024"]),
        (torch.float32, ["torch.float32 1024", "torch.float32 256", "int8 1024"]),
    ],
)
def test_what_is_multiplied(dtype: torch.dtype, kinds: list[str]) -> None:
    """The model's own type, what kernels widen it to, and the backend's products of 8 bits."""
    products = machine_limits.products_of(dtype, CPU, reference.operators())
    assert [f"{one.kind} {round((one.operations / 2) ** (1 / 3))}" for one in products] == kinds
    assert len(machine_limits.products_of(dtype, CPU, None)) == len(kinds) - 1


def test_it_is_measured_on_as_many_threads_as_are_said_and_leaves_their_number_alone() -> None:
    before = torch.get_num_threads()
    limits = machine_limits.measure_machine_limits(torch.float32, CPU, before + 1)
    assert limits.flops_per_s > 0
    assert limits.bytes_per_s > 0
    assert torch.get_num_threads() == before


def test_the_backends_own_reading_counts_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that the kernels pass is none."""
    seconds = {"torch": 0.2}
    probe = machine_limits.MachineProbe(torch.float32, CPU, read=lambda piece: None)

    def best_of(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
        return seconds.get("torch" if hasattr(work, "__self__") else "native", 1.0)

    monkeypatch.setattr(machine_limits, "_best_of", best_of)
    for native_s, least_s in ((0.1, 0.1), (0.4, 0.2)):
        seconds["native"] = native_s
        assert probe.measure().bytes_per_s == pytest.approx([(1 << size) / least_s for size in (27, 25, 23, 21)])


@pytest.mark.skipif(READ is None, reason="the native kernels were not built")
def test_the_native_reading_reads_every_byte() -> None:
    assert READ is not None
    words = torch.arange(3 * 65536 // 8 + 8, dtype=torch.int64)
    assert READ(words) == int(words.sum())


@pytest.mark.parametrize(
    ("step_bytes", "rate"),
    [(None, 1.0), (1e12, 1.0), (1 << 27, 1.0), ((1 << 27) - 1, 2.0), (1 << 24, 3.0), (1 << 22, 4.0), (1000, 4.0)],
)
def test_a_model_that_fits_into_a_cache_is_read_from_there(
    step_bytes: float | None, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = machine_limits.MachineSeries(5.0, (1.0, 2.0, 3.0, 4.0))
    monkeypatch.setattr(machine_limits, "_measured", {(torch.float32, CPU, 1, None, False): (series, False)})
    limits = machine_limits.measure_machine_limits(torch.float32, CPU, 1, step_bytes=step_bytes)
    assert limits == MachineLimits(5.0, rate)


@pytest.mark.parametrize(
    ("given", "is_int8"),
    [
        ({}, False),
        ({"quantization": "int8"}, True),
        ({"quantization": "int4"}, True),
        ({"quantization": "int8", "activation_quantization": "none"}, False),
        ({"quantization": "int8", "kernels": "reference"}, False),
    ],
    ids=str,
)
def test_who_multiplies_eight_bits(given: dict[str, str], is_int8: bool) -> None:
    if not native.is_built():
        pytest.skip("torch's operators multiply floats")
    config = EngineConfig.from_keywords(model="embedded", threads=1, **given)
    assert (prepare(config).int8_operators is not None) is is_int8


def test_the_backends_own_product_is_timed() -> None:
    assert machine_limits.int8_rate(operators_for(CPU, torch.bfloat16), torch.bfloat16, CPU, side=64) > 0
