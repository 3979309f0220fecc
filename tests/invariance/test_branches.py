"""Branches of drafts change no bit: of who goes along one, of anybody else, or of what is kept in blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from twostroke import LLM, RequestOutput, SamplingParams
from twostroke.runner.branches import MAX_BRANCHES, Branch, BranchBlocks, blocks_of_branch
from twostroke.speculation.proposer import DraftRequest, Drafts
from twostroke.startup import preparation
from twostroke.startup.prepared import DrafterFacts, GivenDrafter, Prepared

DEPTH = 4
NUM_PLACES = 14
Texts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Knowing:
    """Knows how texts go on: its chain goes wrong somewhere, of its branches one is right and one is not."""

    texts: Texts

    def forget(self, row: int, num_tokens: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [self._drafts(tuple(request.token_ids.tolist()), request.num_drafts) for request in requests]

    def _drafts(self, known: tuple[int, ...], num_places: int) -> Drafts:
        following = next((text[len(known) :] for text in self.texts if text[: len(known)] == known), ())
        dice = random.Random(str(known[-3:]))
        right = following[: dice.randint(0, DEPTH)]
        chain, wrong = list(right), list(right)
        if right and dice.random() < 0.8:
            place = dice.randrange(len(right))
            chain[place] += 1 if chain[place] < 200 else -1
            wrong[place] += 2 if wrong[place] < 200 else -2
        drafts = Drafts(tuple(chain[:num_places]))
        for branch in (tuple(wrong), right):
            if branch and drafts.num_places + 1 + len(branch) <= num_places:
                drafts = drafts._replace(branches=(*drafts.branches, branch))
        return drafts


KNOBS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "block size 1": {"block_size": 1},
    "block size 8, budget 30": {"block_size": 8, "max_num_batched_tokens": 30},
    "contiguous": {"kv_reservation": "contiguous", "enable_prefix_caching": False},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "preempted": {"num_kv_blocks": 24, "max_model_len": 128},
    "every hit is checked": {"kv_check_rate": 1.0},
}


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (o.outputs[0].token_ids, [[(t, p.logprob) for t, p in at.items()] for at in o.outputs[0].logprobs or []])
        for o in outputs
    ]


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "bloom", "embedded"])
@pytest.mark.parametrize("knob", KNOBS)
def test_a_branch_changes_no_bit(
    knob: str, model: str, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"threads": 1, "kv_cache_memory": 1 << 26, **KNOBS[knob]}
    if "num_kv_blocks" in config:
        del config["kv_cache_memory"]
    folder = model if model == "embedded" else str(random_models[model])
    dice = random.Random(5)
    prompts = [{"prompt_token_ids": [dice.randint(5, 200) for _ in range(dice.randint(3, 60))]} for _ in range(8)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True, logprobs=2, presence_penalty=p)
        for i, (t, p) in enumerate([(0.0, 0.0), (0.8, 0.0), (1.0, 0.5), (0.0, 1.0)] * 2)
    ]
    with LLM(folder, **config) as llm:
        alone = llm.generate(prompts, params)
    texts = [(*o.prompt_token_ids, *o.outputs[0].token_ids) for o in alone]

    kept: list[Branch] = []
    keep = BranchBlocks.keep

    def counting(self: BranchBlocks, branch: Branch, num_tokens: int, table: Any) -> None:
        kept.append(branch)
        keep(self, branch, num_tokens, table)

    def find_drafter(given: Any, prepared: Prepared) -> GivenDrafter:
        del given
        layout = prepared.layout
        num_blocks = MAX_BRANCHES * blocks_of_branch(DEPTH, layout)
        return GivenDrafter(Knowing(texts), "one that knows", DrafterFacts(num_branch_blocks=num_blocks))

    monkeypatch.setattr(BranchBlocks, "keep", counting)
    monkeypatch.setattr(preparation, "find_drafter", find_drafter)
    speculation = {"method": "ngram", "num_speculative_tokens": NUM_PLACES}
    with LLM(folder, **config, speculative_config=speculation) as llm:
        branched = llm.generate(prompts, params)
        again = llm.generate(prompts, params)  # from blocks that branches were copied to
    assert essence(branched) == essence(alone)
    assert essence(again) == essence(alone)
    if knob == "preempted":
        assert any(o.metrics.num_preemptions for o in branched if o.metrics), "there was room for all"
    assert len(kept) > 40, "hardly anybody went along a branch"
