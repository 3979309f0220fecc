"""Models from GGUF files: llama.cpp's logits, transformers' logits of the same numbers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from fixtures.gguf.layout import gguf_name, interleaved
from fixtures.gguf.models import float_model
from gguf_files import FIXTURES, NAMES, WIDE, changed, fixture, of_type
from oracle import naive_model
from oracle.gguf_blocks import TYPES_BY_NAME
from oracle.paged_driver import PagedDriver
from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.config.load import ActivationQuantization, Kernels
from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint, ModelNotFound, SetupError, UnsupportedModel
from twostroke.kernels import native
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.stacked_weight import StackedWeight, stack
from twostroke.measure.quality.distance import FLOAT32, DistributionModel, Window
from twostroke.model.decoder import Placement
from twostroke.model.gguf.blocks import REPACKED
from twostroke.model.gguf.weights import GGUFWeights
from twostroke.model.loader import load_model
from twostroke.model.model_files import find_model

CPU = torch.device("cpu")
RECORDED: dict[str, Any] = json.loads((FIXTURES / "logits.json").read_text())
PROMPT: list[int] = RECORDED["prompt_token_ids"]


def config_of(path: Path) -> ModelConfig:
    return find_model(str(path)).config()


def logits_of(
    path: Path,
    kernels: Kernels,
    token_ids: list[int] = PROMPT,
    activation_quantization: ActivationQuantization | None = None,
) -> Tensor:
    """After every token, in float32. [num_tokens, vocab_size]"""
    files = find_model(str(path))
    config = files.config()
    model = load_model(
        files.weights(config, None),
        config,
        Placement(operators_for(CPU, torch.float32, kernels, activation_quantization), torch.float32, CPU, 512),
    )
    driver = PagedDriver(model, num_blocks=40)
    return driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0])


def dequantized_model(name: str, path: Path | None = None) -> Any:
    """transformers' model with the numbers that the package `gguf` reads from a fixture, or from a copy at `path`."""
    config, weights = float_model(name.rsplit("-", 1)[0])
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path or fixture(name)).tensors}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    state: dict[str, Tensor] = {}
    for parameter, like in weights.items():
        tensor = stored[gguf_name(parameter)]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(like.shape)
        if (factor := stored.get(tensor.name.removesuffix("weight") + "scale")) is not None:
            weight = weight * factor.data
        num_heads = heads.get(parameter.split(".")[-2])
        if config["model_type"] == "llama" and num_heads:
            weight = weight.reshape(num_heads, -1, 2, like.shape[1]).swapaxes(1, 2).reshape(like.shape)
        state[parameter] = torch.from_numpy(weight.copy())
    kind = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").float().eval()
    assert set(model.load_state_dict(state, strict=False).missing_keys) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantized_numbers(name: str) -> None:
    """The reference's results differ by the rounding of some scales to float16, which is 2^-11 of a weight."""
    expected = naive_model.logits(dequantized_model(name), PROMPT)
    found = logits_of(fixture(name), "reference")
    is_exact = name.split("-")[-1] in ("f32", "f16", "bf16", "q4_0", "q8_0")
    tolerance = 1e-5 if is_exact else 4e-3
    assert (found - expected).square().mean().sqrt() < tolerance * expected.std()


@pytest.mark.parametrize("name", ["llama-wide-q4_k_m", "qwen3-wide-q6_k"])
def test_float_numbers_are_those_that_ggml_dequantizes(name: str) -> None:
    """`bench quality` compares other formats with these numbers: not even scales are rounded."""
    expected = naive_model.logits(dequantized_model(name), PROMPT)[:-1].log_softmax(-1)
    config = EngineConfig.from_keywords(model=str(fixture(name)), max_model_len=512, threads=1, **FLOAT32)
    found = torch.cat(list(DistributionModel(config, 512, as_numbers=True).log_probs(Window(tuple(PROMPT), 1))))
    assert (found - expected).square().mean().sqrt() < 1e-5 * expected.std()


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_those_of_llama_cpp(name: str, kernels: Kernels) -> None:
    """Equal for float32. Else llama.cpp rounds activations, to half precision or 8 bits, and our kernels do, too."""
    expected = torch.tensor(RECORDED["logits"][name])
    found = logits_of(fixture(name), kernels)[-1]
    kind = name.split("-")[-1]
    tolerance = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}.get(kind, 0.09)
    assert (found - expected).square().mean().sqrt() < tolerance * expected.std()


