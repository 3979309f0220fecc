"""Results of the field at sizes of seconds: the claims of the full sizes, exact where counters are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from benchmarks.reproduce import r1_batching, r2_hostage, r10_prefix_cache, skewed
from benchmarks.reproduce.run import RESULTS, reproduce
from benchmarks.slots import SlotCount, static_schedule
from oracle.naive_prefix_cache import NaivePrefixCache
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter, SetupError
from twostroke.measure import report
from twostroke.measure.workload import Lengths, TraceEntry, workload_of_lengths, workload_of_trace


def _options(tmp_path: Path, **changes: Any) -> ReproduceOptions:
    defaults: dict[str, Any] = {"results": tmp_path, "traces": tmp_path, "with_model": False, "plots": False}
    return ReproduceOptions(**(defaults | changes))


def _reproduce(name: str, options: ReproduceOptions) -> Reproduction:
    (found,) = reproduce([name], options, Console(quiet=True))
    assert found.claims
    failed = [claim for claim in found.claims if claim.holds is False]
    assert not failed, failed
    return found


@pytest.mark.parametrize("kind", ["exponential", "uniform", "constant"])
@pytest.mark.parametrize("num_slots", r1_batching.SLOTS)
def test_r1_ideal_slot_steps_approach_the_closed_form(kind: str, num_slots: int) -> None:
    """At 10,000 static batches the drawn lengths' own ratio is within 2 % of the expectation."""
    lengths: Lengths = r1_batching.LENGTHS[kind]
    drawn = lengths.draw(10_000 * num_slots, np.random.default_rng(num_slots)).tolist()
    ratio = num_slots / SlotCount.of(static_schedule(drawn, num_slots), num_slots).tokens_per_step
    assert ratio == pytest.approx(lengths.expected_max(num_slots) / lengths.expected, rel=0.02)
    assert ratio == pytest.approx(lengths.textbook_max_over_mean(num_slots), rel=0.025)


def test_r1_engine_is_ideal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r1_batching, "SLOTS", (4, 16))
    monkeypatch.setattr(r1_batching, "GROUPS", {kind: {4: 120, 16: 60} for kind in r1_batching.LENGTHS})
    found = r1_batching.reproduce(_options(tmp_path))
    for name, case in found.details["slot_steps"].items():
        assert case["measured"] == pytest.approx(case["drawn_lengths"], rel=1e-9), name
        for mode in ("static", "continuous"):
            assert case[f"{mode}_steps"] == case[f"{mode}_steps_ideal"], name
    assert found.details["slot_steps"]["constant-4"]["measured"] == 1.0


def test_r2_the_hostage_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r2_hostage, "GROUPS", {True: 100, False: 3})
    found = _reproduce("r2", _options(tmp_path))
    measured = {claim.what: claim.measured for claim in found.claims}
    assert measured["useful slot-steps, static"] == pytest.approx(0.109)
    assert measured["median latency of a short request: static / continuous"] >= 10


def test_r3_waste_is_predicted_to_the_slot(tmp_path: Path) -> None:
    found = _reproduce("r3", _options(tmp_path))
    waste = found.details["imitated"]["waste"]
    assert waste["paged"] < 0.04
    assert waste["contiguous"] > 0.60
    assert any("only the imitated workload" in remark for remark in found.remarks)


def test_r4_concurrency_is_max_over_mean(tmp_path: Path) -> None:
    found = _reproduce("r4", _options(tmp_path))
    assert found.details["imitated"]["running"]["contiguous"]["p50"] == skewed.LONGEST_THAT_FIT


def test_r14_counts_171_5_times_fewer_passes(tmp_path: Path) -> None:
    found = _reproduce("r14", _options(tmp_path))
    assert found.details["token_passes"] == {"without": 119_900, "with": 699}
    assert pytest.approx(171.5, abs=0.05) == 119_900 / 699


def test_long_prompt_leaves_everybody_a_token_a_step(tmp_path: Path) -> None:
    found = _reproduce("long-prompt", _options(tmp_path, full=True))
    assert found.claims[0].predicted == 261  # 131,072 tokens, 504 a step


