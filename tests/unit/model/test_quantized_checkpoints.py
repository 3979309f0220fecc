"""AWQ, GPTQ and compressed-tensors checkpoints: the weights that independent oracles read, and the logits they give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from oracle.naive_model import logits as transformers_logits
from oracle.paged_driver import PagedDriver
from quantized_folders import (
    ACT_ORDER,
    ASYMMETRIC,
    AWQ,
    FIXTURES,
    NAMES,
    PACKED,
    edit,
    edit_config,
    open_folder,
    oracle_weights,
)
from twostroke.config.kv_format import resolve_kv_format
from twostroke.config.load import Kernels
from twostroke.errors import CorruptCheckpoint, SetupError, UnsupportedModel
from twostroke.kernels import native
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.loader import load_model, open_weights
from twostroke.model.weight_size import weight_bytes

CPU = torch.device("cpu")
TOKEN_IDS = [int(i) for i in np.random.default_rng(0).integers(0, 128, 48)]
HALF_ROUNDING = 2**-11


def rounding_for(weight: QuantizedWeight) -> Callable[[torch.nn.Module, tuple[Tensor]], tuple[Tensor]]:
    """Return a hook that rounds inputs as the native kernels do: 8 bits, a scale for each group of the weight's."""
    num_inputs, group_size = weight.codes.shape[1], max(weight.group_size, 32)
    assert num_inputs % group_size == 0 or num_inputs <= group_size, weight.format
    order = torch.arange(num_inputs) if weight.order is None else weight.order.long()

    def rounded(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0][..., order].unflatten(-1, (-1, min(group_size, num_inputs)))
        step = x.abs().amax(-1, keepdim=True) / 127
        found = torch.empty_like(inputs[0])
        found[..., order] = ((x / step).round() * step).flatten(-2)
        return (found,)

    return rounded


def expected_logits(folder: Path, *, rounds_inputs: bool = False) -> Tensor:
    """Return transformers' logits with the oracle's weights in float32; inputs of quantized maps exact, or rounded."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    kind = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").float().eval()
    weights = oracle_weights(folder)
    left = model.load_state_dict(weights, strict=False)
    assert all(name.endswith(".bias") and not weights[name].any() for name in left.unexpected_keys)
    assert left.missing_keys == (["lm_head.weight"] if kind.tie_word_embeddings else [])
    if rounds_inputs:
        source = open_folder(folder)
        for name, module in model.named_modules():
            stored = source.weights.get(f"{name}.weight")
            if stored is not None and stored.format is not None:
                weight = source.read(f"{name}.weight", torch.float32)
                assert isinstance(weight, QuantizedWeight)
                module.register_forward_pre_hook(rounding_for(weight))
    return transformers_logits(model, TOKEN_IDS)


def load(folder: Path, kernels: Kernels, dtype: torch.dtype = torch.float32) -> DecoderModel:
    config = read_model_config(folder)
    return load_model(
        open_weights(folder, config), config, Placement(operators_for(CPU, dtype, kernels), dtype, CPU, 64)
    )


def found_logits(folder: Path, kernels: Kernels) -> Tensor:
    driver = PagedDriver(load(folder, kernels), num_blocks=8)
    return driver.logits(driver.step([(driver.add(TOKEN_IDS), len(TOKEN_IDS))])[0])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of centred logits: a constant added to all of them does not change the distribution."""
    found, expected = (x - x.mean(-1, keepdim=True) for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_the_oracles(name: str) -> None:
    """Exactly, but for zero points: they are rounded to float16, times at most half the codes."""
    source = open_folder(FIXTURES / name)
    oracle = oracle_weights(FIXTURES / name)
    assert set(source.weights) == set(oracle)
    num_quantized = 0
    for parameter, expected in oracle.items():
        assert source.weights[parameter].shape == expected.shape
        found = source.read(parameter, torch.float32)
        if isinstance(found, QuantizedWeight):
            num_quantized += 1
            bound = 0.0 if found.mins is None else HALF_ROUNDING * float(found.mins.float().abs().max())
            found = found.dequantize()
        else:
            bound = 0.0
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=bound + 1e-7)
    assert num_quantized == 14


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_reference(name: str) -> None:
    """The same numbers multiplied in another order; a zero point in float16 moves weights by 2e-4 of the largest."""
    error = relative_error(found_logits(FIXTURES / name, "reference"), expected_logits(FIXTURES / name))
    assert error < (1e-5 if is_symmetric(name) else 1e-3), error


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_native_kernels(name: str, level: Kernels) -> None:
    """Inputs are rounded to 8 bits there, and so they are in what is expected: the first token is the same.

    After it an input somewhere lies so close between two steps that it is rounded the other way, and from there on
    roundings are others: two such runs are 2 to 3 % apart, as far as each is from not rounding.
    """
    found, expected = found_logits(FIXTURES / name, level), expected_logits(FIXTURES / name, rounds_inputs=True)
    assert relative_error(found, expected) < 0.04
    if is_symmetric(name):
        assert relative_error(found[:1], expected[:1]) < 1e-5


