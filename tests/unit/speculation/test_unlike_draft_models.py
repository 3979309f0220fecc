"""Draft models whose layers differ in their K and V, or whose rotation is fixed for the longest request: they guess
what they would say themselves, beside any target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_folders import write_random_model
from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.planner.memory import plan_memory
from twostroke.runner.kv_storage import JoinedStorages
from twostroke.startup.assembly import build_engine
from twostroke.startup.preparation import prepare

HEADS: dict[str, dict[str, Any]] = {
    "wide full layers": {
        "head_dim": 16,
        "global_head_dim": 96,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": 4,
    },
    "narrow full layers": {"head_dim": 48, "global_head_dim": 16, "num_key_value_heads": 4},
}
PROMPTS: list[Any] = [{"prompt_token_ids": [(7 * i + n) % 250 for i in range(n)]} for n in (2, 30, 90)]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=1)


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 0.5 * i for i in range(8)],
            },
        },
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
}


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("heads", HEADS)
def test_a_layer_finds_its_own_k_and_v(heads: str, kernels: str, tmp_path: Path) -> None:
    its_own_drafts_stand(str(write_random_model(tmp_path, "gemma4", **HEADS[heads])), kernels)


@pytest.mark.parametrize("rope", ROPES)
def test_its_rotation_is_fixed_for_the_targets_longest_request(rope: str, tmp_path: Path) -> None:
    family, fields = ROPES[rope]
    its_own_drafts_stand(str(write_random_model(tmp_path, family, **fields)), "auto")


def its_own_drafts_stand(model: str, kernels: str) -> None:
    """Check that all drafts are accepted if the target is the same model."""
    given: dict[str, Any] = {"threads": 1, "num_kv_blocks": 100, "max_model_len": 120, "kernels": kernels}
    with LLM(model, **given) as llm:
        alone = llm.generate(PROMPTS, PARAMS)
    itself = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    with LLM(model, speculative_config=itself, **given) as llm:
        drafted = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].logprobs for o in drafted] == [o.outputs[0].logprobs for o in alone]
    for output in drafted:
        assert output.metrics is not None
        assert output.metrics.drafts is not None
        assert output.metrics.drafts.num_accepted_tokens == output.metrics.drafts.num_draft_tokens >= 12


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("heads", HEADS)
def test_its_kv_is_planned_to_the_byte(heads: str, rate: float, tmp_path: Path, random_models: dict[str, Path]) -> None:
    """Layers that read the K and V of others take nothing, and blocks that others are checked with have none."""
    draft = str(write_random_model(tmp_path, "gemma4", **HEADS[heads]))
    drafts = {"method": "draft_model", "model": draft}
    for target in (draft, str(random_models["olmo3"])):
        given: dict[str, Any] = {"threads": 1, "num_kv_blocks": 20, "kv_check_rate": rate}
        config = EngineConfig.from_keywords(model=target, speculative_config=drafts, **given)
        prepared = prepare(config)
        built = build_engine(config)
        runner: Any = built.engine._executor._runner  # type: ignore[attr-defined]
        try:
            kv = runner._proposer._reader._kv
            assert isinstance(kv, JoinedStorages)
            assert kv.nbytes == 20 * prepared.drafter_facts.kv_bytes_per_block
            assert kv.nbytes + runner._kv.nbytes == plan_memory(prepared, 1 << 28).kv_bytes
        finally:
            built.engine.close()
