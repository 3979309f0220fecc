"""Answers and event logs of an earlier commit: what a change of structure must leave as it is, to the last bit.

    PYTHONPATH=tests python -m recorded_answers --write     record this commit's, in a commit of their own
    tests/invariance/test_recorded_answers.py               compares

Weights come from numpy, whose numbers are the same everywhere. Tokens are recorded once, at the level avx2, whose bits
are those of every level but those with products of bfloat16; log-probabilities pass through torch, and are recorded for
each of its instruction sets that a recording ran on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from model_folders import SHAPES, write_random_model
from twostroke import LLM, SamplingParams
from twostroke.engine.event_sinks import merged_events
from twostroke.events import RequestArrived
from twostroke.explain.names import name_of
from twostroke.explain.timeline import timeline_of

RECORDING = Path(__file__).parent / "fixtures" / "answers.json"
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int4"},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8", "kernels": "reference"},
}
"""Of weights and KV together."""
ON_TORCH = ("float16", "fp8")
"""Formats that torch's operators serve: their tokens, too, are those of an instruction set."""
KV_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "as they are": {},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV int4": {"kv_cache_dtype": "int4"},
}
"""For files whose weights are quantized."""
LOGS = Path(__file__).parent / "fixtures" / "event_logs"
RUNS: Mapping[str, tuple[str, ...]] = {
    "one engine": ("engine.jsonl",),
    "pools": ("pools.gateway.jsonl", "pools.prefill-0.1.jsonl", "pools.decode-0.1.jsonl"),
}
"""Event logs of that commit: drafts, a prefix cache, two answers to one prompt, a full pool; and KV handed over."""
TIMELINES = LOGS / "timelines.json"
_SPREAD = 0.15


def instruction_set() -> str:
    """The one that torch's operators use here."""
    return str(torch.backends.cpu.get_cpu_capability())


def write_model(folder: Path, family: str) -> Path:
    """Write a random model whose weights are the same on every machine."""
    write_random_model(folder, family)
    path = folder / "model.safetensors"
    rng = np.random.default_rng(7)
    weights: dict[str, Any] = {}
    for name, values in sorted(load_file(path).items()):
        noise = _SPREAD * rng.standard_normal(values.shape, np.float32)
        weights[name] = np.asarray((1 + noise) if values.ndim == 1 and "norm" in name else noise, np.float32)
    save_file(weights, path, {"format": "pt"})
    return folder


def digests(model: str, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return digests of the tokens and of the log-probabilities that some requests are answered."""
    prompts, params = _load()
    settings: dict[str, Any] = {"threads": 1, "num_kv_blocks": 96, "max_model_len": 128, **config}
    if "kernels" not in config and config.get("dtype") != "float16":
        settings["kernels"] = "avx2"
    with LLM(model, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    chosen = [output.outputs[0] for output in outputs]
    numbers = [at[token].logprob for c in chosen for at in c.logprobs or [] for token in sorted(at)]
    tokens = [token for c in chosen for token in (len(c.token_ids), *c.token_ids)]
    return _digest("q", tokens), _digest("d", numbers)


def timelines(run: str) -> dict[str, list[list[tuple[str, str, float, float]]]]:
    """Return what went into the time of each request of a run: of each answer the segments."""
    events = list(merged_events([LOGS / name for name in RUNS[run]]))
    names = sorted({name_of(event.request_id) for event in events if isinstance(event, RequestArrived)})
    return {
        name: [
            [(segment.label, segment.process, segment.start_s, segment.end_s) for segment in lane.segments]
            for lane in timeline_of(events, name).lanes
        ]
        for name in names
    }


def _digest(kind: str, values: Sequence[float]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(values)}{kind}", *values)).hexdigest()[:16]


def _load() -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts within and beyond a block and a window, two that begin alike; greedy and sampled."""
    rng = np.random.default_rng(3)
    drawn = [tuple(rng.integers(0, 256, n).tolist()) for n in (1, 33, 66)]
    prompts = [drawn[0], drawn[1], (*drawn[2], 5), (*drawn[2], 6, 7)]
    choices: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2, **choices[i % 2]) for i in range(len(prompts))]
    return prompts, params


def _record(files: Iterable[tuple[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    tokens: dict[str, str] = {}
    numbers: dict[str, str] = {}

    def add(name: str, model: str, formats: Mapping[str, Mapping[str, Any]]) -> None:
        for kind, config in formats.items():
            tokens[f"{name}, {kind}"], numbers[f"{name}, {kind}"] = digests(model, config)
        sys.stderr.write(f"{name}\n")

    add("embedded", "embedded", FORMATS)
    for family in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            add(family, str(write_model(Path(folder), family)), FORMATS)
    for name, file in files:
        add(name, file, KV_FORMATS)
    return tokens, numbers


def main() -> None:
    """Record, beside what is recorded for other instruction sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--commit", required=True, help="whose answers these are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens, numbers = _record([("smollm2", "smollm2")])
    before = json.loads(RECORDING.read_text("utf-8")) if RECORDING.exists() else {"numbers": {}}
    recording = {
        "commit": arguments.commit,
        "tokens": tokens,
        "numbers": {**before["numbers"], instruction_set(): numbers},
    }
    RECORDING.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    TIMELINES.write_text(json.dumps({run: timelines(run) for run in RUNS}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
