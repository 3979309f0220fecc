"""Detection of other work from given processor times, and its effect on a measurement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twostroke.cost.step_cost import MachineLimits
from twostroke.runner.contention import ContentionReading, Meter, one_at_a_time
from twostroke.runner.machine_limits import best_of_series


def meter_of(*readings: ContentionReading, num_threads: int = 2) -> Meter:
    given = iter(readings)
    return Meter(num_threads, lambda: next(given), num_processors=2, num_usable=2)


def after(own_s: float, busy_s: float | None, wall_s: float = 1.0) -> ContentionReading:
    return ContentionReading(100 + wall_s, 50 + own_s, None if busy_s is None else 500 + busy_s)


@pytest.mark.parametrize(
    ("end", "is_contended"),
    [
        (after(2.0, 2.0), False),
        (after(1.9, 2.0), False),  # others took a twentieth of the processors
        (after(1.2, 2.0), True),  # two threads got the time of one and a fifth
        (after(1.8, 2.3), True),  # we had our processors, but shared the memory
        (after(1.2, None), True),  # a system that does not report others
        (after(2.0, None), False),
        (after(0.0, 0.0, wall_s=0.0), False),
    ],
)
def test_others_show_in_processor_times(end: ContentionReading, is_contended: bool) -> None:
    meter = meter_of(ContentionReading(100.0, 50.0, 500.0), end)
    meter.begin()
    assert meter.is_contended() is is_contended


def test_more_threads_than_processors_are_no_contention() -> None:
    meter = meter_of(ContentionReading(100.0, 50.0, 500.0), after(2.0, 2.0), num_threads=64)
    meter.begin()
    assert not meter.is_contended()


class Contended:
    """Meter that knows which series were contended."""

    def __init__(self, *series: bool) -> None:
        self.series = iter(series)

    def begin(self) -> None:
        pass

    def is_contended(self) -> bool:
        return next(self.series)


def measured(*series: MachineLimits) -> Callable[[], MachineLimits]:
    given = iter(series)
    return lambda: next(given)


def seconds(*values: float) -> Callable[[], float]:
    given: Iterator[float] = iter(values)
    return lambda: next(given)


SLOW, FAST = MachineLimits(1e9, 2e9), MachineLimits(4e9, 1e9)


def test_one_series_does_where_nobody_else_is_at_work() -> None:
    assert best_of_series(measured(SLOW), Contended(False), seconds(0.0)) == SLOW


def test_the_best_of_several_counts_while_others_are_at_work() -> None:
    found = best_of_series(measured(SLOW, FAST), Contended(True, False), seconds(0.0, 0.1))
    assert found == MachineLimits(4e9, 2e9, is_estimate=False)


def test_it_is_called_an_estimate_where_others_never_paused() -> None:
    found = best_of_series(measured(SLOW, FAST, SLOW), Contended(True, True, True), seconds(0.0, 0.1, 0.2, 0.3))
    assert found == MachineLimits(4e9, 2e9, is_estimate=True)


def test_a_start_does_not_wait_for_others_for_long() -> None:
    found = best_of_series(measured(SLOW), Contended(True), seconds(0.0, 2.0))
    assert found == MachineLimits(1e9, 2e9, is_estimate=True)


def test_workers_do_not_measure_at_the_same_time(tmp_path: Path) -> None:
    """The second one begins after the first has ended."""
    log: list[str] = []
    is_there = threading.Event()

    def measure() -> None:
        is_there.set()
        with one_at_a_time(tmp_path):
            log.append("second begins")

    with one_at_a_time(tmp_path):
        worker = threading.Thread(target=measure)
        worker.start()
        assert is_there.wait(10)
        log.append("first ends")
    worker.join(10)
    assert log == ["first ends", "second begins"]


def test_a_folder_that_cannot_be_written_keeps_nobody_waiting(tmp_path: Path) -> None:
    with one_at_a_time(tmp_path / "nowhere"):
        pass


def test_a_process_that_never_ends_its_measurement_keeps_nobody_from_starting(tmp_path: Path) -> None:
    with one_at_a_time(tmp_path), one_at_a_time(tmp_path, patience_s=0.05):
        pass
