"""The machine's own limits: what it does at best, found without waiting for what it does at worst."""

from __future__ import annotations

import pytest
import torch

from twostroke.runner import machine_limits

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