@pytest.mark.parametrize("name", TYPES_BY_NAME)
def test_a_whole_model_of_each_type(name: str, tmp_path: Path) -> None:
    """Embedding, head and every map: the numbers of the package `gguf`; with inputs in 8 bits alike on each level."""
    path = of_type(name, tmp_path / "x.gguf")
    expected = naive_model.logits(dequantized_model(WIDE, path), PROMPT)

    def distance(logits: Tensor) -> float:
        return float((logits - expected).square().mean().sqrt() / expected.std())

    exact = 1e-5 if REPACKED[name].is_exact else 4e-3
    assert distance(logits_of(path, "reference")) < exact
    assert distance(logits_of(path, "auto", activation_quantization="none")) < exact
    found = {level: logits_of(path, level) for level in native.levels()}
    assert all(distance(logits) < 0.06 for logits in found.values())
    fusing = [logits for level, logits in found.items() if level != "portable"]
    assert all(torch.equal(logits, fusing[0]) for logits in fusing)


def test_scales_of_nvfp4_are_relative_to_one_of_the_whole_tensor(tmp_path: Path) -> None:
    """Conversions of published NVFP4 checkpoints have it as a tensor of its own, and one for inputs in 4 bits."""
    ones = np.ones(1, np.float32)
    path = of_type("NVFP4", tmp_path / "x.gguf", scale=1.5e-4 * ones, input_scale=ones)
    expected = naive_model.logits(dequantized_model(WIDE, path), PROMPT)
    for kernels, tolerance in (("reference", 4e-3), ("auto", 0.06)):
        found = logits_of(path, kernels)
        assert (found - expected).square().mean().sqrt() < tolerance * expected.std()
    files = find_model(str(path))
    source = files.weights(files.config(), None)
    assert isinstance(source, GGUFWeights)
    numbers, stored = source.read_float32(EMBEDDING), source.read(EMBEDDING, torch.float32)
    assert isinstance(stored, QuantizedWeight)
    torch.testing.assert_close(stored.dequantize(), numbers, rtol=1e-3, atol=1e-4 * float(numbers.abs().max()))
    assert source.stored_rows(EMBEDDING) is None


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("scale", [np.ones(2, np.float32), np.full(1, np.inf, np.float32)])
def test_a_scale_of_a_tensor_that_is_no_number_is_refused(scale: NDArray[np.float32], tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"x.gguf: token_embd.scale must be one finite number of F32"):
        logits_of(of_type("NVFP4", tmp_path / "x.gguf", scale=scale), "reference")


@pytest.mark.parametrize("name", ["llama-q8_0", "qwen3-wide-q4_k_m"])
def test_the_native_kernels_multiply_the_numbers_that_were_stored(name: str) -> None:
    """With inputs that rounding to 8 bits leaves alone, so that nothing hides an error of a scale."""
    files = find_model(str(fixture(name)))
    config = files.config()
    source = files.weights(config, None)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(fixture(name)).tensors}
    for parameter in ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        tensor, weight = stored[gguf_name(parameter)], source.read(parameter, torch.float32)
        assert isinstance(weight, QuantizedWeight)
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).double()
        x = torch.from_numpy(np.random.default_rng(0).integers(-127, 128, (5, weight.shape[1]))).float()
        x[:, ::32] = 127
        found = operators_for(CPU, torch.float32, "auto").pack_linear(weight, None)(x).double()
        error = (found - x.double() @ expected.T).abs().max() / (x.double() @ expected.T).abs().max()
        assert error < (1e-6 if name.endswith("q8_0") else 1e-3)


