"""Several ranks give the bits of one: tokens and log-probabilities, whatever the model, its weights and KV."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import gguf_files
import quantized_folders
from model_folders import write_random_model, write_tokenizer
from oracle import naive_model
from oracle.mxfp4 import write_mxfp4
from rank_threads import ranks_are_threads
from twostroke import LLM, SamplingParams
from twostroke.communicator.interface import Communicator, WatchedCommunicator
from twostroke.communicator.process_group import process_group
from twostroke.config.load import LoadConfig
from twostroke.errors import InvalidParameter
from twostroke.startup import rank_process, ranks

NUM_TOKENS = 120
"""That all models here have."""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)


def outputs(model: Path | str, **config: Any) -> list[Any]:
    """Prompts of several chunks with a common beginning, greedy and sampled, to the last bit."""
    settings = {"threads": 1, "num_kv_blocks": 64, "max_num_batched_tokens": 48, **config}
    with LLM(str(model), **settings) as llm:
        rng = random.Random(3)
        common = [rng.randrange(NUM_TOKENS) for _ in range(40)]
        prompts = [[rng.randrange(NUM_TOKENS) for _ in range(n)] for n in (1, 33, 70)] + [[*common, 5], [*common, 6, 7]]
        choices: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}]
        params = [
            SamplingParams(
                max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1 if i == 2 else None, **choices[i % 2]
            )
            for i in range(len(prompts))
        ]
        found: list[Any] = []
        for _ in range(2):  # the second time with what is cached
            for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params):
                of_prompt = [
                    sorted((t, p.logprob) for t, p in (at or {}).items()) for at in output.prompt_logprobs or []
                ]
                for c in output.outputs:
                    logprobs = [[(t, p.logprob) for t, p in at.items()] for at in c.logprobs or []]
                    found.append((c.token_ids, c.text, logprobs, of_prompt))
        return found


def same(model: Path | str, **config: Any) -> None:
    alone = {**config, "tensor_parallel_size": 1, "enable_expert_parallel": False}
    assert outputs(model, **{"tensor_parallel_size": 2, **config}) == outputs(model, **alone)


THREE_KV_HEADS: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}
ODD_SIZES = {"vocab_size": 333, "intermediate_size": 97, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("family", "dtype", "fields"),
    [
        ("llama", "float32", {}),
        ("llama", "bfloat16", ODD_SIZES),
        ("mistral", "bfloat16", {"num_key_value_heads": 2}),
        ("qwen2", "bfloat16", {}),
        ("qwen3", "float32", {}),
        ("qwen3", "bfloat16", ODD_SIZES),
        ("phi", "bfloat16", {"vocab_size": 333, "intermediate_size": 97}),
        ("gpt_neox", "float32", ODD_SIZES),
        ("olmo3", "bfloat16", {}),
        ("cohere", "bfloat16", {}),
        ("nemotron", "bfloat16", {"intermediate_size": 97}),
        ("apertus", "bfloat16", {}),
        ("falcon", "bfloat16", {}),
    ],
    ids=str,
)
def test_architectures(family: str, dtype: str, fields: dict[str, Any], tmp_path: Path) -> None:
    same(write_random_model(tmp_path, family, **fields), dtype=dtype)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("activations", ["int8", "none"])
def test_quantized_on_load(quantization: str, activations: str, tmp_path: Path) -> None:
    model = write_random_model(tmp_path, "qwen2", tie_word_embeddings=True, vocab_size=333)
    same(model, quantization=quantization, activation_quantization=activations)


ROUTERS = ["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "gemma4_experts"]
"""A family for each kind of router, those with biases and an MLP beside them included."""


@pytest.mark.parametrize("family", ROUTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_experts_on_each_rank(family: str, dtype: str, random_models: dict[str, Path]) -> None:
    same(random_models[family], dtype=dtype, enable_expert_parallel=True)


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_whole_experts_on_four_ranks(family: str, quantization: str, random_models: dict[str, Path]) -> None:
    """Qwen2-MoE's six experts: two ranks have one, the others two."""
    config = {"dtype": "bfloat16", "quantization": quantization, "enable_expert_parallel": True}
    same(random_models[family], tensor_parallel_size=4, **config)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 7, "block_size": 8, "max_num_seqs": 2},
        {"max_num_batched_tokens": 1, "enable_prefix_caching": False},
        {"num_kv_blocks": 12, "max_model_len": 96},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    ],
    ids=str,
)
def test_schedules_with_whole_experts(config: dict[str, Any], random_models: dict[str, Path]) -> None:
    """In steps of one token, often a rank has no pair."""
    same(random_models["qwen3_moe"], tensor_parallel_size=4, enable_expert_parallel=True, **config)


def test_whole_experts_of_blocks_in_4_bits(tmp_path: Path) -> None:
    """MXFP4, as gpt-oss stores its experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5, "num_experts_per_tok": 2}
    tensors = write_mxfp4(tmp_path, naive_model.build(tmp_path, "GptOss", num_hidden_layers=2, **sizes))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path, num_characters=NUM_TOKENS)
    same(tmp_path, dtype="bfloat16", enable_expert_parallel=True)


LAYOUTS = [
    "awq-g32-llama",
    "awq-g64-qwen3",
    "ct-int-8bit-channel-asym-llama",
    "ct-pack-4bit-g32-actorder-qwen3",
    "ct-pack-8bit-g32-asym-llama",
    "gptq-4bit-g128-biases-qwen2",
    "gptq-4bit-g32-asym-llama",
    "gptq-8bit-g64-actorder-asym-v2-qwen3",
]
"""Of the quantized fixtures, one of each layout, number of bits and way to order inputs."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, num_characters=NUM_TOKENS)
    same(quantized_folders.FIXTURES / name, dtype="bfloat16", tokenizer=str(tmp_path))