def is_symmetric(name: str) -> bool:
    stored = read_model_config(FIXTURES / name).quantization
    assert stored is not None
    return stored.symmetric


def unordered(tensors: dict[str, Tensor], *modules: str) -> None:
    """Gives maps another order of inputs: any balanced g_idx is a valid weight."""
    for seed, module in enumerate(modules):
        group_of = tensors[f"model.layers.0.{module}.g_idx"]
        shuffle = torch.randperm(len(group_of), generator=torch.Generator().manual_seed(seed))
        tensors[f"model.layers.0.{module}.g_idx"] = group_of[shuffle]


def as_floats(folder: Path, *modules: str) -> Callable[[dict[str, Tensor]], None]:
    """Leaves maps unquantized, as modules_to_not_convert does."""
    weights = oracle_weights(folder)

    def change(tensors: dict[str, Tensor]) -> None:
        for module in modules:
            for suffix in ("qweight", "qzeros", "scales", "g_idx"):
                tensors.pop(f"model.layers.0.{module}.{suffix}", None)
            name = f"model.layers.0.{module}.weight"
            tensors[name] = weights[name]

    return change


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_maps_that_cannot_be_one_stay_apart(kernels: Kernels, copy: Callable[[str], Path]) -> None:
    """q, k, v and gate, up are multiplied together only where their formats and orders of inputs are the same."""
    ordered, mixed = copy(ACT_ORDER), copy(AWQ)
    edit(ordered, lambda tensors: unordered(tensors, "self_attn.k_proj", "mlp.up_proj"))
    edit(mixed, as_floats(mixed, "self_attn.v_proj", "mlp.gate_proj"))
    edit_config(mixed, modules_to_not_convert=["0.self_attn.v_proj", "0.mlp.gate_proj"])
    for folder in (ordered, mixed):
        error = relative_error(found_logits(folder, kernels), expected_logits(folder))
        assert error < (1e-3 if kernels == "reference" else 0.04), error


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neighbours_and_chunks_change_no_bit(dtype: torch.dtype, kernels: Kernels, copy: Callable[[str], Path]) -> None:
    """With inputs in an order of their own, and maps that stay apart."""
    folder = copy(ACT_ORDER)
    edit(folder, lambda tensors: unordered(tensors, "self_attn.k_proj", "mlp.up_proj"))
    kv_format = resolve_kv_format("auto", str(dtype).removeprefix("torch."))
    driver = PagedDriver(load(folder, kernels, dtype), num_blocks=32, kv_format=kv_format)
    whole = driver.step([(driver.add(TOKEN_IDS), len(TOKEN_IDS))])[0]
    first, second, other = (driver.add(ids) for ids in (TOKEN_IDS, TOKEN_IDS, TOKEN_IDS[::-1]))
    begun = driver.step([(other, 5), (first, 11)])[1]
    mixed = driver.step([(first, 1), (other, 20), (second, len(TOKEN_IDS))])
    rest = driver.step([(first, len(TOKEN_IDS) - 12)])[0]
    assert torch.equal(torch.cat([begun, mixed[0], rest]), whole)
    assert torch.equal(mixed[2], whole)


