"""Subjects of the fuzzer: formats of weights and KV, types of a GGUF file's blocks, and kinds of routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.schedules.block_files import HALVES, write_dense_file, write_sparse_file
from benchmarks.schedules.fuzzer import Settings
from benchmarks.schedules.model_folders import WINDOW, write_random_folder

SubjectKind = Literal["weights", "KV", "router"]

DRAFTS: tuple[dict[str, Any], ...] = (
    {},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}},
    {},
    {"speculative_config": {"method": "early_exit", "num_speculative_tokens": 3, "exit_layer": 1}},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}},
)
"""Drafts that take turns. Five have no common divisor with the period of schedules."""


@dataclass(frozen=True, slots=True)
class FuzzSubject:
    """A random model, and the settings that all of its schedules share."""

    kind: SubjectKind
    name: str
    write: Callable[[Path], Path]
    """Writes the model into an empty folder, and returns its path."""
    settings: Settings = field(default_factory=dict[str, Any])
    drafts: Sequence[Settings] = ({},)
    """Settings that take turns."""
    window: int = 0
    """Window of layers that have KV blocks of their own; 0: no layer has one."""


def _write_family(family: str, fields: Settings, folder: Path) -> Path:
    return write_random_folder(folder, family, **fields)


def _dense(kind: SubjectKind, name: str, **settings: Any) -> FuzzSubject:
    return FuzzSubject(kind, name, partial(_write_family, "qwen3", {}), settings)


def _routed(name: str, family: str, window: int = 0, **fields: Any) -> FuzzSubject:
    write = partial(_write_family, family, fields)
    return FuzzSubject("router", name, write, {"dtype": "bfloat16"}, DRAFTS, window)


FORMATS = (
    _dense("weights", "float32"),
    _dense("weights", "bf16", dtype="bfloat16"),
    _dense("weights", "int8", dtype="bfloat16", quantization="int8"),
    _dense("weights", "int4", dtype="bfloat16", quantization="int4"),
    *(FuzzSubject("weights", name, partial(write_dense_file, name)) for name in HALVES),
    *(FuzzSubject("weights", f"experts in {name}", partial(write_sparse_file, name)) for name in ("Q4_K", "MXFP4")),
)
"""Formats of weights. KV is in the type of activations."""
KV_FORMATS = (
    *(_dense("KV", f"KV {name}", dtype="bfloat16", kv_cache_dtype=name) for name in ("f32", "int8", "int4")),
    _dense("KV", "KV int8, weights int4", dtype="bfloat16", quantization="int4", kv_cache_dtype="int8"),
)
ROUTERS = (
    _routed("softmax, renormalized (mixtral)", "mixtral"),
    _routed("softmax, a shared expert with a gate (qwen2_moe)", "qwen2_moe", norm_topk_prob=False),
    _routed("sigmoid with a correction and groups (glm4_moe)", "glm4_moe"),
    _routed("softmax after the choice, biases (gpt_oss)", "gpt_oss", WINDOW),
    _routed("norm before the router, scales of experts, a dense part (gemma4)", "gemma4", WINDOW),
)
"""One family for each kind of router, in bf16, with drafts."""
SUBJECTS = (*FORMATS, *KV_FORMATS, *ROUTERS)
