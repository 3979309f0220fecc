"""The machine's own limits: what it does at best, found without waiting for what it does at worst."""

from __future__ import annotations

import pytest
import torch

from twostroke.config.engine import EngineConfig
from twostroke.kernels import native, reference
from twostroke.kernels.dispatch import operators_for
from twostroke.runner import machine_limits
from twostroke.startup.preparation import prepare

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RATES = {torch.bfloat16: 6e8, torch.float16: 9e11, torch.float32: 8e10}


@pytest.mark.parametrize(
    ("dtype", "device", "best", "measured"),
    [
        # a processor without bfloat16: at its full size that product would take seconds
        (torch.bfloat16, CPU, 8e10, [(torch.bfloat16, 256), (torch.float32, 1024)]),
        (torch.float16, CPU, 9e11, [(torch.float16, 256), (torch.float16, 1024), (torch.float32, 1024)]),
        (torch.float32, CPU, 8e10, [(torch.float32, 256), (torch.float32, 1024)]),
        (torch.float16, CUDA, 9e11, [(torch.float16, 4096)]),
    ],
)
def test_the_best_of_a_type_and_what_kernels_widen_it_to(
    dtype: torch.dtype,
    device: torch.device,
    best: float,
    measured: list[tuple[torch.dtype, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[torch.dtype, int]] = []

    def rate(dtype: torch.dtype, device: torch.device, side: int) -> float:
        asked.append((dtype, side))
        return RATES[dtype] / (1 if side >= 1024 else 2)

    monkeypatch.setattr(machine_limits, "_matrix_rate", rate)
    assert machine_limits.best_matrix_rate(dtype, device) == best
    assert asked == measured


def test_it_is_measured_on_as_many_threads_as_are_said_and_leaves_their_number_alone() -> None:
    before = torch.get_num_threads()
    limits = machine_limits.measure_machine_limits(torch.float32, CPU, before + 1)
    assert limits.flops_per_s > 0
    assert limits.bytes_per_s > 0
    assert torch.get_num_threads() == before


def test_products_of_eight_bits_are_the_limit_of_quantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own products count, and a faster product of floats does, too."""
    monkeypatch.setattr(machine_limits, "_measured", {})
    monkeypatch.setattr(machine_limits, "_STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "best_matrix_rate", lambda *_: 2e9)
    for rate, best in ((5e9, 5e9), (1e9, 2e9)):
        monkeypatch.setattr(machine_limits, "_measured", {})
        monkeypatch.setattr(machine_limits, "int8_rate", lambda *_, rate=rate: rate)
        operators = reference.operators()
        assert machine_limits.measure_machine_limits(torch.bfloat16, CPU, 1, operators).flops_per_s == best
        assert machine_limits.measure_machine_limits(torch.bfloat16, CPU, 1).flops_per_s == 2e9


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