def test_bias_beside_maps_that_stay_apart(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq-4bit-g128-biases-qwen2")

    def change(tensors: dict[str, Tensor]) -> None:
        as_floats(folder, "self_attn.k_proj")(tensors)
        for projection in "qkv":
            tensors[f"model.layers.0.self_attn.{projection}_proj.bias"].normal_(generator=torch.manual_seed(1))

    edit(folder, change)
    edit_config(folder, dynamic={r"-:.*\.0\.self_attn\.k_proj": {}})
    assert relative_error(found_logits(folder, "reference"), expected_logits(folder)) < 1e-5


def test_groups_larger_than_the_kernels(copy: Callable[[str], Path]) -> None:
    """A scale for 256 inputs is one for each 128 of them."""
    n, k, size = 8, 512, 256
    generator = torch.Generator().manual_seed(0)
    config = read_model_config(FIXTURES / PACKED)
    folder = copy(PACKED)
    weights = {"strategy": "group", "num_bits": 8, "group_size": size, "symmetric": True, "type": "int"}
    edit_config(folder, config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, format="int-quantized")
    codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scales = torch.rand(n, k // size, generator=generator)
    save_file({"m.weight": codes, "m.weight_scale": scales}, folder / "model.safetensors")
    found = open_weights(folder, read_model_config(folder)).read("m.weight", torch.float32)
    assert isinstance(found, QuantizedWeight)
    assert (found.group_size, found.scales.shape[1]) == (128, 4)
    expected = codes.float() * scales.half().float().repeat_interleave(size, 1)
    torch.testing.assert_close(found.dequantize(), expected, rtol=0, atol=0)
    assert config.quantization != read_model_config(folder).quantization


def test_what_the_weights_will_take_is_known_before_they_are_read() -> None:
    for name in NAMES:
        source = open_folder(FIXTURES / name)
        for parameter, stored in source.weights.items():
            found = source.read(parameter, torch.bfloat16)
            assert stored.format == (found.format if isinstance(found, QuantizedWeight) else None)
    config = read_model_config(FIXTURES / AWQ)
    num_quantized = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    num_floats = 2 * 128 * 64 + 5 * 64
    source = open_weights(FIXTURES / AWQ, config)
    kernels: tuple[tuple[Kernels, float], ...] = (("auto", 0.5 + 4 / 32), ("reference", 2))
    for name, per_weight in kernels if native.is_built() else kernels[1:]:
        taken = weight_bytes(source, config, torch.bfloat16, operators_for(CPU, torch.bfloat16, name))
        assert taken == num_quantized * per_weight + 2 * num_floats


def test_quantization_may_be_named_and_not_be_done_twice() -> None:
    folder = FIXTURES / AWQ
    open_folder(folder, "awq")
    for asked in ("int4", "gptq"):
        with pytest.raises(SetupError, match=rf"quantization={asked}: .* quantized already \(awq\)"):
            open_folder(folder, asked)


def set_tensor(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def add(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("fixture", "change", "error", "said"),
    [
        (AWQ, drop(f"{Q}.qzeros"), CorruptCheckpoint, rf"{Q}\.qzeros is missing \(awq-gemm\)"),
        (AWQ, drop(f"{Q}.qweight"), CorruptCheckpoint, rf"{Q}\.qweight is missing \(awq-gemm\)"),
        (ACT_ORDER, drop(f"{DOWN}.qweight"), CorruptCheckpoint, rf"{DOWN}\.qweight is missing \(gptq\)"),
        (PACKED, drop(f"{Q}.weight_packed"), CorruptCheckpoint, rf"{Q}\.weight_packed is missing \(pack-quantized\)"),
        (AWQ, set_tensor(f"{Q}.qweight", Tensor.float), UnsupportedModel, rf"{Q}\.qweight has type F32; known: I32"),
        (
            AWQ,
            add("rest", torch.zeros(1, dtype=torch.int32)),
            UnsupportedModel,
            "rest has type I32; .* does not belong to a quantized matrix",
        ),
        (
            AWQ,
            set_tensor(f"{Q}.scales", lambda t: t[:1]),
            CorruptCheckpoint,
            r"scales is \[1, 64\] instead of \[2, 64\]",
        ),
        (AWQ, set_tensor(f"{Q}.qweight", lambda t: t[:48]), UnsupportedModel, "group_size 32 does not divide its 48"),
        (AWQ, set_tensor(f"{Q}.qweight", lambda t: t[:0]), CorruptCheckpoint, rf"{Q}\.qweight .* must be a matrix"),
        (AWQ, set_tensor(f"{Q}.qweight", lambda t: t[:, 0]), CorruptCheckpoint, rf"{Q}\.qweight .* must be a matrix"),
        (AWQ, set_tensor(f"{Q}.scales", lambda t: t.int()), UnsupportedModel, r"scales has type I32; known: F16"),
        (AWQ, add(f"{Q}.weight", torch.zeros(64, 64)), CorruptCheckpoint, rf"{Q}\.weight is stored twice"),
        (
            AWQ,
            set_tensor(f"{Q}.scales", lambda t: t * torch.nan),
            CorruptCheckpoint,
            rf"NaN or infinity in {Q}\.weight",
        ),
        (AWQ, set_tensor(f"{Q}.scales", lambda t: t.float() * 1e9), UnsupportedModel, rf"{Q}: its scales reach"),
        (AWQ, add(f"{Q}.bias", torch.ones(64)), CorruptCheckpoint, rf"not of this architecture: {Q}\.bias"),
        (
            ACT_ORDER,
            set_tensor(f"{DOWN}.qweight", lambda t: t[:, :-3]),
            CorruptCheckpoint,
            r"scales is \[4, 64\] instead",
        ),
        (ACT_ORDER, drop(f"{DOWN}.g_idx"), CorruptCheckpoint, rf"{DOWN}\.g_idx is missing"),
        (ACT_ORDER, set_tensor(f"{DOWN}.g_idx", lambda t: t * 0), UnsupportedModel, rf"{DOWN}: .* 4 groups of 32 each"),
        (ACT_ORDER, set_tensor(f"{DOWN}.g_idx", lambda t: t - 1), UnsupportedModel, rf"{DOWN}: .* \(g_idx\)"),
        (ACT_ORDER, set_tensor(f"{DOWN}.qzeros", lambda t: t + 1), CorruptCheckpoint, r"symmetric \(sym\)"),
        (
            ASYMMETRIC,
            set_tensor(f"{DOWN}.qzeros", lambda t: t | 15),
            CorruptCheckpoint,
            rf"{DOWN}\.qzeros: a zero point",
        ),
        (PACKED, drop(f"{Q}.weight_shape"), CorruptCheckpoint, rf"{Q}\.weight_shape is missing"),
        (PACKED, set_tensor(f"{Q}.weight_shape", lambda t: t - 1), CorruptCheckpoint, r"weight_shape is \[63, 63\]"),
        (PACKED, add(f"{Q}.input_scale", torch.ones(1)), CorruptCheckpoint, rf"not of this architecture: {Q}\.input_s"),
    ],
)
def test_damaged_tensors_are_named(
    fixture: str,
    change: Callable[[dict[str, Tensor]], None],
    error: type[Exception],
    said: str,
    copy: Callable[[str], Path],
) -> None:
    folder = copy(fixture)
    edit(folder, change)
    with pytest.raises(error, match=said):
        found_logits(folder, "reference")


@pytest.mark.parametrize("shift", [0, 1])
def test_symmetric_is_symmetric_whatever_the_label_says(shift: int, copy: Callable[[str], Path]) -> None:
    """Published files are labelled `gptq` and hold the zero points of `gptq_v2`; where `sym` is set, both mean 8."""
    folder = copy("gptq-4bit-g32-llama")
    before = found_logits(folder, "reference")

    def move(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                tensor.add_(shift * 0x11111111)

    edit(folder, move)
    assert torch.equal(found_logits(folder, "reference"), before)


def test_mixed_precisions_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq-4bit-g32-llama")
    edit_config(folder, bits=8)
    with pytest.raises(
        CorruptCheckpoint, match=r"model\.layers\.\S+ is .* every matrix must be stored as config\.json says"
    ):
        open_folder(folder)
