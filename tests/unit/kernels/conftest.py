"""Operators are tested at every level of this processor; on two threads where sums could depend on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from twostroke.config.load import Kernels
from twostroke.kernels import native


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)


def set_num_threads(count: int) -> None:
    torch.set_num_threads(count)
    if native.is_built():
        native.operators().set_num_threads(count)
        torch.set_num_threads(count)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(one_thread: None, request: pytest.FixtureRequest) -> int:
    set_num_threads(request.param)
    return request.param


@pytest.fixture(params=["reference", *native.levels()])
def backend(request: pytest.FixtureRequest) -> Kernels:
    return request.param
