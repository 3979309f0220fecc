"""The six stories on engines as they really run, with fewer and shorter requests; how fast they are no test can say."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks.claim import ReproduceOptions
from benchmarks.reproduce.stories import reproduce, tell
from twostroke.lab import lab
from twostroke.lab.stories import STORIES, Story


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_story_whole(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(story.workload, num_requests=6, min_output=4, max_output=24, rate=0.0)
    a, b = story.a, story.b
    if story.name == "prefix":  # one after the other: requests of the same step do not find each other's prefix
        a, b = {**a, "max_num_seqs": 1}, {**b, "max_num_seqs": 1}
    short = replace(story, a=a, b=b, workload=workload)
    monkeypatch.setattr(lab, "RUN_ORDER", "ab")
    monkeypatch.setattr(lab, "BY_NAME", {story.name: short})
    told = asyncio.run(tell(short))
    assert told.num_requests == 6
    assert told.ratio > 0
    texts = [sentence["text"] for sentence in told.verdict["sentences"]]
    assert len(texts) == len(story.claims)
    assert not [text for text in texts if "{" in text or "not measured" in text]
    if story.name == "kv-format":
        assert told.figures["b"]["kv_capacity_tokens"]["median"] > told.figures["a"]["kv_capacity_tokens"]["median"]
    else:
        assert told.num_equal == 6, "the tokens depend on the settings"
    if story.name == "prefix":
        assert told.figures["a"]["cached_share"]["high"] == 0 < told.figures["b"]["cached_share"]["low"]
    if story.name == "speculation":
        assert told.figures["b"]["tokens_per_pass"]["low"] > 1
    if story.name == "pools":
        speeds = told.figures["b"]
        one = speeds["output_tokens_per_s"]["median"] / speeds["tokens_per_s_a_process"]["median"]
        assert one == pytest.approx(2.0)


def test_another_model_is_refused_in_words() -> None:
    found = reproduce(ReproduceOptions(model="a-folder"))
    assert not found.claims
    assert "embedded model, not by a-folder" in found.remarks[0]
