"""Choices from measured figures, and the record of what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.config.speculation import SpeculativeConfig
from twostroke.cost.acceptance import best_plan, expected_tokens
from twostroke.cost.calibration import (
    Calibration,
    DrafterFigures,
    Timing,
    best_choice,
    best_exit_layer,
    check_writable,
    choices_of,
    recommended,
    seconds_at,
)
from twostroke.errors import InvalidParameter


def drafter(method: str = "ngram", acceptance: float = 0.8, round_s: float = 0.0, **more: Any) -> DrafterFigures:
    draft_s = (Timing(1, round_s), Timing(8, 8 * round_s))
    return DrafterFigures(method=method, acceptance=acceptance, **{"share": 1.0, "draft_s": draft_s} | more)


def calibration(*drafters: DrafterFigures, per_token: float = 0.02, **more: Any) -> Calibration:
    """A step of n query tokens takes 1 + per_token (n - 1) seconds."""
    step_s = (Timing(1, 1.0), Timing(64, 1.0 + 63 * per_token))
    fields: dict[str, Any] = {"model": "m", "load": {}, "machine": {}, "context_tokens": 128, "most_drafts": 8}
    return Calibration(**fields | {"step_s": step_s, "drafters": drafters} | more)


def test_one_request_is_the_plan_of_the_gate() -> None:
    """The same figures, the same number of drafts as cost/acceptance.py takes step by step."""
    for acceptance in (0.2, 0.5, 0.8, 0.95):
        for round_s in (0.01, 0.1, 0.5):
            choice = best_choice(calibration(), drafter(acceptance=acceptance, round_s=round_s))
            plan = best_plan([acceptance], 8, lambda n: 1.0 + 0.02 * (n - 1), lambda rows, k, c=round_s: c * k)
            if plan.num_drafts[0]:
                assert choice.num_drafts == plan.num_drafts[0]
                assert choice.gain == pytest.approx(plan.gain)
            else:
                assert choice.gain <= 1


def test_the_gain_is_tokens_over_cost() -> None:
    choice = best_choice(calibration(most_drafts=1), drafter(acceptance=0.6, round_s=0.3))
    assert choice.tokens_per_pass == pytest.approx(expected_tokens(0.6, 1))
    assert choice.gain == pytest.approx(1.6 / 1.32)
    assert choice.tokens_per_s == pytest.approx(1.6 / 1.32)


def test_a_lookup_that_finds_nothing_costs_a_plain_step() -> None:
    choice = best_choice(calibration(most_drafts=1), drafter(acceptance=1.0, share=0.25))
    assert choice.tokens_per_pass == pytest.approx(1.25)
    assert choice.gain == pytest.approx(1.25 / (0.25 * 1.02 + 0.75))


def test_what_reads_along_pays_in_every_step() -> None:
    without, reading = drafter("eagle"), drafter("eagle", extra_s=0.5)
    assert best_choice(calibration(), reading).gain < best_choice(calibration(), without).gain
    small = drafter("eagle", acceptance=0.3, extra_s=0.5)
    assert recommended(calibration(small)) is None


def test_the_best_exit_layer_weighs_acceptance_against_layers() -> None:
    """Deeper exits are right more often and take longer: neither the first nor the last is the best."""
    layers = [
        drafter("early_exit", acceptance=a, round_s=m / 9, exit_layer=m)
        for m, a in ((1, 0.1), (2, 0.75), (3, 0.8), (8, 1.0))
    ]
    found = calibration(*layers)
    assert best_exit_layer(found) == 2
    assert [c.drafter.exit_layer for c in choices_of(found)][-1] == 1 or best_choice(found, layers[0]).gain < 1
    assert best_exit_layer(calibration(drafter())) is None


def test_nothing_is_recommended_within_what_measuring_can_tell() -> None:
    assert recommended(calibration()) is None
    assert recommended(calibration(drafter(acceptance=0.04))) is None
    best = recommended(calibration(drafter(acceptance=0.5), drafter("early_exit", acceptance=0.9, exit_layer=3)))
    assert best is not None
    assert best.drafter.exit_layer == 3


@pytest.mark.parametrize(
    "figures",
    [
        drafter(),
        drafter("early_exit", exit_layer=3),
        drafter("draft_model"),
        drafter("medusa", model="heads"),
        drafter("eagle", model="org/head"),
    ],
)
def test_a_choice_is_a_speculative_config(figures: DrafterFigures) -> None:
    choice = best_choice(calibration(figures), figures)
    auto = SpeculativeConfig.read(choice.speculative_config(is_fixed=False))
    fixed = SpeculativeConfig.read(choice.speculative_config(is_fixed=True))
    assert auto == SpeculativeConfig(method=auto.method, exit_layer=figures.exit_layer, model=figures.model)
    assert fixed == replace(auto, num_speculative_tokens=choice.num_drafts)


SECONDS = st.floats(1e-6, 1e3)
TIMINGS = st.dictionaries(st.integers(1, 64), SECONDS, min_size=1, max_size=6).map(
    lambda found: tuple(Timing(size, found[size]) for size in sorted(found))
)
PROBABILITIES = st.floats(0, 1)
DRAFTERS = st.builds(
    DrafterFigures,
    method=st.sampled_from(["ngram", "early_exit", "medusa"]),
    exit_layer=st.none() | st.integers(1, 99),
    model=st.none() | st.text(max_size=5),
    acceptance=PROBABILITIES,
    share=PROBABILITIES,
    draft_s=TIMINGS,
    extra_s=st.floats(0, 1),
)
CALIBRATIONS = st.builds(
    Calibration,
    model=st.text(max_size=8),
    load=st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=4), max_size=3),
    machine=st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=3),
    context_tokens=st.integers(1, 10_000),
    most_drafts=st.integers(1, 64),
    step_s=TIMINGS,
    drafters=st.lists(DRAFTERS, max_size=3).map(tuple),
    left_out=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
)


@given(found=CALIBRATIONS)
def test_what_is_written_is_read(found: Calibration, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("written") / "calibration.json"
    found.write(path)
    assert Calibration.read(path) == found


@given(found=CALIBRATIONS)
def test_whatever_was_measured_something_is_chosen(found: Calibration) -> None:
    choices = choices_of(found)
    assert len(choices) == len(found.drafters)
    assert all(1 <= choice.num_drafts <= found.most_drafts for choice in choices)
    assert all(math.isfinite(choice.gain) and choice.gain > 0 for choice in choices)
    assert list(choices) == sorted(choices, key=lambda choice: -choice.tokens_per_s)
    best = recommended(found)
    assert best is None or best.gain >= 1.03


@given(timings=TIMINGS, size=st.integers(1, 200))
def test_seconds_are_those_measured_and_never_below_the_least(timings: tuple[Timing, ...], size: int) -> None:
    for timing in timings:
        assert seconds_at(timings, timing.size) == pytest.approx(timing.seconds)
    assert seconds_at(timings, size) >= min(timing.seconds for timing in timings) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("nothing", "is no calibration"),
        ("{}", "is no calibration .*missing required field"),
        ('{"version": 1}', "is of version 1; this is version 2. Make it again"),
        ('{"version": 3}', "is of version 3; this is version 2"),
        ('{"version": "x"}', "is no calibration"),
        ("[1]", "is no calibration"),
    ],
)
def test_other_files_are_refused(written: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(written, encoding="utf-8")
    with pytest.raises(InvalidParameter, match=f"calibration=.*{told}.*`twostroke calibrate`"):
        Calibration.read(path)
    with pytest.raises(InvalidParameter, match="cannot be read"):
        Calibration.read(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step_s": ()}, r"step_s=\[\]: must be timings"),
        ({"step_s": (Timing(2, 1.0), Timing(1, 1.0))}, r"step_s=\[2, 1\].*rising"),
        ({"step_s": (Timing(1, 0.0),)}, "step_s at 1=0.0: must be seconds, more than 0"),
        ({"step_s": (Timing(1, math.inf),)}, "step_s at 1=inf"),
        ({"most_drafts": 0}, "most_drafts=0: must be a whole number, 1 to 64"),
        ({"drafters": (drafter(acceptance=1.5),)}, "acceptance of ngram=1.5: must be from 0 to 1"),
        ({"drafters": (drafter(share=-0.1),)}, "share of ngram=-0.1"),
        ({"drafters": (drafter(draft_s=()),)}, "draft_s of ngram"),
        ({"drafters": (drafter(draft_s=(Timing(1, -1.0),)),)}, "draft_s of ngram at 1=-1.0: must be seconds, 0 or"),
        ({"drafters": (drafter(extra_s=-1.0),)}, "extra_s of ngram=-1.0"),
    ],
    ids=str,
)
def test_figures_that_nothing_can_be_computed_from_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        calibration(**change) if "drafters" not in change else calibration(*change["drafters"])


def test_a_place_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"output=.*cannot be written \(.*folder that you may write to"):
        check_writable(tmp_path / "nowhere" / "calibration.json")
    with pytest.raises(InvalidParameter, match="cannot be written"):
        calibration().write(tmp_path / "nowhere" / "calibration.json")
    old = tmp_path / "old.json"
    old.write_text("kept", encoding="utf-8")
    check_writable(old)
    assert old.read_text(encoding="utf-8") == "kept"
    check_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "calibration.json", tmp_path / "link.json"
    calibration().write(path)
    before = path.read_bytes()
    link.symlink_to(path)
    write_bytes = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        write_bytes(self, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(InvalidParameter, match=r"cannot be written \(No space left"):
        calibration(drafter()).write(link)
    assert path.read_bytes() == before
    monkeypatch.undo()
    calibration(drafter()).write(link)
    assert link.is_symlink()
    assert Calibration.read(path) == calibration(drafter())
    assert sorted(tmp_path.iterdir()) == [path, link], "nothing is left beside it"


def test_a_calibration_can_be_written_to_a_pipe(tmp_path: Path) -> None:
    check_writable(Path("/dev/null"))
    calibration().write(Path("/dev/null"))
    assert not Path("/dev/null").is_file()
