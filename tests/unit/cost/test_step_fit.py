"""A model that is fitted to steps of a known model finds it again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost.step_cost import Layers, StepWork
from twostroke.cost.step_fit import TimedStep, fit_mean_step_model, fit_step_model, quality_of
from twostroke.cost.step_model import Curve, StepTimeModel, scaled
from twostroke.errors import InvalidParameter

TRUTH = StepTimeModel(
    layers=Curve((1, 16, 512), (0.010, 0.011, 0.350)),
    head=Curve((1, 64), (0.002, 0.004)),
    pair_s=2e-9,
    seen_s=3e-8,
)


def some_steps(seed: int, noise: float = 0.0) -> list[TimedStep]:
    dice, layers = random.Random(seed), Layers([None] * 12)
    found: list[TimedStep] = []
    for _ in range(400):
        decodes = [(dice.randrange(1, 2000), 1, 1) for _ in range(dice.choice([0, 1, 2, 4, 8, 16, 32, 64]))]
        chunk = [(dice.randrange(0, 1000), dice.choice([16, 32, 64, 128, 256, 448]), dice.randrange(2))]
        work = layers.work(decodes + (chunk if dice.random() < 0.5 or not decodes else []))
        found.append(TimedStep(work, TRUTH.seconds(work) * (1 + noise * dice.random())))
    return found


def test_steps_without_noise_give_the_model_back() -> None:
    model = fit_step_model(some_steps(1))
    assert quality_of(model, some_steps(2)).p95_error < 0.02
    assert model.seen_s == pytest.approx(TRUTH.seen_s, rel=0.05)
    assert model.pair_s == pytest.approx(TRUTH.pair_s, rel=0.1)


def test_hiccups_do_not_count() -> None:
    steps = some_steps(3)
    slow = [TimedStep(step.work, step.seconds * 4) for step in steps[::25]]
    model = fit_step_model([*steps, *slow])
    assert quality_of(model, some_steps(4)).median_error < 0.02


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"steps=2: must be 8 or more"):
        fit_step_model(some_steps(1)[:2])


def test_steps_of_one_kind_alone_can_be_fitted() -> None:
    layers = Layers([None])
    works = [layers.work([(context, 1, 1)]) for context in range(100, 4000, 100)]
    model = fit_step_model([TimedStep(work, TRUTH.seconds(work)) for work in works])
    assert model.seconds(layers.work([(2050, 1, 1)])) == pytest.approx(TRUTH.seconds(layers.work([(2050, 1, 1)])), 0.02)


@given(st.integers(0, 20), st.integers(0, 600), st.integers(0, 70))
def test_more_work_never_takes_less(more: int, num_tokens: int, num_rows: int) -> None:
    model = fit_step_model(some_steps(5, noise=0.3))
    work = StepWork(num_tokens, num_rows, 1000, 1000)
    assert model.seconds(work + StepWork(more, more, more, more)) >= model.seconds(work) - 1e-12


def test_a_slower_machine_takes_longer_for_everything() -> None:
    work = StepWork(100, 3, 5000, 700)
    assert scaled(TRUTH, 3.0).seconds(work) == pytest.approx(3 * TRUTH.seconds(work))


def test_a_window_cuts_what_is_seen() -> None:
    assert Layers([4, None]).work([(100, 1, 1)]) == StepWork(1, 1, 0, 4 + 101)
    # a chunk: every query sees itself and three before it in the first layer, all before it in the second
    assert Layers([4, None]).work([(100, 10, 0)]) == StepWork(10, 0, 40 + sum(range(101, 111)), 0)


def test_a_mean_fit_adds_up_to_the_time_that_was_measured() -> None:
    """Steps take up to four times as long by chance; a fit to the usual step falls far below their sum."""
    dice = random.Random(0)
    noisy = [step._replace(seconds=step.seconds * (1 + 3 * dice.random())) for step in some_steps(1) for _ in range(3)]
    measured_s = sum(step.seconds for step in noisy)
    usual_s, mean_s = (
        sum(model.seconds(step.work) for step in noisy) for model in (fit_step_model(noisy), fit_mean_step_model(noisy))
    )
    assert mean_s == pytest.approx(measured_s, 0.03)
    assert usual_s < 0.95 * measured_s


def test_a_process_that_was_stopped_does_not_decide_a_mean_fit() -> None:
    steps = some_steps(5)
    stopped = [steps[0]._replace(seconds=100.0 * steps[0].seconds), *steps[1:] * 3]
    usual, found = fit_mean_step_model(steps), fit_mean_step_model(stopped)
    assert found.seconds(steps[-1].work) == pytest.approx(usual.seconds(steps[-1].work), 0.1)


def test_a_slow_step_with_more_rows_than_all_others_does_not_bend_a_mean_fit() -> None:
    """The step that admits most prompts at once is slow by chance; predictions for more rows stay low."""
    layers = Layers([None] * 12)
    works = [layers.work([(context, 1, 1)] * rows) for rows in (1, 2, 3, 4) for context in range(50, 450, 50)]
    largest = layers.work([(0, 64, 1)] * 6)
    steps = [TimedStep(work, TRUTH.seconds(work)) for work in works]
    steps += [TimedStep(work, TRUTH.seconds(work)) for work in [layers.work([(0, 64, 1)])] * 4]
    found = fit_mean_step_model([*steps, TimedStep(largest, 3 * TRUTH.seconds(largest))])
    more = layers.work([(200, 1, 1)] * 9)
    assert found.seconds(more) == pytest.approx(TRUTH.seconds(more), 0.25)


def test_a_step_that_was_seen_once_takes_no_longer_than_smaller_ones_allow() -> None:
    """The only step with 288 tokens is slow by chance; predictions for 416 tokens do not follow it."""
    layers = Layers([None] * 12)
    works = [layers.work([(context, 1, 1)] * rows) for rows in range(1, 12) for context in range(30, 130, 10)]
    works += [layers.work([(0, tokens, 1), *[(90, 1, 1)] * 8]) for tokens in range(40, 120, 4)]
    steps = [TimedStep(work, TRUTH.seconds(work)) for work in works]
    admitted = layers.work([(0, 32, 1)] * 9)
    found = fit_mean_step_model([*steps, TimedStep(admitted, 4 * TRUTH.seconds(admitted))])
    more = layers.work([(0, 32, 1)] * 13)
    assert found.seconds(more) < 2 * TRUTH.seconds(more)


def test_a_step_of_a_kind_of_its_own_keeps_its_time() -> None:
    layers = Layers([None] * 12)
    steps = [TimedStep(w, TRUTH.seconds(w)) for w in (layers.work([(c, 1, 1)]) for c in range(50, 450, 10))]
    prompt = layers.work([(0, 448, 1)])
    found = fit_mean_step_model([*steps, TimedStep(prompt, TRUTH.seconds(prompt))])
    assert found.seconds(prompt) == pytest.approx(TRUTH.seconds(prompt), 0.02)
