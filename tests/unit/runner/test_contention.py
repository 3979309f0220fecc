"""Detection of other work from given processor times, and its effect on a measurement."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from twostroke.runner.contention import ContentionMeter, ContentionReading, measurement_lock
from twostroke.runner.machine_limits import MachineSeries, best_of_series


def meter_of(*readings: ContentionReading, num_threads: int = 2) -> ContentionMeter:
    given = iter(readings)
    return ContentionMeter(num_threads, lambda: next(given), num_processors=2, num_usable=2)


def after(own_s: float, busy_s: float | None, wall_s: float = 1.0) -> ContentionReading:
    return ContentionReading(100 + wall_s, 50 + own_s, None if busy_s is None else 500 + busy_s)


@pytest.mark.parametrize(
    ("end", "is_contended"),
    [
        (after(2.0, 2.0), False),
        (after(1.9, 2.0), False),  # other processes took a twentieth of the processors
        (after(1.2, 2.0), True),  # two threads got the time of one and a fifth
        (after(1.8, 2.3), True),  # we had our processors, but shared the memory
        (after(1.2, None), True),  # a system that does not report other processes
        (after(2.0, None), False),
        (after(0.0, 0.0, wall_s=0.0), False),
    ],
)
def test_others_show_in_processor_times(end: ContentionReading, is_contended: bool) -> None:
    meter = meter_of(ContentionReading(100.0, 50.0, 500.0), end)
    assert meter.was_contended(meter.read(), meter.read()) is is_contended


def test_more_threads_than_processors_are_no_contention() -> None:
    meter = meter_of(ContentionReading(100.0, 50.0, 500.0), after(2.0, 2.0), num_threads=64)
    assert not meter.was_contended(meter.read(), meter.read())


def test_one_busy_core_is_contention_on_a_large_machine() -> None:
    """It can take half of the memory's bandwidth."""
    begin = ContentionReading(100.0, 50.0, 500.0)
    for others_s, is_contended in ((0.4, False), (0.9, True)):
        meter = ContentionMeter(2, num_processors=64, num_usable=64)
        assert meter.was_contended(begin, after(2.0, 2.0 + others_s)) is is_contended


class Series:
    """Series of measurements on a clock of their own, with the moments at which others were at work.

    Args:
        series: rates in order; the last one is repeated.
        seconds_each: seconds that each takes.
        others: periods in which other processes were at work, in seconds from the start.
    """

    def __init__(
        self, *series: MachineSeries, seconds_each: float = 0.1, others: tuple[tuple[float, float], ...] = ()
    ) -> None:
        self.series, self.seconds_each, self.others, self.num_measured = series, seconds_each, others, 0

    def measure(self) -> MachineSeries:
        self.num_measured += 1
        return self.series[min(self.num_measured, len(self.series)) - 1]

    def read(self) -> ContentionReading:
        return ContentionReading(self.num_measured * self.seconds_each, 0.0, None)

    def was_contended(self, before: ContentionReading, after: ContentionReading) -> bool:
        return any(begin < after.wall_s and end > before.wall_s for begin, end in self.others)

    def best(self) -> tuple[MachineSeries, bool]:
        return best_of_series(self.measure, self)


FULL, SLOW_READS, SLOW_PRODUCTS = MachineSeries(4e9, (2e9,)), MachineSeries(4e9, (1e9,)), MachineSeries(1e9, (2e9,))


def test_three_series_that_agree_count_as_quiet() -> None:
    measured = Series(FULL)
    assert measured.best() == (FULL, False)
    assert measured.num_measured == 3


def test_short_series_are_repeated_for_a_while() -> None:
    """Others that pause for a moment come back within it."""
    measured = Series(FULL, seconds_each=0.02)
    assert measured.best() == (FULL, False)
    assert measured.num_measured == 10


@pytest.mark.parametrize("slow", [SLOW_READS, SLOW_PRODUCTS])
def test_one_slow_series_does_not_count(slow: MachineSeries) -> None:
    assert Series(slow, FULL).best() == (FULL, False)


@pytest.mark.parametrize("slow", [SLOW_READS, SLOW_PRODUCTS])
def test_rates_that_do_not_agree_are_measured_again(slow: MachineSeries) -> None:
    """Others who keep memory busy on processors of their own show in the rates alone."""
    measured = Series(slow, FULL, slow, FULL, FULL)
    assert measured.best() == (FULL, False)
    assert measured.num_measured == 4, "two of the last three reach the best"


@pytest.mark.parametrize("slow", [SLOW_READS, SLOW_PRODUCTS])
def test_the_best_is_an_estimate_where_most_stay_below_it(slow: MachineSeries) -> None:
    measured = Series(slow, slow, FULL, slow, seconds_each=0.125)
    assert measured.best() == (FULL, True)
    assert measured.num_measured == 6, "after 0.7 seconds"


def test_series_after_others_have_paused_count() -> None:
    measured = Series(SLOW_READS, SLOW_READS, FULL, others=((0.0, 0.2),))
    assert measured.best() == (FULL, False)
    assert measured.num_measured == 5


def test_it_is_called_an_estimate_where_others_never_paused() -> None:
    assert Series(SLOW_READS, SLOW_PRODUCTS, FULL, others=((0.0, 9.0),)).best() == (FULL, True)


def test_a_start_does_not_wait_for_others_for_long() -> None:
    measured = Series(SLOW_READS, seconds_each=0.8, others=((0.0, 9.0),))
    assert measured.best() == (SLOW_READS, True)
    assert measured.num_measured == 1


def test_a_slow_machine_without_others_gets_its_three_series() -> None:
    assert Series(FULL, seconds_each=0.8).best() == (FULL, False)


def test_workers_do_not_measure_at_the_same_time(tmp_path: Path) -> None:
    """The second one begins after the first has ended."""
    log: list[str] = []
    is_there = threading.Event()

    def measure() -> None:
        is_there.set()
        with measurement_lock(tmp_path):
            log.append("second begins")

    with measurement_lock(tmp_path):
        worker = threading.Thread(target=measure)
        worker.start()
        assert is_there.wait(10)
        log.append("first ends")
    worker.join(10)
    assert log == ["first ends", "second begins"]


def test_a_folder_that_cannot_be_written_keeps_nobody_waiting(tmp_path: Path) -> None:
    with measurement_lock(tmp_path / "nowhere"):
        pass


def test_a_process_that_never_ends_its_measurement_keeps_nobody_from_starting(tmp_path: Path) -> None:
    with measurement_lock(tmp_path), measurement_lock(tmp_path, timeout_s=0.05):
        pass
