"""The benchmark that reads mutated files: in another process, which may end, and is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.claim import ReproduceOptions
from benchmarks.reproduce import hostile_files
from benchmarks.reproduce import hostile_files as hostile_cases
from benchmarks.reproduce.hostile_files import KINDS, Case, cases, mutated_copy, outcome_of


def test_each_file_is_a_case() -> None:
    found = list(cases("batch file", 5, 3))
    assert [(case.kind, case.seed, case.outcome) for case in found] == [
        ("batch file", seed, "accepted") for seed in (5, 6, 7)
    ]
    assert all(case.seconds > 0 for case in found)


def test_a_file_that_ends_the_process_is_a_case_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_cases, "TIMEOUT_S", 0.01)
    found = list(cases("batch file", 0, 2))
    assert [case.outcome for case in found] == ["!ended the process (-9)"] * 2


def test_what_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(kind: str, first: int, number: int) -> list[Case]:
        outcome = "!KeyError: 'a'" if kind == "gguf" else "CorruptCheckpoint"
        return [Case(kind, first + i, outcome, 0.1, 2**20) for i in range(number)]

    monkeypatch.setattr(hostile_files, "cases", read)
    found = hostile_files.reproduce(ReproduceOptions(full=True))
    claims = {claim.what: claim for claim in found.claims}
    assert claims["files read"].measured >= 10_000
    assert claims["that ended in another error than ours, or never"].measured == 2000
    assert found.details["wrong"][0] == "gguf 0: !KeyError: 'a'"
    assert found.details["kinds"]["template"]["outcomes"] == {"CorruptCheckpoint": 2500}


def test_an_error_that_is_not_ours_shows(tmp_path: Path) -> None:
    def fails(_: Path) -> None:
        raise OverflowError("too large")

    assert outcome_of(fails, tmp_path) == "!OverflowError: too large"


def test_copies_are_seeded(tmp_path: Path) -> None:
    kind = KINDS["calibration"]
    (tmp_path / "sound").mkdir()
    kind.write(tmp_path / "sound")
    texts = [
        (mutated_copy(kind, tmp_path / "sound", tmp_path / "copy", seed) / "calibration.json").read_bytes()
        for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]
