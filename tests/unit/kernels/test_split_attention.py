"""Few long requests are split over their context: other threads take some of the partitions, and no bit changes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_pool import Pool, Shape
from twostroke.config.kv_format import KVFormat
from twostroke.config.load import Kernels
from twostroke.kernels import native

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the native kernels alone have threads of their own")
LEVELS: list[Kernels] = list(native.levels())  # type: ignore[arg-type]


class Counting:
    """The kernels of a level; notes into how many tasks each attention was cut."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.num_tasks: list[int] = []

    def step_attention(self, *args: Any) -> Any:
        step = self._kernels.step_attention(*args)

        def attention(*layer: Any) -> int:
            self.num_tasks.append(step.attention(*layer))
            return self.num_tasks[-1]

        return SimpleNamespace(attention=attention)


@pytest.fixture
def set_num_threads() -> Iterator[Any]:
    set_threads = native.operators().set_num_threads
    yield set_threads
    set_threads(1)


def last_tokens(
    shape: Shape, requests: list[Tensor], num_own: int, *, has_context: bool = True
) -> tuple[list[Tensor], int]:
    """Return attention's results for the last tokens of some requests in one step, and the number of tasks.

    Without their context they read NaN: the number of tasks is the same, and the context takes the time.
    """
    pool = Pool(shape, requests)
    counting = Counting(pool.operator._kernels)  # type: ignore[attr-defined]
    pool.operator._kernels = counting  # type: ignore[attr-defined]
    if has_context:
        pool.step([(row, len(qkv) - num_own) for row, qkv in enumerate(requests)])
    else:
        pool.done = [len(qkv) - num_own for qkv in requests]
    pool.step([(row, num_own) for row in range(len(requests))])
    return [found[-num_own:] for found in pool.results()], counting.num_tasks[-1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv_format", ["f32", "int4"])
@pytest.mark.parametrize("window", [None, 1000])
def test_split_or_not_the_bits_are_the_same(
    level: Kernels, kv_format: KVFormat, window: int | None, set_num_threads: Any
) -> None:
    shape = Shape(4, 1, 24, 16, window, backend=level, kv_format=kv_format)
    long, others = shape.qkv(3000, seed=1), [shape.qkv(n, seed=n) for n in (9, 600, 1100)]
    set_num_threads(1)
    (alone,), num_tasks = last_tokens(shape, [long], 5)
    assert num_tasks == 1, "one KV head, and no other thread to share it with"
    for num_threads in (2, 3):
        set_num_threads(num_threads)
        (found,), num_tasks = last_tokens(shape, [long], 5)
        assert num_tasks == (6 if window is None else 3), "the partitions of 512 that are seen"
        assert torch.equal(found, alone)
        in_company, num_tasks = last_tokens(shape, [*others, long], 5)
        assert num_tasks > 4, "the long one is still more than its share"
        assert torch.equal(in_company[-1], alone)
    set_num_threads(2)
    _, num_tasks = last_tokens(shape, [long] * 8, 5, has_context=False)
    assert num_tasks == 8, "enough tasks for all threads without a split"
