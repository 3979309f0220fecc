"""A config.json that leaves keys out, or has them in an older spelling, means what transformers makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from oracle import naive_model
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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {**SIZES, "use_sliding_window": True}),
    "smollm3-windows": ("SmolLM3", {**SIZES, "use_sliding_window": True, "sliding_window": 64}),
    "smollm3-windows-off": ("SmolLM3", {**SIZES, "sliding_window": 64, "no_rope_layer_interval": 2}),
    "smollm3-windows-of-some": (
        "SmolLM3",
        {**SIZES, "use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [0, 0, 1, 1, 1, 0, 1, 1]},
    ),
}
"""transformers' kind, and what the file has."""


def check(architecture: str, written: dict[str, Any], meant: dict[str, Any]) -> None:
    """Compare what is read from a file with what is read from the same config as transformers writes it in full."""
    written, meant = ({**given, "architectures": [architecture], "dtype": "float32"} for given in (written, meant))
    assert ModelConfig.from_hf(written) == ModelConfig.from_hf(meant)


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_out_is_as_in_transformers(case: str) -> None:
    kind, written = CASES[case]
    theirs = naive_model.config_class(kind)(**written).to_dict()
    check(naive_model.model_class(kind).__name__, written, theirs)
