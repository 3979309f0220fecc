"""Pools for the tests of hand-overs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lent_kv import PLAIN, Clock, Pools, pools
from twostroke.kv_cache.layout import KVLayout

MakePools = Callable[..., Pools]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_pools(transport: str, tmp_path: Path, clock: Clock) -> Iterator[MakePools]:
    made: list[Pools] = []

    def make(layout: KVLayout = PLAIN, **options: Any) -> Pools:
        made.append(pools(layout, tmp_path, transport, **{"clock": clock, **options}))
        return made[-1]

    yield make
    for each in made:
        each.lender.close()
