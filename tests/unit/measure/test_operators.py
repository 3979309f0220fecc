"""`bench kernels`: every operator is right at every level, and what is wrong is found out and not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor

from gguf_files import fixture
from twostroke.errors import InvalidParameter
from twostroke.kernels import native, reference
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.interface import Operators
from twostroke.kernels.native.extension import native as extension
from twostroke.measure import limits
from twostroke.measure.limits import MachineRates, measure_limits
from twostroke.measure.operators import run as operators_run
from twostroke.measure.operators.run import OPERATORS, KernelOptions, measure, num_copies, print_kernels, run_kernels
from twostroke.measure.operators.subjects import (
    FILE_KINDS,
    Point,
    Subject,
    against_reference,
    linear_subjects,
    relative_error,
    sampling_subjects,
)
from twostroke.model.gguf.blocks import REPACKED
from twostroke.model.model_files import find_model

SOME_LIMITS = MachineRates(1e9, {"float32": 1e10, "bfloat16": 2e10, "int8": 1e10})


def test_all_operators_are_right_at_every_level(
    random_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "_SIDES", (64,))
    monkeypatch.setattr(operators_run, "_LEAST_S", 0.0)  # how long they take is not looked at here
    options = KernelOptions(model=str(random_models["qwen3"]), backend="all", quick=True, threads=1, results=tmp_path)
    result = run_kernels(options)
    (path,) = tmp_path.glob("kernels-*-quick.json")
    found = json.loads(path.read_text())["results"]["kernels"]
    assert {one["operator"] for one in found} == set(OPERATORS)
    for operator in OPERATORS:
        backends = {one["backend"] for one in found if one["operator"] == operator}
        assert backends == {"reference", *native.levels()}, operator
    assert {one["kind"] for one in found if one["operator"] == "linear"} == {"bf16", "f32", "int8", "int4"}
    for one in found:
        assert one["is_right"], one
        assert one["seconds"] > 0
    assert str(tmp_path) not in path.read_text()
    print_kernels(result.results, Console(quiet=True))


def _subject(wrong_by: float) -> Subject:
    def build(operators: Operators) -> Any:
        right = torch.arange(1.0, 5.0)
        return lambda _: right if operators.name == "reference" else right * (1 + wrong_by)

    return Subject(
        operator="made up",
        kind="f32",
        points=(Point("4", 32.0, 0.0),),
        constant_bytes=16,
        product="float32",
        build=build,
        error=against_reference(build),
        tolerance=0.01,
    )


@pytest.mark.skipif(not native.is_built(), reason="needs a second backend")
@pytest.mark.parametrize(("wrong_by", "is_right"), [(0.02, False), (0.005, True), (float("nan"), False)])
def test_a_wrong_result_is_told_and_not_timed(wrong_by: float, is_right: bool) -> None:
    (found,) = measure(_subject(wrong_by), native.levels()[-1], SOME_LIMITS, 1, 0)
    assert found.is_right == is_right
    assert (found.seconds is not None) == is_right


def test_a_backends_own_draw_is_what_is_measured(random_models: dict[str, Path]) -> None:
    """A draw from a neighbouring row is detected, in the rows that use it."""
    config = find_model(str(random_models["llama"])).config()

    def wrong_draw(logits: Tensor, *others: Tensor) -> Tensor:
        del others
        return torch.zeros(len(logits), dtype=torch.int64)

    def errors(operators: Operators) -> dict[str, float]:
        subjects = sampling_subjects(config, quick=True)
        return {subject.kind: subject.error(0, subject.build(operators)(0)) for subject in subjects}

    right = reference.operators()
    assert set(errors(right).values()) == {0.0}
    for wrong, kind in (
        (replace(right, gumbel_argmax=wrong_draw), "temperature"),
        (replace(right, filtered_argmax=wrong_draw), "top-k, top-p"),
        (replace(right, argmax=wrong_draw), "greedy"),
    ):
        found = errors(wrong)
        assert found.pop(kind) > 0.5
        assert set(found.values()) == {0.0}


def test_a_gguf_file_has_shapes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "_SIDES", (64,))
    model = fixture("llama-q4_0")
    run_kernels(KernelOptions(model=str(model), operator="rms_norm", backend="reference", quick=True, results=tmp_path))
    saved = (tmp_path / "kernels-llama-q4_0.gguf-quick.json").read_text()
    hidden_size = find_model(str(model)).config().hidden_size
    assert [one["shape"] for one in json.loads(saved)["results"]["kernels"]] == [f"32 rows of {hidden_size}"]
    assert str(model) not in saved


def test_shares_are_told_only_of_what_no_cache_holds() -> None:
    ((warm,), (cold,)) = (tuple(measure(_subject(0.0), "reference", SOME_LIMITS, 1, n)) for n in (0, 64))
    assert warm.share_of_limit is None
    assert cold.seconds is not None
    assert cold.share_of_limit == pytest.approx(32e-9 / cold.seconds)


def test_copies_outlast_the_cache() -> None:
    for constant, cold in ((10, 100), (7, 100), (99, 100), (100, 100), (101, 100)):
        between = (num_copies(constant, cold) - 1) * constant
        assert between >= cold
        assert between - constant < cold


def test_errors_see_shapes_and_numbers_that_are_none() -> None:
    ones: Tensor = torch.ones(3)
    assert relative_error(ones, ones) == 0.0
    assert relative_error(torch.ones(2), ones) == float("inf")
    assert relative_error(ones * float("nan"), ones) == float("inf")


def test_of_two_looks_at_a_machine_the_better_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    other = MachineRates(2e9, {"float32": 1e9, "bfloat16": 1e9, "int8": 4e10})
    best = SOME_LIMITS.best_of(other)
    assert (best.bytes_per_s, dict(best.operations_per_s)) == (2e9, {"float32": 1e10, "bfloat16": 2e10, "int8": 4e10})
    assert SOME_LIMITS.of("int8").flops_per_s == 2e10  # bfloat16's is higher: int8 can be computed in it
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "_SIDES", (64,))
    before = torch.get_num_threads()
    found = measure_limits(operators_for(torch.device("cpu"), torch.bfloat16), 1, repeats=2)
    assert torch.get_num_threads() == before
    assert found.bytes_per_s > 0
    assert all(rate > 0 for rate in found.operations_per_s.values())


@pytest.mark.parametrize(("run_s", "ran_sides"), [(0.001, [64] * 5 + [128] * 5), (0.3, [64] * 4), (3.0, [64])])
def test_products_that_torch_is_slow_at_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, run_s: float, ran_sides: list[int]
) -> None:
    """On processors without instructions for bfloat16 one product of the larger size takes a quarter of a minute."""
    ran: list[int] = []

    def work(side: int) -> Callable[[], object]:
        return lambda: ran.append(side)

    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: run_s * len(ran)))
    monkeypatch.setattr(limits, "_SIDES", (64, 128))
    assert limits._rate(work, 5) > 0  # pyright: ignore[reportPrivateUsage]
    assert ran == ran_sides


def test_bfloat16_products_are_limited_by_those_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "_SIDES", (64,))
    rates = measure_limits(operators_for(torch.device("cpu"), torch.bfloat16), 1, repeats=2).operations_per_s
    assert rates["bfloat16"] >= rates["float32"]


@pytest.mark.parametrize("bad", [{"operator": "gelu"}, {"backend": "sse9"}, {"threads": 0}, {"quick": 1}], ids=str)
def test_options_that_mean_nothing_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        KernelOptions(**bad)


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_types_of_files_are_right_at_the_best_level_and_their_bytes_are_those_of_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators_run, "_LEAST_S", 0.0)
    config = SimpleNamespace(
        hidden_size=256, vocab_size=64, layers=[SimpleNamespace(q_size=64, kv_size=64, intermediate_size=64)]
    )
    (subject,) = [subject for subject in linear_subjects(cast(Any, config), quick=False) if subject.kind == kind]
    form = REPACKED[kind].format
    packed = extension.WeightFormat(
        form.bits, form.group_size, form.has_mins, form.has_super_blocks, {None: 0, "iq4": 1, "fp4": 2}[form.table]
    )
    assert subject.constant_bytes == extension.packed_quantized_bytes(64, 256, True, packed)
    for one in measure(subject, native.levels()[-1], SOME_LIMITS, 1, 0):
        assert one.is_right, one
