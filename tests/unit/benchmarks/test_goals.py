"""Goals of saved results, for each shape of file."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.goals import goals_of
from twostroke.measure.report import BenchResult


def _missed(results: dict[str, Any], **config: Any) -> dict[str, float]:
    result = BenchResult(bench="x", command="", config=config, workload={}, results=results)
    return {f"{goal.what} {goal.rule}": goal.measured for goal in goals_of(result) if not goal.holds}


def test_a_claim_that_fails_is_a_goal_with_its_prediction() -> None:
    claims = [
        {"what": "a", "predicted": 5, "measured": 4, "rule": "equal", "holds": False},
        {"what": "b", "predicted": 2.0, "measured": 3.0, "rule": "within 20%", "holds": False},
        {"what": "c", "predicted": None, "measured": 3.0, "rule": "<= 1", "holds": False},
        {"what": "d", "predicted": None, "measured": 3.0, "rule": ">= 1", "holds": True},
        {"what": "e", "predicted": 1.0, "measured": 3.0, "rule": "reported", "holds": None},
    ]
    assert _missed({"claims": claims}) == {"a = 5": 4, "b within 20% of 2": 3.0, "c <= 1": 3.0}


def test_what_is_only_reported_has_no_goal() -> None:
    assert goals_of(BenchResult(bench="x", command="", config={}, workload={}, results={"sizes": {}})) == []


def test_a_gate_is_held_to_its_goal_and_the_second_engine_without_drafts_to_none() -> None:
    rows = [
        {"method": method, "batch": 4, "set_acceptance": share, "speedup": speedup}
        for method, share, speedup in (("none", None, 0.9), ("synthetic", 0.0, 0.96), ("ngram", None, 0.97))
    ]
    assert _missed({"gate": rows}) == {"gate, synthetic at 0, batch 4 >= 0.97": 0.96}


def test_the_best_number_of_drafts_counts() -> None:
    rows = [
        {"method": method, "num_drafts": n, "speedup": speedup, "predicted": 1.0, "set_acceptance": None}
        for method, n, speedup in (("eagle", 1, 1.1), ("eagle", 2, 1.3), ("medusa", 1, 1.2), ("ngram", 1, 1.5))
    ]
    found = {"fixed": rows, "model": "embedded"}
    assert _missed(found, options={"task": "code"}) == {"medusa, best number of drafts >= 1.5": 1.2}
    assert "ngram, best number of drafts >= 2" in _missed(found, options={"task": "edit"})
    for task in ("code", "edit"):  # a real model's drafts are held to the same goals
        of_another = _missed({**found, "model": "another"}, options={"task": task})
        assert of_another == _missed(found, options={"task": task})


def test_a_model_with_experts_is_held_to_goals_beside_each_peer() -> None:
    def engine(decode: float, prefill: float = 3.0) -> dict[str, Any]:
        ratios = {"decode, batch 1": decode, "prefill 512": prefill, "end to end, batch 8": 2.5}
        return {"figures": {what: {"twostroke_to_this": ratio} for what, ratio in ratios.items()}}

    ours = engine(1.0) | {"about": {"startup": "model    X, 3,000.0 M parameters (600.0 M for a token), bfloat16"}}
    engines = {"twostroke": ours, "llama.cpp": engine(1.25, prefill=1.9), "ik_llama.cpp": engine(0.9)}
    assert _missed({"engines": engines, "limits": {}}) == {
        "prefill 512, of llama.cpp >= 2": 1.9,
        "decode, batch 1, of ik_llama.cpp >= 1": 0.9,
    }


def test_a_server_is_held_to_the_goal_beside_the_one_that_it_was_measured_with() -> None:
    found = {"ttft_p50_s": {}, "ratios": {"llama-server": 4.4, "vllm": 1.2, "another": 0.5}}
    assert _missed(found) == {"output tokens a second, of llama-server >= 4.5": 4.4}


def test_a_sweep_is_held_to_a_tpot_that_rises_and_to_the_two_strokes() -> None:
    def sweep(*tpots: float, prefill: float, alone: float, together: float) -> dict[str, Any]:
        seconds = {"output_alone": alone, "output_in_the_largest_batch": together}
        rates = {"of_one_request": prefill}
        points = [{"tpot_s": tpot} for tpot in tpots]
        return {"tpot_by_context": points, "prefill_to_decode": rates, "device_seconds_per_1k_tokens": seconds}

    assert _missed(sweep(1.0, 0.97, 1.2, prefill=3.0, alone=4.0, together=2.0)) == {}
    assert _missed(sweep(1.0, 1.2, 0.9, prefill=2.0, alone=3.0, together=2.0)) == {
        "TPOT, largest fall from one context to a longer one <= 0.05": pytest.approx(0.25),
        "prefill's rate over one request's decode >= 3": 2.0,
        "largest batch's rate over one request's >= 2": 1.5,
    }


def test_a_hand_over_is_held_to_bytes_link_and_layers() -> None:
    row = {"transport": "link", "megabytes": 33, "is_exact": True, "gb_per_s": 0.1, "share_of_link": 0.95}
    good, bad = {**row, "layerwise": {"ratio": 1.15}}, {**row, "layerwise": {"ratio": 1.2}, "share_of_link": 0.8}
    shared = {**row, "transport": "shm", "is_exact": False, "layerwise": {"ratio": 1.0}}
    assert _missed({"handovers": [good, bad, shared]}) == {
        "link, 33 MB: layer by layer <= 1.15": 1.2,
        "link, 33 MB: share of the link >= 0.9": 0.8,
        "shm, 33 MB: bytes over the formula's >= 1": 0.0,
        "shm, 33 MB: GB/s >= 5": 0.1,
    }


@pytest.mark.parametrize(
    ("config", "missed"),
    [
        ({"precision": "bf16"}, {"prefill 512, of the best peer >= 1.8"}),
        ({"precision": "int8"}, {"prefill 512, of the best peer >= 2"}),
        ({"precision": "gguf", "model": "m.Q4_K_M.gguf"}, {"prefill 512, of the best peer >= 2.5"}),
        ({"precision": "gguf", "model": "m-IQ4_XS.gguf"}, {"prefill 512, of the best peer >= 2.5"}),
        ({"precision": "gguf", "model": "m.Q6_K.gguf"}, {"prefill 512, of the best peer >= 2"}),
        ({"precision": "gguf", "model": "m.BF16.gguf"}, {"prefill 512, of the best peer >= 1.8"}),
    ],
    ids=str,
)
def test_beside_the_best_peer_by_the_bits_of_a_weight(config: dict[str, Any], missed: set[str]) -> None:
    def peer(ratio: float) -> dict[str, Any]:
        return {"figures": {"prefill 512": {"twostroke_to_this": ratio, "median_tok_s": 10.0}}}

    ours = {**peer(1.0), "about": {"startup": "no weights"}}
    engines = {"twostroke": ours, "slow": peer(9.0), "fast": peer(1.7), "failed": {"figures": {}}}
    assert set(_missed({"engines": engines, "limits": {"read_gb_s": 30}}, **config)) == missed


def test_the_share_of_the_memorys_rate_is_that_of_the_weights() -> None:
    figures = {"decode, batch 1": {"twostroke_to_this": 1.0, "median_tok_s": 20.0}}
    engines = {"twostroke": {"figures": figures, "about": {"startup": "1,000,000,000 bytes of weights, loaded"}}}
    found = {"engines": engines, "limits": {"read_gb_s": 40.0}}
    assert _missed(found, precision="bf16") == {"decode, batch 1, weights over the memory's rate >= 0.9": 0.5}


def test_predictions_quality_start_drill_and_clients() -> None:
    assert _missed({"median_error": 0.1, "p95_error": 0.3}) == {"error of predicted times, p95 <= 0.2": 0.3}
    quality = {"base": {"most_rise": None}, "int8": {"most_rise": 0.01, "perplexity_rise": 0.02}}
    assert _missed(quality) == {"int8: rise of perplexity <= 0.01": 0.02}
    start = {"int8": {"first_token_s": 5.5, "memory_ratio": 1.1}, "torch_alone_bytes": 1}
    assert _missed(start) == {"int8: first token, s <= 5": 5.5}
    pauses = {"gap_ms": {"p50": 51.0}, "last_decode_pause_ms": {"p99": 6_400.0}}
    drill = {"different_streams": 1, "blocks_left": {"a": 0}, **pauses}
    assert set(_missed(drill)) == {
        "streams that came out different <= 0",
        "pause at the death of the only decode worker, p99 ms <= 1000",
    }
    assert _missed({"langchain": {"holds": True}, "lm-eval": {"holds": False}}) == {"lm-eval runs >= 1": 0.0}


def test_another_version_of_ours_is_held_to_its_own_rate() -> None:
    def engine(ratio: float) -> dict[str, Any]:
        return {"figures": {"prefill 512": {"twostroke_to_this": ratio}}, "about": {"startup": ""}}

    engines = {"twostroke": engine(1.0), "twostroke-before": engine(0.98)}
    assert _missed({"engines": engines}) == {"prefill 512, of the version before >= 0.99": 0.98}
