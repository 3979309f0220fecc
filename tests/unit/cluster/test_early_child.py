"""A process that starts before it is known what for: taken once, by who wants that command, or ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.cluster import child as early_child
from twostroke.cluster.child import drop_early, start_early, take_early

SLEEPS = (sys.executable, "-c", "import sys; sys.stdin.read()")
ENDS = (sys.executable, "-c", "raise SystemExit(3)")


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    drop_early()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_is_taken_once() -> None:
    async def take() -> None:
        start_early(SLEEPS)
        start_early(SLEEPS)  # one is enough
        child = take_early(SLEEPS)
        assert child is not None
        assert take_early(SLEEPS) is None
        assert child.folder.is_dir()
        assert child.folder.stat().st_mode & 0o077 == 0
        assert is_running(child.pid)
        child.kill()
        assert await child.ending() == "was ended by signal 9"
        child.kill()  # of one that has ended: nothing
        child.forget()
        assert not child.folder.exists()

    asyncio.run(take())


def test_its_end_is_told() -> None:
    async def take() -> str:
        start_early(ENDS)
        child = take_early(ENDS)
        assert child is not None
        try:
            return await child.ending()
        finally:
            child.forget()

    assert asyncio.run(take()) == "exited with code 3"


def test_another_command_gets_none() -> None:
    async def take() -> None:
        assert take_early(ENDS) is None

    start_early(SLEEPS)
    asyncio.run(take())


def test_one_that_nobody_wants_is_ended() -> None:
    start_early(SLEEPS)
    child = early_child.waiting[0]
    drop_early()
    assert not is_running(child.pid)
    assert not child.folder.exists()
    drop_early()


def test_a_command_that_cannot_be_started_is_left_to_who_needs_it() -> None:
    async def take() -> None:
        assert take_early(("/no/such/program",)) is None

    start_early(("/no/such/program",))
    asyncio.run(take())
