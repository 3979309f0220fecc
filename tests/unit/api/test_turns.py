"""Requests that arrive together are prepared one per turn of the event loop."""

from __future__ import annotations

import asyncio

from twostroke.api.gate import OnePerIteration


async def _passed(number: int, cancelled: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """Return (request, turn of the loop) for so many simultaneous requests; some are cancelled before their turn."""
    loop = asyncio.get_running_loop()
    turns, turn, passed = OnePerIteration(), 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def request(name: int) -> None:
        await turns.wait()
        passed.append((name, turn))

    count()
    tasks = [asyncio.create_task(request(name)) for name in range(number)]
    await asyncio.sleep(0)
    for name in cancelled:
        tasks[name].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    before = turn
    await request(-1)
    assert passed.pop() == (-1, before), "a single task does not wait"
    return passed


def test_one_passes_in_each_turn_in_the_order_in_which_they_came() -> None:
    passed = asyncio.run(_passed(9))
    assert [name for name, _ in passed] == list(range(9))
    turns = [turn for _, turn in passed]
    assert len(set(turns)) == len(turns)


def test_who_leaves_takes_no_turn() -> None:
    passed = asyncio.run(_passed(6, frozenset({2, 3, 5})))
    assert [name for name, _ in passed] == [0, 1, 4]
