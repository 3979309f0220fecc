"""config.json, the tensors and the machine are compared before anything large is read or allocated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from model_folders import write_random_model
from twostroke import LLM
from twostroke.errors import CorruptCheckpoint, DoesNotFit, InvalidParameter
from twostroke.kernels import native


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size"])
def test_sizes_of_no_tensor_are_no_question_of_memory(name: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, "llama")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: 2_000_000_000}))
    with pytest.raises(CorruptCheckpoint, match=r"wrong shape: .* instead of \[(\d+, )?2000000000"):
        LLM(str(folder))


def test_more_threads_than_the_machine_can_run(random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.startup.preparation.usable_processors", lambda: 2)
    with pytest.raises(InvalidParameter, match="threads=17: must be at most 8 for each of the 2 processors here"):
        LLM(str(random_models["llama"]), threads=17)


def test_weights_that_do_not_fit(random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.startup.memory.free_host_bytes", lambda: 1000)
    with pytest.raises(
        DoesNotFit, match=r"the weights of \S+ take [\d,]+ bytes; 1,000 are free on cpu.* smaller model"
    ):
        LLM(str(random_models["llama"]))


@pytest.mark.skipif(not native.is_built(), reason="torch's operators keep no weight quantized")
def test_a_quantization_that_would_fit_is_named(
    random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str | None, int] = {}
    for quantization in (None, "int8", "int4"):
        monkeypatch.setattr("twostroke.startup.memory.free_host_bytes", lambda: 1000)
        with pytest.raises(DoesNotFit) as caught:
            LLM(str(random_models["llama"]), quantization=quantization)
        sizes[quantization] = int(re.findall(r"take ([\d,]+) bytes", str(caught.value))[0].replace(",", ""))
    for quantization in ("int8", "int4"):
        monkeypatch.setattr("twostroke.startup.memory.free_host_bytes", lambda free=sizes[quantization] + 1: free)
        said = f"With --quantization {quantization} they take {sizes[quantization]:,}; or free"
        with pytest.raises(DoesNotFit, match=re.escape(said)):
            LLM(str(random_models["llama"]))


@pytest.mark.parametrize(("width", "remedy"), [(80, r"None of 32, 64, 128 does; use int8"), (96, "Use 32, or int8")])
def test_groups_divide_the_width(width: int, remedy: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, "llama", intermediate_size=width)
    said = rf"group_size=64: does not divide the {width} inputs of model\.layers\.0\.mlp\.down_proj\.weight.* {remedy}"
    with pytest.raises(InvalidParameter, match=said):
        LLM(str(folder), quantization="int4", group_size=64)
