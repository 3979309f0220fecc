"""Scheduler settings that go together, by what the engine is for. What a user sets beside a preset wins.

interactive   people read along: a token at least every 100 ms (ten a second are faster than one reads), so prompts
              go in chunks as large as that leaves, and a first token within 300 ms, so prompts that cannot keep that
              give way to those that can (docs/decisions/027)
batch         nobody waits for a single answer: large steps of many requests, no limit of time
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from twostroke.config.checks import one_of

Preset = Literal["interactive", "batch"]
PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "interactive": {"itl_slo": "100ms", "ttft_slo": "300ms"},
    "batch": {"max_num_batched_tokens": 2048, "max_num_seqs": 256},
}


def settings_of(preset: Preset | None) -> Mapping[str, Any]:
    """Of a preset, by name; none without one.

    Raises:
        InvalidParameter: there is no such preset.
    """
    if preset is None:
        return {}
    one_of("preset", preset, get_args(Preset))
    return PRESETS[preset]
