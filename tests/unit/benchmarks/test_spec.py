"""`benchmarks spec`: its arithmetic on made-up steps, its prompts and proposer, and all of it on few tokens."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from benchmarks.spec.run import SpecOptions, off_from, print_spec, run_spec
from benchmarks.spec.synthetic import SyntheticProposer, predicted_speedup
from twostroke.config.load import LoadConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.errors import InvalidParameter
from twostroke.measure.spec.measure import (
    DecodeStep,
    SpecEngine,
    SpecRun,
    Task,
    prompts,
)
from twostroke.model.model_files import find_model
from twostroke.speculation.proposer import DraftRequest
from twostroke.startup.prepared import ProvidedDrafter
from twostroke.tokenizer.tokenizer import Tokenizer

LOAD = LoadConfig(threads=1)
PROMPT, OTHER = (5, 6, 7), (5, 6, 8)
VOCAB = 100


def step(
    step_s: float, rounds: tuple[tuple[int, int], ...] = (), draft_s: float = 0.0, requests: int = 1
) -> DecodeStep:
    """Return a step of so many requests; each makes a token, and one more for each accepted draft."""
    num_tokens = requests + sum(accepted for _, accepted in rounds)
    return DecodeStep(requests, sum(drafted for drafted, _ in rounds), rounds, num_tokens, step_s, draft_s)


def test_a_run_is_told_by_its_steps() -> None:
    steps = (step(1.5, ((3, 3), (3, 1)), 0.3, requests=3), step(1.0, requests=2), step(1.7, ((2, 0),), 0.5))
    run = SpecRun({}, steps, decode_s=5.0)
    assert run.rate == pytest.approx((7 + 2 + 1) / 5.0)
    # verified: three accepted; one accepted and one rejected; one rejected
    assert run.acceptance == pytest.approx(4 / 6)
    assert run.tokens_per_round == pytest.approx(1 + 4 / 3)
    assert run.drafts_per_round == pytest.approx(8 / 6)
    assert run.drafting_share == pytest.approx(3 / 6)
    assert run.verify_s() == pytest.approx(1.2)  # the middle one of 1.2, 1.0 and 1.2
    assert run.verify_s(2) == pytest.approx(1.0)  # two requests, no drafts
    assert run.verify_s(9) == run.verify_s(3 + 6) == pytest.approx(1.2)
    assert run.verify_s(64) == run.verify_s(), "no step was of that size: all count"
    assert run.draft_s() == pytest.approx(0.4)  # between 0.3 and 0.5: the step without drafts has no part in it


def test_a_run_without_drafts_has_no_acceptance() -> None:
    run = SpecRun({}, (step(1.0), step(3.0)), decode_s=4.0)
    assert run.acceptance is run.tokens_per_round is None
    assert run.drafts_per_round == run.drafting_share == run.draft_s() == 0.0
    assert run.verify_s() == pytest.approx(2.0)


def test_the_prediction_is_the_one_computed_by_hand() -> None:
    plain = SpecRun({}, (step(1.0),) * 3, decode_s=3.0)
    always = SpecRun({}, (step(1.5, ((2, 1),), 0.3), step(1.5, ((2, 0),), 0.3)), decode_s=3.0)
    # E = 1 + 1/2 + 1/4 tokens for (1.2 + 0.3) / 1.0 of the time
    assert predicted_speedup(plain, always, 2, 0.5) == pytest.approx(1.75 / 1.5)
    # one pass in three found nothing to draft: a token at the price of one
    often = SpecRun({}, (*always.steps, step(1.0)), decode_s=4.0)
    assert predicted_speedup(plain, often, 2, 0.5) == pytest.approx((2 * 1.75 + 1) / (2 * 1.5 + 1))
    assert predicted_speedup(plain, plain, 2, 0.5) == pytest.approx(1.0)
    # drafts that are never accepted cost their time
    assert predicted_speedup(plain, always, 2, 0.0) == pytest.approx(1 / 1.5)


def asked(tokens: tuple[int, ...], num_drafts: int, row: int = 0) -> DraftRequest:
    return DraftRequest(row, np.array(tokens, np.int32), num_drafts, cast(Any, None), ())


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_the_synthetic_proposer_is_right_as_often_as_it_is_told_to_be(acceptance: float) -> None:
    output = tuple(i % VOCAB for i in range(4000))
    proposer = SyntheticProposer(VOCAB, acceptance, {PROMPT: output})
    (drafts,) = proposer.propose([asked(PROMPT, len(output))])
    assert len(drafts.chain) == len(output)
    right = np.mean([draft == token for draft, token in zip(drafts.chain, output, strict=True)])
    assert right == pytest.approx(acceptance, abs=0.03)
    assert all(0 <= draft < VOCAB for draft in drafts.chain)
    # a place is right or wrong whenever it is asked for, so runs that are compared have the same drafts
    (later,) = proposer.propose([asked(PROMPT + output[:100], 50)])
    assert later.chain == drafts.chain[100:150]


def test_the_synthetic_proposer_knows_requests_by_their_prompts() -> None:
    proposer = SyntheticProposer(VOCAB)
    proposer.learn({PROMPT: (1, 2, 3), OTHER: (4, 5, 6)})
    both = [asked((*PROMPT, 1), 8, row=0), asked((*OTHER, 4, 5), 8, row=1)]
    assert [drafts.chain for drafts in proposer.propose(both)] == [(2, 3), (6,)]
    proposer.forget(0, 2)  # blocks were given back, the request lives on
    assert proposer.propose(both[:1])[0].chain == (2, 3)
    proposer.forget(0, 0)  # the request has ended; another one gets the row
    assert proposer.propose([asked(OTHER, 2, row=0)])[0].chain == (4, 5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return find_model("embedded").tokenizer()


@pytest.mark.parametrize("task", ["code", "edit", "random"])
def test_prompts_have_their_length_and_are_the_same_again(task: Task, tokenizer: Tokenizer) -> None:
    found = prompts(task, 5, 66, tokenizer, 4096, seed=3)
    assert [len(prompt) for prompt in found] == [66] * 5
    assert all(0 <= token_id < 4096 for prompt in found for token_id in prompt)
    assert len(set(found)) == 5
    assert found == prompts(task, 5, 66, tokenizer, 4096, seed=3)
    assert found[:2] == prompts(task, 2, 66, tokenizer, 4096, seed=3), "more prompts change none of the first"
    assert found != prompts(task, 5, 66, tokenizer, 4096, seed=4)


def test_edits_begin_again_what_is_to_be_edited(tokenizer: Tokenizer) -> None:
    for code, edit in zip(*(prompts(task, 3, 66, tokenizer, 4096) for task in ("code", "edit")), strict=True):
        whole = 3 * 66 // 4
        assert edit[:whole] == code[:whole]
        assert edit[whole:] == edit[: 66 - whole]


def test_prompts_longer_than_every_text_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match=r"prompt_tokens=1000000: is more than the \d+ tokens.*Give fewer") as no:
        prompts("edit", 1, 1_000_000, tokenizer, 4096)
    assert no.value.remedy
    assert len(prompts("random", 1, 1_000_000, tokenizer, 4096)[0]) == 1_000_000


def test_an_engine_counts_what_it_drafts_and_says_the_same_with_drafts(tokenizer: Tokenizer) -> None:
    pair = prompts("random", 2, 12, tokenizer, 4096)
    synthetic, k, num_outputs = SyntheticProposer(4096), 3, 14
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=k)
    plain = SpecEngine(LOAD, 2, 32)
    drafting = SpecEngine(LOAD, 2, 32, config, lambda _: ProvidedDrafter(synthetic, "synthetic"))
    for temperature, seed in ((0.0, 0), (1.0, 7)):
        without = plain.run(pair, num_outputs, temperature, seed)
        synthetic.learn(without.outputs)
        assert [len(output) for output in without.outputs.values()] == [num_outputs] * 2
        assert sum(step.num_tokens for step in without.steps) == 2 * (num_outputs - 1), "the prompt makes the first one"
        assert without.acceptance is None
        for acceptance in (1.0, 0.0):
            synthetic.acceptance = acceptance
            run = drafting.run(pair, num_outputs, temperature, seed)
            assert run.outputs == without.outputs
            assert run.acceptance == acceptance
            assert sum(step.num_tokens for step in run.steps) == 2 * (num_outputs - 1)
            assert all(0 <= step.draft_s <= step.step_s for step in run.steps)
            rounds = [a_round for step in run.steps for a_round in step.rounds]
            if acceptance:  # 13 tokens: three times 1 + 3, and the last one, after which no draft fits
                assert rounds == [(k, k)] * 6
                assert len(run.steps) == 4
                assert run.tokens_per_round == 1 + k
                assert run.drafts_per_round == pytest.approx(6 * k / 8)
            else:
                assert len(run.steps) == num_outputs - 1
                assert run.tokens_per_round == 1.0
    assert plain.run(pair, 8, 1.0, seed=1).outputs != plain.run(pair, 8, 1.0, seed=2).outputs
    drafting.close()
    plain.close()


def test_a_small_run_saves_and_shows_every_figure(tmp_path: Path) -> None:
    options = SpecOptions(
        methods="synthetic,early_exit,ngram,none",
        acceptances="0,1",
        num_drafts="2",
        gate_acceptances="1",
        batch_sizes="1,2",
        temperatures="0.8",
        exit_layer=2,
        task="edit",
        prompt_tokens=16,
        output_tokens=12,
        rounds=2,
        name="small",
        results=tmp_path,
    )
    run_spec(options, LOAD)
    text = (tmp_path / "small.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text, "no place of this machine"
    saved = json.loads(text)
    assert saved["command"].startswith(
        "python -m benchmarks spec --methods synthetic,early_exit,ngram,none --acceptances 0,1"
    )
    assert saved["workload"] == {"prompt_tokens": 16, "output_tokens": 12}
    assert (saved["warmup"], saved["repeats"]) == (1, 2)
    found = saved["results"]
    fixed = [(row["method"], row["num_drafts"], row["set_acceptance"]) for row in found["fixed"]]
    assert fixed == [("synthetic", 2, 0.0), ("synthetic", 2, 1.0), ("early_exit", 2, None), ("ngram", 2, None)]
    never, always = found["fixed"][:2]
    assert (never["acceptance"], never["tokens_per_pass"]) == (0.0, 1.0)
    assert always["acceptance"] == 1.0
    assert 2 < always["tokens_per_pass"] <= 3
    assert all(row["low"] <= row["speedup"] <= row["high"] for row in found["fixed"] + found["gate"])
    cases = itertools.product((1, 2), (("synthetic", 1.0), ("early_exit", None), ("ngram", None), ("none", None)))
    gate = [(row["batch"], (row["method"], row["set_acceptance"])) for row in found["gate"]]
    assert gate == list(cases)
    assert all(row["drafts_per_pass"] == 0.0 for row in found["gate"] if row["method"] == "none")
    (alpha,) = found["alpha"]
    assert (alpha["method"], alpha["temperature"]) == ("early_exit", 0.8)

    console = Console(width=160, record=True, file=io.StringIO())
    print_spec(found, console)
    shown = console.export_text()
    for words in ("one request, embedded", "the gate", "min(1, p/q)", "speed-up", "early_exit: ", "ngram: "):
        assert words in shown
    lines = [line.split() for line in shown.splitlines()]
    shares = [f"{alpha[name]:.3f}" for name in ("alpha", "expected", "at_least", "classical")]
    assert ["early_exit", "0.8", str(alpha["num_drafts"]), *shares] in lines


def test_what_was_not_measured_is_not_shown() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    print_spec({"model": "m", "fixed": [], "gate": [], "alpha": []}, console)
    assert not console.export_text().strip()


def test_the_gate_is_off_from_the_smallest_batch_with_hardly_a_draft() -> None:
    def row(method: str, batch: int, acceptance: float | None, drafts: float) -> dict[str, Any]:
        return {"method": method, "batch": batch, "set_acceptance": acceptance, "drafts_per_pass": drafts}

    rows = [row("synthetic", 1, 0.5, 2.0), row("ngram", 1, None, 0.2), row("synthetic", 4, 0.5, 0.09)]
    rows += [row("ngram", 4, None, 0.1), row("synthetic", 16, 0.5, 0.0)]
    assert off_from(rows) == ["synthetic at 0.5: off from 4 requests on", "ngram: on at every size"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"methods": "ngram,medsua"}, "methods='ngram,medsua': names 'medsua'; known: synthetic, ngram.*Name some"),
        ({"acceptances": "0.5,1.2"}, r"acceptances='0.5,1.2': has 1.2; from 0 to 1\. Give numbers"),
        ({"acceptances": "nan"}, r"acceptances='nan': has nan; from 0 to 1\. Give numbers"),
        ({"gate_acceptances": "half"}, r"gate_acceptances='half': has 'half', which is no number; from 0 to 1\. Give"),
        ({"num_drafts": "1,1.5"}, r"num_drafts='1,1.5': has 1.5, which is no whole number; from 1 to 64\. Give"),
        ({"num_drafts": "65"}, r"num_drafts='65': has 65; from 1 to 64\. Give numbers"),
        ({"batch_sizes": "0"}, r"batch_sizes='0': has 0; from 1 to 1024\. Give numbers"),
        ({"temperatures": "-1"}, r"temperatures='-1': has -1; from 0 to 100\. Give numbers"),
        (
            {"methods": "ngram", "exit_layer": 3},
            "exit_layer=3: changes nothing: 'early_exit' is not among.*or leave it",
        ),
        ({"methods": "ngram", "draft_model": "m"}, "draft_model='m': changes nothing: 'draft_model' is not among"),
        ({"task": "prose"}, "task='prose': must be one of 'code', 'edit', 'random'"),
        ({"rounds": 1}, "rounds=1: must be a whole number, 2 to"),
        ({"prompt_tokens": 0}, "prompt_tokens=0: must be a whole number, 2 to"),
        ({"output_tokens": 1.5}, "output_tokens=1.5: must be a whole number, 2 to"),
        ({"name": "../x"}, "name='../x': must be a file name.*The folder is --results"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        SpecOptions(**given)


def test_a_method_is_measured_once_however_often_it_is_named() -> None:
    assert SpecOptions(methods="ngram,,synthetic,ngram").who == ("ngram", "synthetic")


def test_results_that_could_not_be_saved_are_not_measured() -> None:
    with pytest.raises(InvalidParameter, match="results="):
        run_spec(SpecOptions(results=Path("/dev/null")), LoadConfig(model="/no/such/model"))
