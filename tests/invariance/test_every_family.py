"""Every family in every suite, by one table (model_folders.SHAPES): invariance, formats of weights and KV, ranks,
hand-over, and one back end against the other. Bytes and plans: tests/unit/planner/test_memory.py.

One small load a family, whose answers are computed once. The other files here cross settings that have nothing to do
with the family.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from model_folders import SHAPES
from oracle.naive_model import model_class
from rank_threads import ranks_are_threads
from two_pools import TwoPools, sequence
from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.events import KVImportEnded
from twostroke.kernels.interface import LayerParts
from twostroke.kernels.native import attention as native_layer
from twostroke.model.checkpoint import read_model_config
from twostroke.model.registry import ARCHITECTURES

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV int4": {"kv_cache_dtype": "int4"},
}
Essence = list[tuple[tuple[int, ...], list[list[tuple[int, float]]]]]
"""Of each request its tokens, and log-probabilities to the last bit."""


def load() -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts within and beyond a block and a window, two that begin alike; greedy and sampled."""
    rng = random.Random(3)
    common = tuple(rng.randrange(256) for _ in range(66))
    prompts = [tuple(rng.randrange(256) for _ in range(n)) for n in (1, 33)] + [(*common, 5), (*common, 6, 7)]
    choices: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, **choices[i % 2]) for i in range(len(prompts))]
    return prompts, params


def answers(model: str, *, turns: int = 1, **config: Any) -> list[Essence]:
    """Return the answers to the load's requests in each of several rounds; from the second round on much is cached."""
    prompts, params = load()
    with LLM(model, **{"threads": 1, "num_kv_blocks": 96, "max_model_len": 128, **config}) as llm:
        found: list[Essence] = []
        for _ in range(turns):
            outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params)
            chosen = [output.outputs[0] for output in outputs]
            found.append(
                [(c.token_ids, [[(t, p.logprob) for t, p in at.items()] for at in c.logprobs or []]) for c in chosen]
            )
        return found


class Expected(dict[str, Essence]):
    """Answers of one engine in each format, with all requests at once; computed on first use."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, name: str) -> Essence:
        (self[name],) = answers(self._model, **FORMATS[name])
        return self[name]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, random_models: dict[str, Path]) -> str:
    return str(random_models[request.param])


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Essence]:
    return Expected(model)


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_company_and_cache(name: str, model: str, expected: dict[str, Essence]) -> None:
    """In chunks of 7, two at a time, in other blocks, and with what is cached."""
    changed = {"max_num_batched_tokens": 7, "max_num_seqs": 2, "block_size": 8, "num_kv_blocks": 200}
    assert answers(model, turns=2, **FORMATS[name], **changed) == [expected[name]] * 2


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks(
    num_ranks: int, name: str, model: str, expected: dict[str, Essence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four query heads and mostly two KV heads, so that on four ranks two have the same; BLOOM has twelve of each."""
    ranks_are_threads(monkeypatch)
    (found,) = answers(model, tensor_parallel_size=num_ranks, **FORMATS[name])
    assert found == expected[name]


@pytest.mark.parametrize("name", ["float32", "int8", "KV int8", "KV int4"])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (4, 1)], ids=str)
def test_handover(
    ranks: tuple[int, int],
    name: str,
    model: str,
    expected: dict[str, Essence],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between engines of as many ranks and of others."""
    ranks_are_threads(monkeypatch)
    given: dict[str, Any] = {"model": model, "max_model_len": 128, "tensor_parallel_size": ranks[0], **FORMATS[name]}
    pools = TwoPools(tmp_path, decode={"tensor_parallel_size": ranks[1]}, **given)
    try:
        asked = [sequence(f"r{i}", *of, seed=of[1].seed or 0) for i, of in enumerate(zip(*load(), strict=True))]
        got = pools.run(asked)
        ends = [event for event in pools.decode.events if isinstance(event, KVImportEnded)]
    finally:
        pools.close()
    assert [tuple(got[one.request_id].token_ids) for one in asked] == [tokens for tokens, _ in expected[name]]
    logprobs = [[of_token.logprobs[0] for of_token in got[one.request_id].logprobs] for one in asked]
    assert logprobs == [[at[0][1] for at in scores] for _, scores in expected[name]]
    assert {"r2", "r3"} <= {event.request_id for event in ends if not event.problem}, ends


def test_native_kernels_compute_what_torchs_operators_do(model: str) -> None:
    """In float32: the log-probability of every token of a prompt, and of the likeliest ones."""
    prompt = load()[0][2]

    def scores(kernels: str) -> list[dict[int, float]]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        with LLM(model, threads=1, num_kv_blocks=32, max_model_len=128, kernels=kernels) as llm:
            (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        return [{token: found.logprob for token, found in (at or {}).items()} for at in output.prompt_logprobs or []]

    ours, torchs = flat(scores("auto")), flat(scores("reference"))
    assert len(ours) == len(prompt) - 1
    assert ours == pytest.approx(torchs, abs=1e-4, rel=1e-5)


def flat(scores: Sequence[dict[int, float]]) -> list[float]:
    return [logprob for at in scores for logprob in at.values()]


def test_the_table_has_every_family() -> None:
    """The package's own families count; other tests may have registered some of their own."""
    families = {model_class(kind).__name__ for kind, _ in SHAPES.values()}
    of_package = {name for name, entry in ARCHITECTURES.items() if entry.path.startswith("twostroke.")}
    assert families == of_package


def test_the_load_reaches_what_families_differ_in() -> None:
    """Windows of 24, blocks of 16: otherwise a window or a second block would change nothing."""
    prompts, _ = load()
    config = EngineConfig.from_keywords(model="embedded")
    assert max(map(len, prompts)) > 24 + 2 * config.cache.block_size


IN_ONE_CALL = {
    *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3", "exaone4", "seed_oss"),
    *("gemma", "gemma2", "gemma3", "phi3", "phi4", "glm", "glm4", "helium"),
    *("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "ernie4_5_moe", "dots1"),
}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4", "KV int8"])
def test_layers_in_one_call_have_the_bits_of_their_parts(
    name: str, model: str, expected: dict[str, Essence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native back end binds the layers of most families whole (csrc/layer.hpp); here none is."""
    found = expected[name]
    monkeypatch.setattr(native_layer, "fused_layer", _none)
    (by_parts,) = answers(model, **FORMATS[name])
    assert by_parts == found


def _none(kernels: Any, parts: LayerParts) -> None:
    """Bind no layer."""
    del kernels, parts


def test_which_families_have_layers_in_one_call(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[native_layer.NativeLayer | None] = []
    bind = native_layer.fused_layer

    def noted(kernels: Any, parts: LayerParts) -> native_layer.NativeLayer | None:
        bound.append(bind(kernels, parts))
        return bound[-1]

    monkeypatch.setattr(native_layer, "fused_layer", noted)
    answers(model)
    are_all_whole = len(bound) == read_model_config(Path(model)).num_layers and None not in bound
    assert (Path(model).name.rstrip("0") in IN_ONE_CALL) == are_all_whole, bound
