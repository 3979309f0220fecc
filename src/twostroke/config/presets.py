"""Scheduler settings for typical uses of the engine. A setting given together with a preset wins.

interactive   People read along. A token at least every 100 ms (ten per second are faster than people read) limits
          the prefill chunks. Prompts that cannot reach a first token within 300 ms give way to those that can
          (docs/decisions/027).
batch         No single answer is urgent: large steps of many requests, no time limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from twostroke.config.checks import check_choice

Preset = Literal["interactive", "batch"]
PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "interactive": {"itl_slo": "100ms", "ttft_slo": "300ms"},
    "batch": {"max_num_batched_tokens": 2048, "max_num_seqs": 256},
}


def settings_of(preset: Preset | None) -> Mapping[str, Any]:
    """Return the settings of a preset; empty without one.

    Raises:
        InvalidParameter: there is no such preset.
    """
    if preset is None:
        return {}
    check_choice("preset", preset, get_args(Preset))
    return PRESETS[preset]