def test_parts_of_one_map_that_are_stored_differently_stay_what_they_are() -> None:
    """Q4_K_M keeps some values in 6 bits beside queries and keys in 4: no one of them is changed for the others."""
    files = find_model(str(fixture("qwen3-wide-q4_k_m")))
    source = files.weights(files.config(), None)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    parts = [source.read(name, torch.float32) for name in names]
    assert [part.bits for part in parts if isinstance(part, QuantizedWeight)] == [4, 4, 6]
    assert isinstance(stack(parts), StackedWeight)


@pytest.mark.parametrize("name", NAMES)
def test_the_format_is_known_before_it_is_read(name: str) -> None:
    files = find_model(str(fixture(name)))
    source = files.weights(files.config(), None)
    for parameter, stored in source.weights.items():
        weight = source.read(parameter, torch.bfloat16)
        assert stored.format == (weight.format if isinstance(weight, QuantizedWeight) else None)


def test_the_config_is_that_of_the_model() -> None:
    for name in NAMES:
        given, _ = float_model(name.rsplit("-", 1)[0])
        expected, found = ModelConfig.from_hf(given), config_of(fixture(name))
        assert found.norm_eps == pytest.approx(expected.norm_eps)
        assert found.layers[0].rope.theta == expected.layers[0].rope.theta
        assert (found.layers[0].rope.frequency_divisors is None) == (expected.layers[0].rope.rope_type == "default")
        rope = expected.layers[0].rope
        alike = replace(found, norm_eps=expected.norm_eps, dtype=expected.dtype)
        assert alike.with_ropes(lambda _, rope=rope: rope) == expected, name


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama-f32", "float32"), ("qwen3-f16", "float16"), ("llama-q4_0", "bfloat16")]
)
def test_activations_have_the_type_of_float_files_and_bfloat16_beside_quantized_weights(name: str, dtype: str) -> None:
    assert config_of(fixture(name)).dtype == dtype


ROPE_KEYS = "llama.rope.scaling"


