"""The measurement, on a small model in few steps: what it finds can be acted upon, and what it cannot do is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from timed_engine import LIMITS, SHAPE
from traces import conversations, write_trace
from twostroke import LLM, SamplingParams
from twostroke.calibrate.options import CalibrateOptions
from twostroke.calibrate.run import calibrate
from twostroke.calibrate.show import advice, print_calibration
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.cost.calibration import Calibration, DrafterFigures, Timing
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import InvalidParameter, ModelNotFound, TwostrokeError
from twostroke.model.model_files import find_model_of
from twostroke.planner.options import PlanOptions, TraceOptions
from twostroke.planner.plan import make_plan
from twostroke.planner.trace_replay import replay_trace
from twostroke.startup.calibrated import LatencyModel, find_calibration, latency_model, place_to_write

LOAD = LoadConfig(threads=1)
FEW: dict[str, Any] = {
    "sizes": "1,2,5",
    "most_drafts": 4,
    "context_tokens": 32,
    "output_tokens": 32,
    "prompts": 1,
    "repeats": 3,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}


def test_what_is_measured_is_written_and_can_be_acted_upon(tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    options = CalibrateOptions(methods="ngram,early_exit,medusa", exit_layers="3,1", output=output, **FEW)
    found, _ = calibrate(options, LOAD)
    assert Calibration.read(output) == found
    assert [timing.size for timing in found.step_s] == [1, 2, 5]
    assert [d.words for d in found.drafters] == ["ngram", "early_exit 1", "early_exit 3", "medusa"]
    assert not found.left_out
    for drafter in found.drafters:
        assert [timing.size for timing in drafter.draft_s] == [1, 4]
        assert 0 <= drafter.acceptance <= 1
    _, shallow, deep, medusa = found.drafters
    assert shallow.share == deep.share == medusa.share == 1.0, "layers always have a guess"
    assert deep.acceptance > shallow.acceptance, "the embedded model was trained to exit after 3 layers"
    assert deep.draft_s[1].seconds > deep.draft_s[0].seconds, "four drafts take longer than one"
    console = Console(record=True, width=200)
    print_calibration(found, console)
    text = console.export_text()
    assert "early_exit 3" in text
    assert "best early exit: after layer" in text
    assert str(tmp_path) not in output.read_text(encoding="utf-8"), "no place of this machine"


def test_a_recommendation_can_be_given_as_it_is() -> None:
    figures = DrafterFigures(
        method="early_exit", exit_layer=3, acceptance=0.9, share=1.0, draft_s=(Timing(1, 0.01), Timing(4, 0.04))
    )
    found = Calibration(
        model="embedded",
        load={},
        machine={},
        context_tokens=32,
        most_drafts=4,
        step_s=(Timing(1, 1.0), Timing(5, 1.1)),
        drafters=(figures,),
        left_out={"eagle": "there is none."},
    )
    left_out, layer, auto, fixed = advice(found)
    assert left_out == "eagle: left out; there is none."
    assert layer == "best early exit: after layer 3"
    assert auto == """recommended: --speculative-config '{"method": "early_exit", "exit_layer": 3}'"""
    assert fixed.endswith("""'{"method": "early_exit", "exit_layer": 3, "num_speculative_tokens": 4}'""")
    with LLM("embedded", threads=1, speculative_config=json.loads(auto.split("'")[1])) as llm:
        (output,) = llm.generate(["x = 1"], SamplingParams(max_tokens=4, temperature=0.0))
    assert output.outputs[0].token_ids


def test_methods_without_anything_to_draft_with_are_left_out(random_models: dict[str, Path], tmp_path: Path) -> None:
    model, output = random_models["llama"], tmp_path / "calibration.json"
    data = tmp_path / "data.txt"
    data.write_text("def f(x): return x\n" * 50, encoding="utf-8")
    options = CalibrateOptions(data=data, output=output, **FEW)
    found, _ = calibrate(options, LoadConfig(model=str(model), threads=1))
    assert found.left_out.keys() == {"draft_model", "medusa", "eagle"}
    assert "nothing of that method comes with" in found.left_out["medusa"]
    assert {drafter.method for drafter in found.drafters} == {"ngram", "early_exit"}
    with pytest.raises(InvalidParameter, match="nothing of that method comes with"):
        calibrate(CalibrateOptions(methods="eagle", data=data, output=output, **FEW), LoadConfig(model=str(model)))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"methods": "ngram,medsua"}, "names 'medsua'; known: ngram, draft_model"),
        ({"sizes": "2,4"}, "sizes='2,4': must begin with 1"),
        ({"sizes": "1,two"}, "has 'two', which is no whole number"),
        ({"sizes": "1,66"}, "has 66; from 1 to 65"),
        ({"sizes": ""}, "contains no number"),
        ({"sizes": "1"}, "has no step with drafts"),
        ({"methods": ","}, "methods=',': names no method"),
        ({"most_drafts": 65}, "most_drafts=65: must be a whole number, 1 to 64"),
        ({"output_tokens": 17}, "output_tokens=17: must be a whole number, 18 to"),
        ({"prompts": 0}, "prompts=0"),
        ({"repeats": 2}, "repeats=2"),
        ({"context_tokens": 1}, "context_tokens=1"),
        ({"exit_layers": "0"}, "has 0; from 1"),
        ({"methods": "ngram", "exit_layers": "3"}, "exit_layers='3': changes nothing: 'early_exit' is not among"),
        ({"methods": "ngram", "medusa": "heads"}, "medusa='heads': changes nothing: 'medusa' is not among"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        CalibrateOptions(**given)


@pytest.mark.parametrize(
    ("given", "load", "told"),
    [
        ({"exit_layers": "3,9"}, LOAD, "exit_layers='3,9': has 9; the model has 9 layers.*from 1 to 8"),
        ({"data": Path("no such text")}, LOAD, "data='no such text': cannot be read"),
        ({"methods": "medusa", "medusa": "no such heads"}, LOAD, "no such heads"),
        ({}, LoadConfig(threads=1, max_model_len=60), "max_model_len=60: is less than the 64 tokens"),
        ({}, LoadConfig(model="no such model"), "no such model"),
        ({}, LoadConfig(event_log=Path("e.jsonl")), "event_log='e.jsonl': is for one engine"),
        ({}, LoadConfig(max_logprobs=3), "max_logprobs=3: changes nothing"),
        ({}, LoadConfig(load_format="dummy"), "load_format='dummy': random weights give no meaningful acceptance"),
        ({}, LoadConfig(kernels="reference", batch_invariant=False), "batch_invariant=false: outputs with and without"),
    ],
    ids=str,
)
def test_what_does_not_go_with_the_model_is_refused(
    given: dict[str, Any], load: LoadConfig, told: str, tmp_path: Path
) -> None:
    output = tmp_path / "calibration.json"
    with pytest.raises((InvalidParameter, ModelNotFound, TwostrokeError), match=told):
        calibrate(CalibrateOptions(output=output, **FEW | {"sizes": "1,2"} | given), load)
    assert not output.exists()


def test_a_text_shorter_than_a_prompt_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "short.txt"
    data.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(InvalidParameter, match=r"data=.*has \d+ tokens; a prompt has 32.*longer text"):
        calibrate(CalibrateOptions(data=data, output=tmp_path / "c.json", **FEW), LOAD)


def test_random_weights_and_free_products_have_calibrations_of_their_own(tmp_path: Path) -> None:
    loads = [
        LoadConfig(),
        LoadConfig(load_format="dummy"),
        LoadConfig(kernels="reference"),
        LoadConfig(kernels="reference", batch_invariant=False),
        LoadConfig(quantization="int8", load_format="dummy"),
    ]
    names = [place_to_write(tmp_path, load).name.rpartition("twostroke-calibration")[2] for load in loads]
    assert names == [".json", "-dummy.json", ".json", "-not-batch-invariant.json", "-int8-dummy.json"]


STEP_TIMES = StepTimeModel(layers=Curve((1,), (1.0,)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
SOME = Calibration(
    model="m", load={}, machine={}, context_tokens=1, most_drafts=1, step_s=(Timing(1, 1.0),), step_times=STEP_TIMES
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", ["folder", "file.gguf"])
def test_a_calibration_goes_to_the_cache_and_is_found_there(tmp_path: Path, home: Path, name: str) -> None:
    model = tmp_path / "models" / name
    model.mkdir(parents=True) if name == "folder" else (tmp_path / "models").mkdir()
    if name != "folder":
        model.touch()
    before = sorted(tmp_path.joinpath("models").rglob("*"))
    place = place_to_write(model, LOAD)
    assert place.parent == home / ".cache" / "twostroke"
    assert find_calibration(model, LOAD, CacheConfig())[0] is None
    SOME.write(place)
    assert find_calibration(model, LOAD, CacheConfig()) == (SOME, f"calibrated: {place.name}")
    assert sorted(tmp_path.joinpath("models").rglob("*")) == before, "a model's folder is not ours to write to"


def test_two_models_of_one_name_have_calibrations_of_their_own(tmp_path: Path, home: Path) -> None:
    places = {place_to_write(tmp_path / parent / "model", LOAD) for parent in ("a", "b")}
    assert len(places) == 2


def test_a_calibration_beside_a_model_is_read_where_the_cache_has_none(tmp_path: Path, home: Path) -> None:
    """Earlier releases wrote it there."""
    SOME.write(tmp_path / "twostroke-calibration.json")
    assert find_calibration(tmp_path, LOAD, CacheConfig()) == (SOME, "calibrated: twostroke-calibration.json")
    newer = replace(SOME, context_tokens=2)
    newer.write(place_to_write(tmp_path, LOAD))
    assert find_calibration(tmp_path, LOAD, CacheConfig())[0] == newer
    replace(newer, machine={"cpu": "another"}).write(place_to_write(tmp_path, LOAD))
    assert find_calibration(tmp_path, LOAD, CacheConfig())[0] == SOME, "that in the cache is of another machine"
    replace(SOME, machine={"cpu": "a third"}).write(tmp_path / "twostroke-calibration.json")
    found, why = find_calibration(tmp_path, LOAD, CacheConfig())
    assert found is None
    assert why.count("is of another machine or other settings") == 2


OUTDATED = '{"version": 1, "model": "q"}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OUTDATED, "is of version 1; this is version 2"),
        ("", "is no calibration (Input data was truncated)"),
        ('{"version": 2, "model": "m", "lo', "is no calibration (Input data was truncated)"),
        ('{"version": 2, "model": "m"}', "is no calibration (Object missing required field"),
    ],
    ids=["outdated", "empty", "cut off", "lacks fields"],
)
def test_a_broken_calibration_counts_as_none_and_is_named(tmp_path: Path, home: Path, text: str, told: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    beside, place = model / "twostroke-calibration.json", place_to_write(model, LOAD)
    for broken in (beside, place):
        broken.write_text(text, encoding="utf-8")
        found, words = find_calibration(model, LOAD, CacheConfig())
        assert found is None
        assert words.startswith(f"not calibrated: `twostroke calibrate {LOAD.model}")
        assert f"{broken} is left out: it {told}" in words
        notes = [line for line in _pace(model).lines if line.startswith("note")]
        assert any(f"{broken} is left out: it {told}" in note and "`twostroke calibrate" in note for note in notes)
    SOME.write(place)
    found, words = find_calibration(model, LOAD, CacheConfig())
    assert found == SOME, "one that is sound is used, whatever lies elsewhere"
    assert words.startswith(f"calibrated: {place.name}; {beside} is left out")


def _pace(model: Path) -> LatencyModel:
    return latency_model(EngineConfig.from_keywords(threads=1), model, SHAPE, LIMITS)


def test_a_broken_calibration_stops_no_command(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = place_to_write(find_model_of(LOAD).path, LOAD)
    place.write_text(OUTDATED, encoding="utf-8")
    assert str(place) in make_plan(EngineConfig.from_keywords(threads=1), PlanOptions(memory=1 << 30)).predicted_by
    with LLM(threads=1) as llm:
        llm.generate(["x"], SamplingParams(max_tokens=1))
    assert str(place) in caplog.text

    def refuse(path: Path) -> Calibration:
        raise AssertionError(f"{path} is about to be written anew, and need not be read")

    monkeypatch.setattr(Calibration, "read", refuse)
    found, output = calibrate(CalibrateOptions(methods="ngram", **FEW), LOAD)
    monkeypatch.undo()
    assert Calibration.read(output) == found
    assert output.name == place.name


def test_engine_plan_and_replay_go_by_the_calibration_in_the_cache(tmp_path: Path, home: Path) -> None:
    SOME.write(place_to_write(find_model_of(LOAD).path, LOAD))
    config = EngineConfig.from_keywords(threads=1, itl_slo="10s", block_size=8)
    pace = latency_model(config, find_model_of(LOAD).path, SHAPE, LIMITS)
    assert pace.step_times == STEP_TIMES
    assert "calibrated: " in pace.lines[0]
    assert "not calibrated" not in pace.lines[0]
    plan = make_plan(config, PlanOptions(memory=1 << 30, compare="none"))
    assert plan.is_predicted
    assert plan.step_times == STEP_TIMES
    trace = write_trace(tmp_path / "trace.jsonl", conversations(3))
    replayed = replay_trace(trace, config, TraceOptions(trace_divisor=64, memory=1 << 28))
    assert replayed.predicted_by.startswith("calibrated: ")
