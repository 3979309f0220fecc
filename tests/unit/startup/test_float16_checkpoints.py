"""Checkpoints in float16, as most AWQ and GPTQ models are: native kernels serve them in bfloat16."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.kernels import native
from twostroke.planner.machine import moved_to_device, prepared_for
from twostroke.startup.preparation import prepare
from twostroke.startup.prepared import Prepared

pytestmark = pytest.mark.skipif(not native.is_built(), reason="no native kernels")


@pytest.fixture(scope="module")
def folder(random_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("float16") / "model"
    shutil.copytree(random_models["qwen3"], made)
    config = json.loads((made / "config.json").read_text())
    config.pop("torch_dtype", None)
    (made / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    return made


def config_of(folder: Path, **given: Any) -> EngineConfig:
    return EngineConfig.from_keywords(model=str(folder), max_model_len=64, num_kv_blocks=16, **given)


def facts(prepared: Prepared) -> tuple[torch.dtype, str, str]:
    return prepared.dtype, prepared.kv_format, prepared.layout.kv_format


def test_native_kernels_serve_it_in_bfloat16_and_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twostroke"):
        prepared = prepare(config_of(folder))
    assert facts(prepared) == (torch.bfloat16, "bf16", "bf16")
    assert prepared.operators.name.startswith("native")
    assert "model: computed in bfloat16 instead of float16 (see --dtype)" in caplog.text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kernels": "reference"}, (torch.float16, "f16", "f16")),
        ({"dtype": "float16"}, (torch.float16, "f16", "f16")),
        ({"dtype": "float32"}, (torch.float32, "f32", "f32")),
        ({"kv_cache_dtype": "int8"}, (torch.bfloat16, "int8", "int8")),
    ],
    ids=str,
)
def test_what_is_asked_for_counts(folder: Path, given: dict[str, Any], expected: tuple[torch.dtype, str, str]) -> None:
    assert facts(prepare(config_of(folder, **given))) == expected


def test_a_gpu_has_it_in_float16(folder: Path) -> None:
    config = config_of(folder)
    of_card = (torch.float16, "f16", "f16")
    assert facts(prepared_for(config, "T4")) == of_card
    assert facts(moved_to_device(prepare(config), "T4")) == of_card


def test_its_tokens_are_those_of_bfloat16(folder: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def tokens(**given: Any) -> list[int]:
        with LLM(str(folder), threads=1, max_model_len=64, num_kv_blocks=16, **given) as llm:
            return list(llm.generate([{"prompt_token_ids": [5, 9, 2]}], params)[0].outputs[0].token_ids)

    assert tokens() == tokens(dtype="bfloat16")
