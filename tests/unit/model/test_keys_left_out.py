"""A config.json that leaves keys out, or has them in an older spelling, means what transformers makes of it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import transformers

from oracle import naive_model
from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.config.model import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
BY_TYPE: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e5},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {**SIZES, "use_sliding_window": True}),
    "smollm3-windows": ("SmolLM3", {**SIZES, "use_sliding_window": True, "sliding_window": 64}),
    "smollm3-windows-off": ("SmolLM3", {**SIZES, "sliding_window": 64, "no_rope_layer_interval": 2}),
    "smollm3-windows-of-some": (
        "SmolLM3",
        {**SIZES, "use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [0, 0, 1, 1, 1, 0, 1, 1]},
    ),
    "olmo3": ("Olmo3", SIZES),
    "olmo3-stretched": ("Olmo3", {**SIZES, "rope_scaling": YARN}),
    "olmo3-stretched-beside-its-layers": ("Olmo3", {**SIZES, "rope_parameters": BY_TYPE, "rope_scaling": YARN}),
    "gemma3-stretched-beside-its-layers": (
        "Gemma3",
        {"rope_parameters": BY_TYPE, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    **{
        f"{kind.lower()}-{'window' if window else 'no-window'}-pattern-{pattern or 'left-out'}": (
            kind,
            {
                **SIZES,
                "vocab_size": 262_144,  # Gemma 4's has a second table of that size
                "sliding_window": window,
                **({"sliding_window_pattern": pattern} if pattern else {}),
            },
        )
        for kind in ("Cohere2", "Exaone4", "Gemma2", "Gemma3", "Gemma4", "Ministral", "Olmo3")
        for window in (64, None)
        for pattern in (None, 3)
        if window or kind == "Ministral"  # transformers makes no masks of the others without a window
    },
    **{
        f"phi3-{name}": (
            "Phi3",
            {
                **SIZES,
                "max_position_embeddings": 16_384,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            },
        )
        for name in ("longrope", "yarn")
    },
}
"""transformers' kind, and what the file has."""
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {}),
    "gemma4": ("Gemma4", {}),
    "mistral3": ("Mistral3", {"model_type": "mistral"}),
    "mistral3-without-a-kind": ("Mistral3", {"num_hidden_layers": 2}),
    "mistral3-of-ministral": ("Mistral3", {"model_type": "ministral"}),
    "mistral3-of-ministral3": ("Mistral3", {"model_type": "ministral3"}),
    "qwen2.5-vl": ("Qwen2_5_VL", {}),
    "qwen2.5-vl-rotation": ("Qwen2_5_VL", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
    "qwen2.5-vl-windows": ("Qwen2_5_VL", {"use_sliding_window": True, "num_hidden_layers": 81}),
    "qwen3-vl": ("Qwen3VL", {}),
}
"""transformers' kind of the whole, and what `text_config` has."""


def check(architecture: str, written: dict[str, Any], meant: dict[str, Any]) -> None:
    """Compare what is read from a file with what is read from the same config as transformers writes it in full."""
    written, meant = ({**given, "architectures": [architecture], "dtype": "float32"} for given in (written, meant))
    assert ModelConfig.from_hf(written) == ModelConfig.from_hf(meant)


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_out_is_as_in_transformers(case: str) -> None:
    kind, written = CASES[case]
    theirs = naive_model.config_class(kind)(**deepcopy(written)).to_dict()  # it changes what it is given
    check(naive_model.model_class(kind).__name__, written, theirs)


NEEDED = {"Dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}}
"""Sizes without which transformers cannot build a model."""


@pytest.mark.parametrize("architecture", ARCHITECTURE_TRAITS)
def test_a_file_with_sizes_alone_is_as_in_transformers(architecture: str) -> None:
    kind = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    # heads that are a multiple of every family's KV heads
    written = {**SIZES, "vocab_size": 262_144, "hidden_size": 10_240, "num_attention_heads": 160, "ffn_dim": 96}
    del written["num_key_value_heads"]
    written |= NEEDED.get(kind, {})
    check(architecture, written, naive_model.config_class(kind)(**written).to_dict())


@pytest.mark.parametrize("case", TEXT_MODELS)
def test_what_a_text_config_leaves_out_is_as_in_transformers(case: str) -> None:
    kind, written = TEXT_MODELS[case]
    theirs = getattr(transformers, f"{kind}Config")(text_config=deepcopy(written)).to_dict()
    check(f"{kind}ForConditionalGeneration", {"text_config": written}, {"text_config": theirs["text_config"]})
