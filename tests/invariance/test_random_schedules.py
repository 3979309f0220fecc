"""Random schedules: whatever the engine is told to do with a request, it gives the bits of the request run alone.

`python -m benchmarks reproduce schedules --full` runs 1,000 schedules of each format and router at the best level of
the processor, and 100 at each lower one. `make soak` runs 1,000 with branches of drafts, too. The second tier runs the
first 12 of a format or a router, 4 of a type of blocks, and 3 at lower levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from benchmarks.schedules.fuzzer import AnswersAlone, FuzzOutcome, run_schedules
from benchmarks.schedules.subjects import DRAFTS, FORMATS, KV_FORMATS, ROUTERS, SUBJECTS, FuzzSubject
from knowing_drafter import KNOWING, count_branches, knowing_drafts
from tiers import EXAMPLES, examples
from twostroke.kernels import native
from twostroke.kernels.native.linear import Panels
from twostroke.model.gguf.blocks import REPACKED
from twostroke.sampling.sampler import Sampler

BY_NAME = {subject.name: subject for subject in SUBJECTS}
BLOCK_TYPES = [subject for subject in FORMATS if subject.name in REPACKED]
FLOATS = [subject for subject in FORMATS if subject not in BLOCK_TYPES]
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "int4 beside float32": {"quantization": "int4"},
    "int4, activations as they are": {"dtype": "bfloat16", "quantization": "int4", "activation_quantization": "none"},
}
"""Limit for the same dense model."""
WITH_BRANCHES = [*DRAFTS[:2], {"speculative_config": KNOWING}, DRAFTS[3], {"speculative_config": KNOWING}]
"""No drafts, chains that mostly fall, and branches."""


def num_schedules(usual: int) -> int:
    return 1000 if settings().max_examples > EXAMPLES else examples(usual)


def run(subject: FuzzSubject, folder: Path, seeds: Iterable[int], **changes: Any) -> FuzzOutcome:
    given, model = {**subject.settings, **changes}, str(subject.write(folder))
    alone = AnswersAlone.of(model, given, subject.window)
    assert len(set(alone.hashes)) == len(alone.requests)
    return run_schedules(model, alone, seeds, given, subject.drafts)


def check(outcome: FuzzOutcome, window: int = 0) -> None:
    """Expect no answer of other bits, and schedules that were not too easy. Layers with a window hold little KV."""
    assert not outcome.differing, outcome.differing[0]
    if outcome.num_schedules >= (100 if window else 12):
        assert outcome.num_preemptions > outcome.num_schedules // 20, "hardly anybody was preempted"
    if outcome.num_schedules >= 12:
        assert outcome.num_cached_tokens > outcome.num_schedules, "hardly anything was found in the prefix cache"


@pytest.mark.parametrize("subject", [*FLOATS, *KV_FORMATS, *ROUTERS], ids=lambda subject: subject.name)
def test_every_schedule_gives_the_bits_of_each_request_alone(subject: FuzzSubject, tmp_path: Path) -> None:
    check(run(subject, tmp_path, range(num_schedules(12))), subject.window)


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_schedules_with_other_settings(name: str, tmp_path: Path) -> None:
    check(run(BY_NAME["float32"], tmp_path, range(num_schedules(12)), **OTHER_SETTINGS[name]))


def test_schedules_on_torchs_operators(tmp_path: Path) -> None:
    """They prove themselves at every start, so only the long and the crowded schedules are theirs."""
    check(run(BY_NAME["int8"], tmp_path, range(5, num_schedules(12), 6), kernels="reference"))


@pytest.mark.parametrize("subject", BLOCK_TYPES, ids=lambda subject: subject.name)
def test_schedules_of_a_file_of_blocks(subject: FuzzSubject, tmp_path: Path) -> None:
    check(run(subject, tmp_path, range(num_schedules(4))))


@pytest.mark.parametrize("level", native.levels()[:-1])
@pytest.mark.parametrize("name", ["bf16", "int4", "Q4_K", "IQ4_XS", "experts in MXFP4"])
def test_schedules_at_lower_levels(name: str, level: str, tmp_path: Path) -> None:
    check(run(BY_NAME[name], tmp_path, range(num_schedules(3)), kernels=level))


@pytest.mark.parametrize("subject", ROUTERS, ids=lambda subject: subject.name)
def test_schedules_with_experts_and_branches(
    subject: FuzzSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(subject.write(tmp_path))
    alone = AnswersAlone.of(model, subject.settings, subject.window)
    texts = zip(alone.requests, alone.token_ids, strict=True)
    knowing_drafts(monkeypatch, [(*one.prompt, *tokens) for one, tokens in texts])
    kept, num = count_branches(monkeypatch), num_schedules(12)
    check(run_schedules(model, alone, range(num), subject.settings, WITH_BRANCHES), subject.window)
    assert len(kept) > num // 10 or num < len(WITH_BRANCHES), "hardly anybody went along a branch"


def test_every_format_and_router_of_the_project_is_a_subject() -> None:
    exact = {name for name, layout in REPACKED.items() if layout.is_exact}
    assert exact | {"Q4_1", "Q5_1"} == {subject.name for subject in BLOCK_TYPES}
    assert len(ROUTERS) == 5
    assert len(BY_NAME) == len(SUBJECTS)


def last_bit_by_rows(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a product whose last bit depends on the number of rows."""

    def wrong(self: Panels, x: Tensor, *others: Any, **how: Any) -> Tensor:
        found = right(self, x, *others, **how)
        return found if len(x) == 1 else torch.nextafter(found, torch.full_like(found, torch.inf))

    return wrong


def noise_of_the_neighbour(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return keys of noise in another order than the rows of the batch."""
    return lambda self, states: right(self, states).roll(1, 0)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(Panels, "multiply", last_bit_by_rows), (Sampler, "_keys", noise_of_the_neighbour)],
    ids=["a product by the number of rows", "noise in another order"],
)
def test_a_wrong_operator_is_found(
    owner: type, name: str, wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    found = run(BY_NAME["float32"], tmp_path, (3, 11)).differing
    assert found
    assert "num_kv_blocks" in found[0], "the settings of the schedule are named"


def test_sums_in_another_order_are_found(tmp_path: Path) -> None:
    changes = {"kernels": "reference", "batch_invariant": False}
    assert run(BY_NAME["float32"], tmp_path, (11,), **changes).differing


def test_an_engine_that_fails_is_found(tmp_path: Path) -> None:
    found = run_schedules(str(tmp_path), AnswersAlone([], [], []), (0, 1), {})
    assert [words.partition(":")[0] for words in found.differing] == ["schedule 0", "schedule 1"]
    assert found.num_schedules == 2
