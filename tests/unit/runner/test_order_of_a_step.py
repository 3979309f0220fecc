"""One generation step in order: embed, q k v, append k v, attend, feed-forward, logits, sample.

The native back end computes a layer of a plain request in one call, in which no hook sees the parts. The order is that
of a trace by parts; a trace of the one call has the same hidden states, K, V and logits, to the last bit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from model_folders import write_random_model
from operator_trace import Call, Layers, Trace, record_model, trace_operators
from oracle.naive_attention import naive_attention
from twostroke import SamplingParams
from twostroke.client.text_engine import TextEngine, build_text_engine
from twostroke.config.engine import EngineConfig
from twostroke.model.decoder import DecoderModel
from twostroke.runner.model_runner import ModelRunner

KERNELS = ("reference", "auto")
PROMPT = tuple(range(40, 61))
NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 2, 4, 2, 16, 64, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traced")
    return write_random_model(path, "llama", num_hidden_layers=NUM_LAYERS, tie_word_embeddings=True)


def config_of(folder: Path, kernels: str) -> EngineConfig:
    return EngineConfig.from_keywords(model=str(folder), threads=1, num_kv_blocks=8, dtype="float32", kernels=kernels)


@pytest.fixture(scope="module")
def plain_tokens(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the answers of untraced engines, by kernels; built before any test installs a hook."""
    found: dict[str, tuple[int, ...]] = {}
    for kernels in KERNELS:
        engine = build_text_engine(config_of(folder, kernels))
        found[kernels] = tokens_of(engine)
        engine.close()
    return found


@pytest.fixture(params=KERNELS)
def traced(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TextEngine, Trace]]:
    with tracing(folder, request.param, "by parts", monkeypatch) as found:
        yield found


@contextmanager
def tracing(
    folder: Path, kernels: str, layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[TextEngine, Trace]]:
    """An engine whose steps are recorded; hooks are those of the last one that was built."""
    trace = trace_operators(monkeypatch, layers)
    models: list[DecoderModel] = []
    init = ModelRunner.__init__

    def keep_model(runner: ModelRunner, model: DecoderModel, *args: object, **given: object) -> None:
        models.append(model)
        init(runner, model, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "__init__", keep_model)
    engine = build_text_engine(config_of(folder, kernels))
    record_model(models[0], monkeypatch, trace)
    yield engine, trace
    engine.close()


def layer(num_tokens: int, kv_len: int) -> list[Call]:
    """Return the calls of a layer."""
    return [
        Call("product", num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM),  # q, k and v
        Call("append k v", num_tokens),
        Call("attend", num_tokens, kv_len=kv_len),
        Call("product", num_tokens, HIDDEN),  # the output projection, added to the residual
        Call("gated product", num_tokens, INNER),
        Call("product", num_tokens, HIDDEN),
    ]


def expected(num_tokens: int, kv_len: int) -> list[Call]:
    """Return the calls of a whole step of one request; only the last token has logits."""
    layers = [call for _ in range(NUM_LAYERS) for call in layer(num_tokens, kv_len)]
    return [Call("embed", num_tokens), *layers, Call("logits", 1), Call("product", 1, 320), Call("sample", 1)]


def start(engine: TextEngine) -> None:
    engine.submit({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))


def tokens_of(engine: TextEngine) -> tuple[int, ...]:
    start(engine)
    done = [output for _ in range(4) for output in engine.step() if output.finished]
    return tuple(done[0].outputs[0].token_ids)


def test_a_step_calls_its_parts_in_order(traced: tuple[TextEngine, Trace]) -> None:
    """Prefill comes first, then one token a step; the KV that attention reads includes the new token's."""
    engine, trace = traced
    start(engine)
    for num_tokens, kv_len in ((21, 21), (1, 22), (1, 23), (1, 24)):
        trace.clear()
        engine.step()
        assert trace.calls == expected(num_tokens, kv_len)
    assert not engine.has_work


def test_a_layer_in_one_call_has_the_bits_of_its_parts_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return hidden states, logits, and all K and V after each step of a plain request."""
    steps: dict[Layers, list[tuple[list[Call], list[torch.Tensor]]]] = {}
    for layers in ("in one call", "by parts"):
        with monkeypatch.context() as hooks, tracing(folder, "auto", layers, hooks) as (engine, trace):
            start(engine)
            steps[layers] = []
            for _ in range(4):
                trace.clear()
                engine.step()
                steps[layers].append((list(trace.calls), [*trace.kv, *trace.hidden]))
    for (calls, whole), (_, parts), num_tokens, kv_len in zip(
        steps["in one call"], steps["by parts"], (21, 1, 1, 1), (21, 22, 23, 24), strict=True
    ):
        of_layers = [Call("layer in one call", num_tokens, kv_len=kv_len)] * NUM_LAYERS
        assert calls == [Call("embed", num_tokens), *of_layers, Call("logits", 1), Call("sample", 1)]
        assert len(whole) == NUM_LAYERS + 2
        assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_attention_reads_the_new_tokens_kv(traced: tuple[TextEngine, Trace]) -> None:
    """The call's own K and V are stored after the earlier ones, which stay; attention is over all of them."""
    engine, trace = traced
    start(engine)
    engine.step()
    trace.clear()
    engine.step()
    assert len(trace.attended) == NUM_LAYERS
    for call in trace.attended:
        q, k, v = call.qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        assert torch.equal(call.after[:, :-1], call.before[:, :-1])
        assert torch.equal(call.after[:, -1:], torch.stack((k, v)).float())
        over_all = naive_attention(q, call.after[0], call.after[1], len(PROMPT), None, call.softmax_scale)
        found = call.output.view(1, HEADS, HEAD_DIM).double()
        assert torch.allclose(found, over_all, atol=1e-5)
        earlier_k, earlier_v = call.after[0, :-1], call.after[1, :-1]
        without_new = naive_attention(q, earlier_k, earlier_v, len(PROMPT), None, call.softmax_scale)
        assert not torch.allclose(found, without_new, atol=1e-3)


def test_a_traced_engine_makes_the_same_tokens(
    plain_tokens: dict[str, tuple[int, ...]], traced: tuple[TextEngine, Trace], request: pytest.FixtureRequest
) -> None:
    """The hook does not change the tokens."""
    assert tokens_of(traced[0]) == plain_tokens[request.node.callspec.params["traced"]]
