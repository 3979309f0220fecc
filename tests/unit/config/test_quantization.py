"""quantization_config: what published files hold is read, and what would change numbers is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.config.quantization import QuantizationConfig
from twostroke.errors import CorruptCheckpoint, UnsupportedModel

AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": True,
    "static_groups": False,
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:5.0.0"]},
}
WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 64,
    "symmetric": False,
    "dynamic": False,
}
PER_TOKEN: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}


def compressed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **(weights or {})}, "input_activations": None}
    group |= {name: changes.pop(name) for name in list(changes) if name in ("targets", "input_activations")}
    given = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {**given, "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {}, **changes}


def read(given: dict[str, Any]) -> QuantizationConfig:
    found = QuantizationConfig.from_hf(given)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (AWQ, ("awq-gemm", 4, 128, False, False)),
        ({**AWQ, "group_size": -1, "version": "GEMM"}, ("awq-gemm", 4, None, False, False)),
        (GPTQ, ("gptq", 4, 128, True, True)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}, ("gptq_v2", 4, 128, False, True)),
        ({**GPTQ, "bits": 8, "group_size": 1024, "desc_act": False}, ("gptq", 8, 1024, True, False)),
        ({**GPTQ, "dynamic": {"-:.*down_proj": {}}}, ("gptq", 4, 128, True, True)),
        ({**GPTQ, "dynamic": {r"-:.*\.[0-9]+\.(?:mlp|self_attn)\..*\)*": {}}}, ("gptq", 4, 128, True, True)),
        (compressed(), ("pack-quantized", 4, 64, False, False)),
        (compressed({"actorder": "group"}), ("pack-quantized", 4, 64, False, True)),
        (compressed({"actorder": "weight"}), ("pack-quantized", 4, 64, False, False)),
        (
            compressed({"num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": True}, format=None)
            | {"format": "int-quantized"},
            ("int-quantized", 8, None, True, False),
        ),
        (compressed(input_activations=PER_TOKEN, format="int-quantized"), ("int-quantized", 4, 64, False, False)),
    ],
)
def test_published_configs(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = read(given)
    assert (found.layout, found.bits, found.group_size, found.symmetric, found.has_act_order) == expected
    assert found.method == given["quant_method"]


def test_nothing_is_nothing() -> None:
    assert QuantizationConfig.from_hf({}) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes' .* known: awq, gptq"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method='fbgemm_fp8' .* compressed-tensors, fp8"),
        ({"bits": 4}, "quant_method=null"),
        ({**AWQ, "version": "gemv"}, "version='gemv' .* known: gemm"),
        ({**AWQ, "bits": 3}, "bits=3 .* known: 4"),
        ({**AWQ, "group_size": 48}, "group_size=48 .* known: 16, 32, 64, 128, multiples of 128"),
        ({**GPTQ, "bits": 2}, "bits=2 .* known: 4, 8"),
        ({**GPTQ, "bits": 3}, "bits=3"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin' .* known: gptq, gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format=true"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype='int8'"),
        ({**GPTQ, "dynamic": {"-:x": {}, "+:.*up_proj": {"bits": 8}}}, r"dynamic=\['\+:"),
        *(
            ({**GPTQ, "dynamic": {f"-:{slow}": {}}}, "dynamic=.*no repeat of a group")
            for slow in ("(a+)+$", "(a|a)*$", "(?:.?){60}x", ".*.*.*.*.*x", ".?" * 30 + "x", r"(\w+\.)+x")
        ),
        (compressed(ignore=["re:(.*)*x"]), "ignore=.*no repeat of a group"),
        (compressed(format="float-quantized"), "format='float-quantized'"),
        (compressed(format="marlin-24"), "format='marlin-24'"),
        (compressed(targets=["re:.*q_proj"]), "targets="),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
        (compressed(transform_config={"u": {}}), "transform_config="),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format="),
        (compressed(config_groups={"a": {}, "b": {}}), r"config_groups=\['a', 'b'\] .* one group"),
        (compressed({"num_bits": 6}), "num_bits=6"),
        (compressed({"type": "float"}), r"weights\.type='float'"),
        (compressed({"strategy": "block"}), r"weights\.strategy='block'"),
        (compressed({"actorder": "random"}), r"weights\.actorder='random'"),
        (compressed(input_activations={**PER_TOKEN, "dynamic": False}), r"input_activations\.dynamic=false"),
        (compressed(input_activations={"num_bits": 8}), r"input_activations\.dynamic=false"),
        (compressed(input_activations={**PER_TOKEN, "strategy": "tensor"}), r"input_activations\.strategy='tensor'"),
        (compressed(input_activations={**PER_TOKEN, "num_bits": 4}), r"input_activations\.num_bits=4"),
    ],
)
def test_what_is_not_implemented_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"quantization_config: {said}"):
        QuantizationConfig.from_hf(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**GPTQ, "bits": "4"}, "bits must be an integer"),
        ({**GPTQ, "sym": "yes"}, "sym must be true or false"),
        ({name: AWQ[name] for name in ("quant_method", "bits")}, "group_size must be an integer"),
        ({**AWQ, "group_size": 0}, "group_size must be an integer above 0"),
        (compressed(config_groups=[1]), "config_groups must be an object"),
        (compressed({"group_size": None}), "group_size must be an integer"),
    ],
)
def test_values_of_another_kind(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=said):
        QuantizationConfig.from_hf(given)