@pytest.mark.parametrize(
    ("values", "scaling"),
    [
        ({f"{ROPE_KEYS}.type": "linear", f"{ROPE_KEYS}.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                f"{ROPE_KEYS}.type": "yarn",
                f"{ROPE_KEYS}.factor": 4.0,
                f"{ROPE_KEYS}.original_context_length": 128,
                f"{ROPE_KEYS}.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
        ({f"{ROPE_KEYS}.type": "none"}, None),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ],
    ids=["linear", "yarn", "none", "old-linear"],
)
def test_rope_scaling(values: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    given, _ = float_model("llama")
    expected = ModelConfig.from_hf(given | ({} if scaling is None else {"rope_scaling": scaling}))
    found = config_of(changed("llama-f32", tmp_path / "x.gguf", values))
    assert (found.ropes, found.max_context) == (expected.ropes, expected.max_context)


def test_llama_with_a_window_is_mistral(tmp_path: Path) -> None:
    found = config_of(changed("llama-f32", tmp_path / "x.gguf", {"llama.attention.sliding_window": 24}))
    assert (found.architecture, found.layer_windows) == ("MistralForCausalLM", (24, 24))
    assert found.kv_specs[0].num_kv_heads == config_of(fixture("llama-f32")).kv_specs[0].num_kv_heads


def check_with_biases(config: dict[str, Any], parts: str, path: Path, **changes: Any) -> None:
    """Llama's fixture with random biases on some of q, k, v and o, beside transformers' model of `config`."""
    given, weights = float_model("llama")
    rng, biases = np.random.default_rng(3), dict[str, NDArray[np.float32]]()
    for layer in range(given["num_hidden_layers"]):
        for part in parts:
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            biases[f"{name}.bias"] = rng.normal(0, 0.5, len(weights[f"{name}.weight"])).astype(np.float32)
    is_llama = config["model_type"] == "llama"
    heads = {"q": given["num_attention_heads"], "k": given["num_key_value_heads"]}
    tensors: dict[str, Any] = {}
    for name, tensor in (weights | biases).items():
        part = name.split(".")[-2][0]
        if name in biases or part in heads:
            stored = tensor.reshape(len(tensor), -1)
            stored = interleaved(stored, heads[part]) if is_llama and part in heads else stored
            tensors[_gguf_name(name)] = np.ascontiguousarray(stored).reshape(tensor.shape)
    changed("llama-f32", path, tensors=tensors, **changes)
    kind = transformers.AutoConfig.for_model(**(given | config))
    theirs = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").float().eval()
    theirs.load_state_dict({name: torch.from_numpy(tensor.copy()) for name, tensor in (weights | biases).items()})
    torch.testing.assert_close(logits_of(path, "auto"), naive_model.logits(theirs, PROMPT), atol=1e-4, rtol=0)


def _gguf_name(name: str) -> str:
    kind = name.rpartition(".")[-1]
    return gguf_name(name.removesuffix(kind) + "weight").removesuffix("weight") + kind


def test_qwen2_has_its_heads_in_order_and_biases(tmp_path: Path) -> None:
    check_with_biases(
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "qkv",
        tmp_path / "x.gguf",
        values={"general.architecture": "qwen2"},
        renamed={"llama.": "qwen2."},
    )


def test_biases_of_q_and_k_are_interleaved_like_their_rows(tmp_path: Path) -> None:
    check_with_biases({"model_type": "llama", "attention_bias": True}, "qkvo", tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModel, "'mamba' is not .*; known: llama, .*qwen2, .*qwen3"),
        ({"general.architecture": None}, CorruptCheckpoint, "the metadata has no general.architecture"),
        ({"llama.block_count": None}, CorruptCheckpoint, "the metadata has no llama.block_count"),
        ({"llama.block_count": "two"}, CorruptCheckpoint, "llama.block_count must be a whole number.*found 'two'"),
        ({"llama.expert_count": 8}, CorruptCheckpoint, r"llama.expert_used_count"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModel, r"dimension_count=8 is not .* \(16\)"),
        ({"llama.attention.value_length": 32}, UnsupportedModel, "value_length=32 is not implemented"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModel, "'longrope' is not implemented; known: none"),
        ({"llama.attention.head_count_kv": 3}, CorruptCheckpoint, r"x.gguf.* 4 is no .* of llama\S+_kv 3\. Convert"),
        ({"llama.block_count": 3}, CorruptCheckpoint, "missing: blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, CorruptCheckpoint, r"unknown: blk.1.*not fit|not fit.*unknown: blk.1"),
        ({"llama.feed_forward_length": 64}, CorruptCheckpoint, r"blk.0.ffn_gate.weight is \[128, 64\] instead of \[64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_metadata_that_cannot_be_served_is_refused(
    values: dict[str, Any], error: type[SetupError], message: str, tmp_path: Path
) -> None:
    path = changed("llama-f32", tmp_path / "x.gguf", values)
    with pytest.raises(error, match=message):
        logits_of(path, "reference")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_v.weight": None}, "missing: blk.1.attn_v.weight"),
        ({"token_embd.weight": None}, "tensor token_embd.weight is missing"),
        ({"blk.0.attn_qkv.weight": np.zeros((4, 64), np.float32)}, "unknown: blk.0.attn_qkv.weight"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "rope_freqs.weight must hold numbers above 0"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, r"rope_freqs.weight is F32 \[4\]; it must be F32 \[8\]"),
        ({"blk.0.ffn_up.weight": np.full((128, 68), 255, np.uint8)}, "NaN or infinity in blk.0.ffn_up.weight"),
        (
            {"blk.0.ffn_up.weight": np.zeros((64, 64), np.float32)},
            r"do not fit its metadata .* wrong shape: blk.0.ffn_up.weight is \[64, 64\] instead of \[128, 64\]",
        ),
    ],
    ids=["missing", "no-embedding", "unknown", "frequencies", "frequency-shape", "nan-scale", "shape"],
)
def test_tensors_that_do_not_fit_are_named(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = changed("llama-f32", tmp_path / "x.gguf", tensors=tensors)
    with pytest.raises(CorruptCheckpoint, match=message):
        logits_of(path, "reference")


def test_no_such_file() -> None:
    with pytest.raises(ModelNotFound, match=r"there is no file 'no/such.gguf'"):
        find_model("no/such.gguf")


def test_a_quantized_file_is_not_quantized_again() -> None:
    files = find_model(str(fixture("llama-q4_0")))
    with pytest.raises(SetupError, match=r"llama-q4_0.gguf is quantized already \(gguf\)"):
        files.weights(files.config(), "int8")
    assert files.weights(files.config(), "gguf").quantization == "gguf"


@pytest.fixture
def greedy() -> Callable[..., tuple[int, ...]]:
    """Tokens of an engine that was built from a file, and what else is asked for."""

    def generate(path: Path, **settings: Any) -> tuple[int, ...]:
        llm = LLM(model=path, max_num_seqs=2, max_model_len=128, **settings)
        (output,) = llm.generate(["Hello world"], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        return output.outputs[0].token_ids

    return generate


def test_an_engine_from_a_file(greedy: Callable[..., tuple[int, ...]]) -> None:
    """The tokens that the same logits give, step by step; a float file may be quantized while it is loaded."""
    token_ids = find_model(str(fixture("qwen3-q8_0"))).tokenizer().encode("Hello world")
    found = greedy(fixture("qwen3-q8_0"), dtype="float32", kernels="reference")
    logits = logits_of(fixture("qwen3-q8_0"), "reference", [*token_ids, *found])
    assert logits[len(token_ids) - 1 : -1].argmax(-1).tolist() == list(found)
    assert len(greedy(fixture("qwen3-f32"), quantization="int8")) == 8


def test_another_tokenizer_may_be_named(greedy: Callable[..., tuple[int, ...]], tmp_path: Path) -> None:
    """This holds even if the file's own tokenizer cannot be built."""
    path = changed("qwen3-f32", tmp_path / "x.gguf", {"tokenizer.ggml.pre": "unheard-of"})
    with pytest.raises(UnsupportedModel, match=r"tokenizer.ggml.pre 'unheard-of'"):
        greedy(path)
    assert greedy(path, tokenizer=fixture("qwen3-f32")) == greedy(fixture("qwen3-f32"))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (
            "smollm3moe",
            {"expert_count": 128},
            r"the nearest is smollm3, without experts \(expert_count=128\); other .* have experts; known: ",
        ),
        ("deepseek2", {"attention.kv_lora_rank": 512}, r"none that is known has latent attention \(.*=512\); known"),
        ("falcon-h1", {"ssm.state_size": 256}, r"nearest is falcon, without recurrent layers \(ssm\.state_size=256\)"),
        ("gemma3n", {"altup.num_inputs": 4}, r"nearest is gemma3, without several residual streams"),
        ("granitemoes", {"expert_count": 64}, r"the nearest is granitemoe; known"),
        ("exaone", {}, r"the nearest is exaone4; known"),
        ("clip", {}, r"such a file \(mmproj\) only encodes images for a model; give the model's own file; known"),
        ("nomic-bert", {}, r"such a model makes embeddings, not text; known"),
        ("what", {}, r"'what' is not implemented; known: llama, "),
    ],
)
def test_an_unknown_architecture_is_told_from_the_nearest(
    name: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"general.architecture": name} | {f"{name}.{key}": value for key, value in values.items()}
    with pytest.raises(UnsupportedModel, match=said):
        config_of(changed("llama-f32", tmp_path / "x.gguf", given))