def test_what_is_recorded_of_a_step_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    """The record of a step names the blocks that it adds, not all blocks of the request."""
    length = 131_072
    workload = workload_of_lengths([(length, 4)], vocab_size=4096)
    log = tmp_path / "events.jsonl"
    cache = CacheConfig(enable_prefix_caching=True)
    scheduler = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=1)
    engine = counting_engine(scheduler, cache, max_model_len=workload.max_request_tokens, event_log=log)
    engine.run(workload)
    engine.engine.close()
    with log.open() as lines:
        sizes = [len(line) for line in lines if "StepScheduled" in line or "StepCommitted" in line]
    assert len(sizes) == 2 * (length // 512 + 3)
    early, late = sizes[4:100], sizes[-106:-10]
    assert max(late) <= 1.1 * max(early)


def _conversations(num_requests: int, seed: int) -> list[TraceEntry]:
    """A trace of conversations that come back with everything said before, and share three beginnings."""
    rng = np.random.default_rng(seed)
    next_id, open_ones, entries = 3, [], []
    for _ in range(num_requests):
        if open_ones and rng.random() < 0.6:
            history = open_ones[int(rng.integers(len(open_ones)))]
        else:
            history = [int(rng.integers(3))]
            open_ones.append(history)
        new = range(next_id, next_id + int(rng.integers(1, 6)))
        next_id = new.stop
        history.extend(new)
        length = 512 * len(history) - (int(rng.integers(0, 512)) if rng.random() < 0.5 else 0)
        entries.append(TraceEntry(0.0, length, int(rng.integers(1, 1500)), tuple(history)))
        if length % 512:  # the truncated part is repeated completely under another id
            history[-1] = next_id
            next_id += 1
    return entries


@pytest.mark.parametrize("num_blocks", [130, 400])
def test_r10_hits_equal_the_naive_cache_to_the_block(num_blocks: int) -> None:
    workload = workload_of_trace(_conversations(400, seed=num_blocks), r10_prefix_cache.SPEC)
    workload = workload.within_context(num_blocks * 8)
    engine = counting_engine(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4096),
        CacheConfig(block_size=8, num_kv_blocks=num_blocks),
        max_model_len=workload.max_request_tokens,
    )
    run = engine.run(workload)
    oracle = NaivePrefixCache(num_blocks, 8)
    expected = [oracle.run(list(r.prompt_token_ids), [1] * r.max_tokens) for r in workload.requests]
    assert sum(expected) > 300
    assert [r.num_cached_tokens / 8 for r in run.requests] == expected


def test_r10_reproduces_a_trace_file_and_misses_an_absent_one(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"timestamp": 0, "input_length": e.input_length, "output_length": e.output_length, "hash_ids": e.hash_ids}
        )
        for e in _conversations(120, seed=1)
    ]
    (tmp_path / "mooncake_synthetic.jsonl").write_text("\n".join(lines))
    found = _reproduce("r10", _options(tmp_path))
    assert found.details["synthetic-infinite"]["measured_hits"] > 100
    assert any("mooncake_conversation.jsonl is not in" in remark for remark in found.remarks)


def test_results_are_saved_with_claims_and_plot(tmp_path: Path) -> None:
    found = _reproduce("r14", _options(tmp_path, plots=True))
    saved = report.load(tmp_path / "r14-small.json")
    assert saved.results["holds"] is True
    assert saved.results["claims"][0]["predicted"] == found.claims[0].predicted
    assert saved.command == f"python -m benchmarks reproduce r14 --traces {tmp_path.name} --no-with-model"
    assert (tmp_path / "r14-small.png").read_bytes().startswith(b"\x89PNG")


def test_every_result_has_a_plot_that_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        r1_batching, "GROUPS", {kind: dict.fromkeys(r1_batching.SLOTS, 20) for kind in r1_batching.LENGTHS}
    )
    monkeypatch.setattr(r2_hostage, "GROUPS", {True: 2, False: 2})
    reproduce(["r1", "r2", "r3", "r4", "engine-time"], _options(tmp_path, plots=True), Console(quiet=True))
    assert {p.stem for p in tmp_path.glob("*.png")} == {
        f"{name}-small" for name in ("r1", "r2", "r3", "r4", "engine-time")
    }


def test_names_are_checked_and_all_means_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="r14"):
        reproduce(["r8"], _options(tmp_path))
    assert {"r1", "r2", "r3", "r4", "r10", "r11", "r14"} <= set(RESULTS)


def test_what_needs_a_model_says_so_without_one(tmp_path: Path) -> None:
    without = ReproduceOptions(with_model=False, plots=False, results=tmp_path)
    needy = [name for name, study in RESULTS.items() if study.needs_model]
    found = reproduce(needy, without, Console(quiet=True))
    assert [result.remarks for result in found] == [(RESULTS[name].needs_model,) for name in needy]
    assert not any(result.claims for result in found)
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(SetupError, match="twostroke\\[bench\\]"):
        reproduce(["r14"], _options(tmp_path, plots=True), Console(quiet=True))


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (Claim.equal("", 3, 3), True),
        (Claim.equal("", 3, 4), False),
        (Claim.within("", 2.0, 2.1, 0.05), True),
        (Claim.within("", 2.0, 2.11, 0.05), False),
        (Claim.at_least("", 8.0, 8.0), True),
        (Claim.at_least("", 8.0, 7.9), False),
        (Claim.at_most("", 0.5, 0.5), True),
        (Claim.at_most("", 0.5, 0.6), False),
        (Claim.reported("", 1.0), None),
    ],
)
def test_claims(claim: Claim, holds: bool | None) -> None:
    assert claim.holds is holds


def test_a_reproduction_says_how_to_get_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r2_hostage, "GROUPS", {True: 100, False: 3})
    (tmp_path / "some model").mkdir()
    options = _options(tmp_path, model=str(tmp_path / "some model"), threads=2, seed=3)
    _reproduce("r2", options)
    text = (tmp_path / "r2-some model-small.json").read_text()
    flags = f"--model 'some model' --threads 2 --traces {tmp_path.name} --no-plots --no-with-model --seed 3"
    assert json.loads(text)["command"] == f"python -m benchmarks reproduce r2 {flags}"
    assert str(tmp_path) not in text


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 2**32}, {"threads": 0}, {"full": "no"}], ids=str)
def test_options_of_reproductions_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        ReproduceOptions(**bad)
    assert refusal.value.name in bad