@pytest.mark.parametrize("name", ["llama-q8_0", "llama-wide-q4_k_m", "qwen3-q4_0", "qwen3-wide-q6_k"])
def test_gguf(name: str) -> None:
    same(gguf_files.fixture(name), dtype="bfloat16")


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8", "int4"])
def test_kv_formats(kv_cache_dtype: str, random_models: dict[str, Path]) -> None:
    same(random_models["llama"], kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 7, "block_size": 8},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 12, "max_model_len": 96},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    ],
    ids=str,
)
def test_settings(config: dict[str, Any], random_models: dict[str, Path]) -> None:
    same(random_models["qwen3"], **config)


def test_four_ranks(random_models: dict[str, Path]) -> None:
    same(random_models["qwen2"], tensor_parallel_size=4)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize(
    ("family", "num_ranks", "fields"),
    [
        ("mistral", 2, {}),
        ("gemma3", 4, {}),
        ("olmo3", 4, {}),
        ("qwen3", 4, {}),
        ("falcon", 4, {}),
        ("cohere", 4, {}),
        ("llama", 6, {**THREE_KV_HEADS, "attention_bias": True}),
    ],
    ids=str,
)
def test_fewer_kv_heads_than_ranks(
    family: str, num_ranks: int, fields: dict[str, Any], kv_cache_dtype: str, tmp_path: Path
) -> None:
    """Several ranks keep the same head, each for query heads of its own."""
    same(write_random_model(tmp_path, family, **fields), tensor_parallel_size=num_ranks, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"dtype": "bfloat16", **ODD_SIZES}),
        ("qwen3", {"dtype": "float32"}),
        ("qwen2", {"dtype": "bfloat16", "quantization": "int4", "tensor_parallel_size": 4}),
        ("qwen3_moe", {"dtype": "bfloat16", "enable_expert_parallel": True}),
    ],
    ids=str,
)
def test_a_process_group_as_between_gpus(
    family: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicator that NCCL serves behind; here gloo does."""
    kinds: list[str] = []

    def on_device(communicator: WatchedCommunicator, load: LoadConfig) -> Communicator:
        kinds.append(load.device)
        return process_group(communicator, load.device)

    monkeypatch.setattr(ranks, "on_device", on_device)
    monkeypatch.setattr(rank_process, "on_device", on_device)
    fields = {name: config.pop(name) for name in ODD_SIZES if name in config}
    same(write_random_model(tmp_path, family, **fields), **config)
    assert kinds == ["cpu"] * config.get("tensor_parallel_size", 2)


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ("llama", {"tensor_parallel_size": 3}, r"must divide the 4 query heads of the model.* Take one of 1, 2, 4\."),
        ("llama", {"tensor_parallel_size": 8}, "must divide the 4 query heads"),
        ("llama", {"kernels": "reference"}, "kernels=reference"),
        ("llama", {"kv_check_rate": 0.5}, "kv_check_rate=0.5"),
        ("llama", {"speculative_config": {"method": "early_exit", "exit_layer": 1}}, "early_exit"),
        (
            "llama",
            {"enable_expert_parallel": True},
            r"enable_expert_parallel=true: .*Llama.* has none here\. Leave it out",
        ),
        (
            "mixtral",
            {"enable_expert_parallel": True, "tensor_parallel_size": 1},
            "enable_expert_parallel=true: needs several ranks, and tensor_parallel_size is 1",
        ),
    ],
)
def test_refused(model: str, config: dict[str, Any], words: str, random_models: dict[str, Path]) -> None:
    with pytest.raises(InvalidParameter, match=words):
        LLM(str(random_models[model]), **{"tensor_parallel_size": 2, **config})


def test_more_ranks_than_experts(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, "mixtral", num_local_experts=3)
    words = "deals 3 experts to tensor_parallel_size=4 ranks, each of which must have one. Take fewer ranks"
    with pytest.raises(InvalidParameter, match=words):
        LLM(str(model), tensor_parallel_size=4, enable_expert_parallel=True)


def test_the_start_says_how_experts_are_split(random_models: dict[str, Path]) -> None:
    model, ranks_words = str(random_models["mixtral"]), []
    for is_dealt in (False, True):
        with LLM(model, tensor_parallel_size=2, enable_expert_parallel=is_dealt, num_kv_blocks=16) as llm:
            ranks_words.append("2 ranks with whole experts" in llm.engine.startup_lines[0])
    assert ranks_words == [False, True]


def test_neither_divides_the_other(tmp_path: Path) -> None:
    """12 query heads and 3 KV heads: two ranks would have one and a half of these."""
    model = write_random_model(tmp_path, "llama", **THREE_KV_HEADS)
    with pytest.raises(InvalidParameter, match=r"divide its 3 KV heads or be a multiple.* Take one of 1, 3, 6, 12\."):
        LLM(str(model), tensor_parallel_size=2)


def test_random_weights(random_models: dict[str, Path]) -> None:
    same(random_models["qwen3"], load_format="dummy", dtype="bfloat16")
