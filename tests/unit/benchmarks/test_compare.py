"""`benchmarks compare`: figures from known times, engines that fail in every way, and two real ones on a tiny model."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.compare import run as compare_run
from benchmarks.compare.options import PEERS, CompareOptions, PeerWork, checked_tokens, figures_of
from benchmarks.compare.run import EngineComparison, print_compared, run_compare
from gguf_files import fixture
from peer_scripts import SCRIPTS, script_peer
from twostroke.errors import InvalidParameter
from twostroke.measure import limits
from twostroke.measure.limits import MachineRates
from twostroke.measure.peers.peer import Peer, PeerFailed, PeerProcess

PYTHON = Path(sys.executable)
SMALL: dict[str, Any] = {
    "prefill_length": 16,
    "prompt_length": 8,
    "output_length": 6,
    "batch_sizes": "1,2",
    "rounds": 2,
}


def _contest(tmp_path: Path, *names: str, **changes: Any) -> EngineComparison:
    contest = EngineComparison(CompareOptions(**(SMALL | {"answer_limit": 20.0} | changes)), vocab_size=300, threads=1)
    for name in names:
        contest.enter(script_peer(tmp_path, name), PYTHON, tmp_path)
    return contest


def test_figures_count_tokens_while_all_decode() -> None:
    work = PeerWork(2, 4, 3)
    tokens = [(1.0, 0), (1.5, 0), (2.0, 0), (1.5, 1), (2.0, 1), (4.0, 1)]
    # from 1.5, when the second has its first token, to 2.0, when the first has its last: two tokens in half a second
    assert figures_of(work, checked_tokens(tokens, work)) == {"decode, batch 2": 4.0, "end to end, batch 2": 14 / 4.0}


def test_a_prompt_with_one_output_measures_prefill() -> None:
    assert figures_of(PeerWork(1, 512, 1), [(0.5, 0)]) == {"prefill 512": 1024.0}


def test_requests_one_after_the_other_have_no_decode_rate() -> None:
    with pytest.raises(PeerFailed, match="all at once"):
        figures_of(PeerWork(2, 4, 2), [(1.0, 0), (2.0, 0), (3.0, 1), (4.0, 1)])


def test_every_engine_gets_the_same_work_and_known_figures(tmp_path: Path) -> None:
    contest = _contest(tmp_path, "honest")
    try:
        assert contest.measure(float("inf"), progress=False) == 0
        (standing,) = contest.standings
        assert standing.failure is None
        assert standing.ready_after_s is not None
        assert {name: len(rounds) for name, rounds in standing.figures.items()} == {
            "prefill 16": 2,
            "decode, batch 1": 2,
            "decode, batch 2": 2,
            "end to end, batch 2": 2,
        }
        assert standing.median("prefill 16") == pytest.approx(32.0)
        assert standing.median("decode, batch 1") == pytest.approx(10.0)
        assert standing.median("decode, batch 2") == pytest.approx(20.0)
        assert standing.median("end to end, batch 2") == pytest.approx(28.0)
        order = json.loads(standing.about["order"])
        assert order["threads"] == 1
        assert order["max_model_len"] == 36  # a warm-up's
    finally:
        contest.close()


def test_rounds_after_the_first_stop_at_the_time_limit(tmp_path: Path) -> None:
    contest = _contest(tmp_path, "honest", rounds=3)
    try:
        assert contest.measure(contest.clock() - 1, progress=False) == 2 * 3
        assert all(list(rounds) == [0] for rounds in contest.standings[0].figures.values())
    finally:
        contest.close()


REASONS = {
    "missing": "not installed",
    "dies": r"exit code 3\) while asked to run: out of memory",
    "names its model": "^cannot load [^/]+$",
    "dies later": "exit code 3",
    "hangs": "no answer to 'run' within 2 s",
    "babbles": "<html>",
    "answers something else": "invalid",
    "loses tokens": "between 0 and 0 of 1 tokens",
    "invents requests": "request 1 of 1",
    "knows no time": "nan s",
}


def test_each_failure_has_a_case() -> None:
    assert set(REASONS) == set(SCRIPTS) - {"honest"}


@pytest.mark.parametrize("name", REASONS)
def test_who_fails_has_a_row_that_says_why_and_the_others_go_on(name: str, tmp_path: Path) -> None:
    contest = _contest(tmp_path, "honest", name, answer_limit=2.0 if name == "hangs" else 20.0)
    try:
        contest.measure(float("inf"), progress=False)
        honest, failed = contest.standings
        assert honest.failure is None
        assert len(honest.figures["decode, batch 2"]) == 2
        assert failed.failure is not None
        assert re.search(REASONS[name], failed.failure), failed.failure
        assert failed.figures.keys() == ({"prefill 16"} if name == "dies later" else set())
        assert contest.peers_in_order[1].process is None
    finally:
        contest.close()


def test_an_interpreter_that_cannot_be_run_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="cannot be run"):
        PeerProcess(Peer("x", tmp_path / "x.py"), tmp_path / "no-python")


def _state(pid: int) -> str:
    """Return the state: S sleeps, R runs, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_waiting_engines_are_stopped_and_none_is_left(tmp_path: Path) -> None:
    contest = _contest(tmp_path, "honest", "honest")
    try:
        contest.measure(float("inf"), progress=False)
        pids = [c.process._process.pid for c in contest.peers_in_order if c.process is not None]  # type: ignore[reportPrivateUsage]
        assert len(pids) == 2
        for pid in pids:
            for _ in range(1000):  # a signal takes a moment to arrive
                if _state(pid) == "T":
                    break
                time.sleep(0.01)
            assert _state(pid) == "T"
    finally:
        contest.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_two_real_engines_and_a_refused_one(
    random_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "_SIDES", (64,))
    options = CompareOptions(
        model=str(random_models["mistral"]), peers="transformers,llama.cpp", threads=1, results=tmp_path, **SMALL
    )
    measured: list[MachineRates] = []
    measure = compare_run._limits

    def faster_each_time(threads: int) -> MachineRates:
        measured.append(replace(measure(threads), bytes_per_s=1e12 * (1 + len(measured) % 3)))
        return measured[-1]

    monkeypatch.setattr(compare_run, "_limits", faster_each_time)
    result = run_compare(options)
    assert len(measured) == 2 + options.rounds, "before, before each round, and after"
    text = (tmp_path / f"{options.name}.json").read_text()
    engines = json.loads(text)["results"]["engines"]
    assert list(engines) == ["twostroke", "transformers", "llama.cpp"]
    for name in ("twostroke", "transformers"):
        assert engines[name]["failure"] is None, engines[name]
        assert set(engines[name]["figures"]) == {
            "prefill 16",
            "decode, batch 1",
            "decode, batch 2",
            "end to end, batch 2",
        }
        assert all(len(figure["tok_s"]) == 2 for figure in engines[name]["figures"].values())
        assert engines[name]["ready_after_s"] > 0
    assert engines["twostroke"]["figures"]["prefill 16"]["twostroke_to_this"] == 1.0
    assert "MistralForCausalLM is not converted" in engines["llama.cpp"]["failure"]
    assert json.loads(text)["results"]["limits"]["read_gb_s"] == 3e3, "the best counts"
    assert set(json.loads(text)["results"]["limits"]) == {
        "read_gb_s",
        "float32_gflop_s",
        "bfloat16_gflop_s",
        "int8_gflop_s",
        "is_estimate",
    }
    assert (tmp_path / f"{options.name}.png").read_bytes().startswith(b"\x89PNG")
    for place in (str(tmp_path), str(random_models["mistral"].parent)):
        assert place not in text
    shown = io.StringIO()
    print_compared(result.results, Console(width=200, file=shown))
    assert "x)" in shown.getvalue()
    assert "not converted to GGUF" in shown.getvalue()


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"precision": "int2"}, "precision"),
        ({"peers": "vllm,ollama"}, "peers"),
        ({"env": ("vllm",)}, "env"),
        ({"env": ("ollama=/bin/sh",)}, "env"),
        ({"env": ("vllm=/nowhere/python",)}, "env"),
        ({"peers": "vllm", "env": ("llama.cpp=/bin/sh",)}, "env"),
        ({"rounds": 0}, "rounds"),
        ({"threads": 0}, "threads"),
        ({"batch_sizes": "1,x"}, "batch_sizes"),
        ({"batch_sizes": "0"}, "batch_sizes"),
        ({"output_length": 2}, "output_length"),
        ({"time_limit": float("nan")}, "time_limit"),
        ({"answer_limit": 0.0}, "answer_limit"),
        ({"plots": "no"}, "plots"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(bad: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        CompareOptions(**bad)
    assert refusal.value.name == name


def test_work_that_does_not_fit_the_context_is_refused(random_models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="640"):
        run_compare(CompareOptions(model=str(random_models["llama"]), results=tmp_path, prefill_length=1000))


def test_a_gguf_file_is_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our engine and the peers that read such files run it; the others report that they do not."""
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "_SIDES", (64,))
    model = fixture("llama-wide-q4_k_m")
    honest = script_peer(tmp_path, "honest")
    monkeypatch.setitem(PEERS, "llama.cpp", Peer("llama.cpp", honest.driver, PEERS["llama.cpp"].gguf_types))
    options = CompareOptions(
        model=str(model),
        peers="llama.cpp,vllm,twostroke-before",
        threads=1,
        plots=False,
        results=tmp_path,
        **(SMALL | {"rounds": 1}),
    )
    engines = run_compare(options).results["engines"]
    assert engines["twostroke"]["failure"] is None, engines
    for ours in ("twostroke", "twostroke-before"):  # of the same environment here
        assert "decode, batch 2" in engines[ours]["figures"], engines[ours]
    order = json.loads(engines["llama.cpp"]["about"]["order"])
    assert (order["model"], order["precision"]) == (str(model.resolve()), "gguf")
    assert "loads no GGUF file" in engines["vllm"]["failure"]
    saved = json.loads((tmp_path / "compare-llama-wide-q4_k_m.json").read_text())
    assert saved["config"]["precision"] == "gguf"


def test_another_version_of_ours_is_compared_when_it_is_asked_for() -> None:
    assert "twostroke-before" not in CompareOptions().peer_names
    assert CompareOptions(model="some.gguf", peers="twostroke-before").name == "compare-some-before"


def test_a_gguf_file_has_its_own_precision() -> None:
    with pytest.raises(InvalidParameter, match="are what they are"):
        CompareOptions(model="some.gguf", precision="int8")
    assert CompareOptions(model="some.gguf", activation_quantization="none").name == "compare-some-activations-none"
