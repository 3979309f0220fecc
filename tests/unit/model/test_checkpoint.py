"""Model folders: single and sharded files, tied heads, types, and everything that can be wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.config.kv_format import resolve_kv_format
from twostroke.errors import CorruptCheckpoint, ModelNotFound, SetupError, UnsupportedModel
from twostroke.kernels.dispatch import operators_for
from twostroke.model.checkpoint import Checkpoint, find_model_folder, read_model_config
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.loader import load_model, open_weights
from twostroke.model.model_files import find_model
from twostroke.model.registry import ARCHITECTURES, Architecture, architecture, model_class, num_parameters
from twostroke.model.weight_map import LLAMA, checkpoint_names
from twostroke.model.weight_size import weight_bytes

CPU = torch.device("cpu")
TOKEN_IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    config = read_model_config(folder)
    weights, operators = open_weights(folder, config), operators_for(CPU, dtype)
    return load_model(weights, config, Placement(operators, dtype, CPU, 64))


def logits(model: DecoderModel, dtype: torch.dtype = torch.float32) -> Tensor:
    driver = PagedDriver(model, num_blocks=8, kv_format=resolve_kv_format("auto", str(dtype).removeprefix("torch.")))
    return driver.logits(driver.step([(driver.add(TOKEN_IDS), len(TOKEN_IDS))])[0])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    naive_model.build(folder, "Llama", num_hidden_layers=2)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of a sound folder, to be damaged."""
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shard(folder: Path, num_shards: int) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file_name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::num_shards]}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_load_like_a_single_file(sound: Path, folder: Path) -> None:
    shard(folder, 3)
    assert torch.equal(logits(load(folder)), logits(load(sound)))


def test_running_changes_no_weight(sound: Path) -> None:
    model = load(sound)
    first = logits(model)
    assert not first.requires_grad
    assert torch.equal(logits(model), first)
    weights = open_weights(sound, model.config)
    plain = operators_for(CPU, torch.float32, "reference")
    assert weight_bytes(weights, model.config, torch.float32, plain) == 4 * num_parameters(model.config)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_types_are_converted_while_loading(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    found = logits(load(folder, wanted), wanted)
    assert found.dtype is torch.float32
    tolerance = 1e-4 if stored is wanted is torch.float32 else 2.0
    torch.testing.assert_close(found, logits(load(folder)), atol=tolerance, rtol=0.2)


def test_the_file_may_change_once_it_is_loaded(folder: Path) -> None:
    model = load(folder)
    before = logits(model)
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(logits(model), before)


def test_tied_heads(tmp_path: Path) -> None:
    naive_model.build(tmp_path, "Llama", tie_word_embeddings=True)
    model = load(tmp_path)
    before = logits(model)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(tmp_path)), before)
    edit(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CorruptCheckpoint, match="Set tie_word_embeddings to false"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["Llama", "OPT", "Falcon"])
def test_a_tied_head_may_be_stored_without_the_embedding(kind: str, tmp_path: Path) -> None:
    """transformers 5 reads such checkpoints as well."""
    changes = {"Llama": {}, "OPT": {"pad_token_id": 0}, "Falcon": {}}[kind]
    theirs = naive_model.build(tmp_path, kind, tie_word_embeddings=True, num_key_value_heads=4, **changes)
    model = load(tmp_path)
    before = logits(model)
    embedding = checkpoint_names(architecture(model.config.architecture).names, "embedding.weight")[0]
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(embedding)}))
    assert torch.equal(logits(load(tmp_path)), before)
    as_theirs = naive_model.logits(type(theirs).from_pretrained(tmp_path), TOKEN_IDS)
    torch.testing.assert_close(as_theirs, naive_model.logits(theirs, TOKEN_IDS), rtol=1e-4, atol=1e-4)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CorruptCheckpoint, match=f"missing: {embedding}"):
        load(tmp_path)


def test_old_rotary_frequencies_are_harmless(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


def test_names_of_tensors_are_quoted_in_a_short_printable_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"\x1b[2J{'a' * 3000}{i}.weight" for i in range(20)]
    edit(folder, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))
    with pytest.raises(CorruptCheckpoint, match="not of this architecture: ") as told:
        load(folder)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 1500
    edit(folder, lambda tensors: tensors.update({f"vision_tower.{name}": tensors.pop(name) for name in names}))
    load(folder)
    assert "20 tensors outside the text model are not loaded" in caplog.text
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 600 for record in caplog.records)


def test_a_message_about_files_is_one_printable_line_whatever_they_say() -> None:
    told = str(CorruptCheckpoint(f"model: {'b' * 10**6}\x1b[2J\n is wrong"))
    assert told.isprintable()
    assert len(told) < 5000
    assert str(CorruptCheckpoint("a\nb\x1b")) == "a\\nb\\x1b"


def test_a_text_config_that_lies_unread_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": {"num_hidden_layers": 3}}))
    assert read_model_config(folder).num_layers == 2
    assert caplog.text.count("text_config is not read, since LlamaForCausalLM is text-only") == 1


def test_every_wrong_tensor_is_named_at_once(folder: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 64)

    edit(folder, damage)
    with pytest.raises(CorruptCheckpoint) as caught:
        load(folder)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "k_proj.weight is [16, 64] instead of [32, 64]" in message
    assert "not of this architecture: model.layers.0.self_attn.q_proj.bias" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "layers.0.input_layernorm.weight", "norm.weight"])
def test_a_number_that_is_none_is_found_in_its_tensor(folder: Path, name: str, value: float) -> None:
    """Two of them that could cancel out are found, too, and one in a tensor that is stacked with another."""
    edit(folder, lambda tensors: tensors[f"model.{name}"].view(-1)[-2:].copy_(torch.tensor([-value, value])))
    with pytest.raises(CorruptCheckpoint, match=rf"NaN or infinity in model\.{name}\. Download"):
        load(folder)


def test_weights_too_large_for_the_type(folder: Path) -> None:
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[3].fill_(1e5))
    load(folder, torch.bfloat16)
    with pytest.raises(SetupError, match=r"dtype=float16: model\.layers\.1\.mlp\.up_proj\.weight .* 65504"):
        load(folder, torch.float16)


def test_a_sum_that_is_too_large_is_no_infinity(folder: Path) -> None:
    edit(folder, lambda tensors: tensors["lm_head.weight"].fill_(2e4))
    load(folder, torch.float16)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1])
def test_truncated_files(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        load(folder)


def test_corrupt_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        load(folder)


def test_a_stray_file_replaces_no_weights(folder: Path) -> None:
    """Beside model.safetensors or numbered files it is ignored; among other names it is ambiguous."""
    stray = {"model.norm.weight": torch.zeros(4)}
    save_file(stray, folder / "zz.safetensors")
    assert "model.norm.weight" in Checkpoint(folder).shapes
    assert Checkpoint(folder).read("model.norm.weight").any()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert Checkpoint(folder).read("model.norm.weight").any()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"model\.norm\.weight is in .* and zz"):
        Checkpoint(folder)


def test_missing_shard_and_wrong_index(folder: Path) -> None:
    weight_map = shard(folder, 2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.ghost": weight_map["lm_head.weight"]}}))
    with pytest.raises(CorruptCheckpoint, match=r"not in the files it gives: model\.ghost"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="no weight_map"):
        load(folder)
    for wrong in (3, None, ["model.safetensors"], "../model.safetensors", ""):
        index.write_text(json.dumps({"weight_map": {**weight_map, "lm_head.weight": wrong}}))
        with pytest.raises(CorruptCheckpoint, match=r"weight_map .* for lm_head\.weight"):
            load(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / weight_map["lm_head.weight"]).unlink()
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        load(folder)


def test_a_second_copy_in_the_makers_format_is_left_alone(sound: Path, folder: Path) -> None:
    save_file({"layers.0.attention.wq.weight": torch.ones(4)}, folder / "consolidated.safetensors")
    assert torch.equal(logits(load(folder)), logits(load(sound)))


def test_other_files_beside_numbered_ones_are_left_alone(sound: Path, folder: Path) -> None:
    """An index may be missing; the numbers say what belongs together."""
    shard(folder, 2)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")
    assert torch.equal(logits(load(folder)), logits(load(sound)))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"one of 2 files, but model-00002-of-00002\.safetensors is missing"):
        load(folder)


READS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": load,
    "config.json": load,
    "tokenizer.json": lambda folder: find_model(str(folder)).tokenizer(),
    "x.gguf": lambda folder: find_model(str(folder / "x.gguf")),
}
"""What reads a file of a folder."""


@pytest.mark.parametrize("name", READS)
def test_pointers_of_git_lfs_are_told(name: str, folder: Path) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n")
    with pytest.raises(CorruptCheckpoint, match=r"pointer of Git LFS .* `git lfs pull`"):
        READS[name](folder)


def test_integer_weights_are_not_run(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has type I8"):
        load(folder)


@pytest.mark.parametrize(("kind", "other"), [("qwen2", "Qwen2ForCausalLM"), ("llama", None), ("yi", None), (7, None)])
def test_a_model_type_of_another_family_is_said(
    kind: object, other: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"model_type": kind}), encoding="utf-8")
    assert read_model_config(folder).architecture == "LlamaForCausalLM"
    said = [line.getMessage() for line in caplog.records]
    assert said == [] if other is None else f"model_type {kind} means {other}" in said[0]


def test_folders_that_are_no_models(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        read_model_config(tmp_path)
    with pytest.raises(ModelNotFound, match="no folder"):
        find_model_folder(str(tmp_path / "absent"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"no safetensors files.*Download them, or use --load-format dummy: random"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match="cannot be read as JSON"):
        read_model_config(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CorruptCheckpoint, match="does not hold a JSON object"):
        read_model_config(folder)


def test_hub_ids_offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"no route to host.*give its folder"):
        find_model_folder("somebody/some-model")
    asked: dict[str, object] = {}

    def online(*args: object, **kwargs: object) -> str:
        asked.update(kwargs)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", online)
    assert find_model_folder("somebody/some-model") == folder
    assert "consolidated*" in asked["ignore_patterns"]
    assert find_model_folder(str(folder)) == folder


def test_unknown_architecture() -> None:
    with pytest.raises(UnsupportedModel, match=r"known: .*LlamaForCausalLM"):
        architecture("MptForCausalLM")
    assert all(issubclass(model_class(name), DecoderModel) for name in ARCHITECTURES)


def test_parts_may_be_stored_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 stores one tensor for q, k and v, and one for gate and up. The table names them once; the maths is the
    same."""
    before = logits(load(folder))
    together = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}

    def fuse(tensors: dict[str, Tensor]) -> None:
        for i in range(2):
            for ours, theirs in together.items():
                parts = checkpoint_names(LLAMA, f"layers.{i}.{ours}.weight")
                tensors[f"model.layers.{i}.{theirs}.weight"] = torch.cat([tensors.pop(part) for part in parts])

    edit(folder, fuse)
    names = {**LLAMA, **{f"layers.{{i}}.{ours}": f"model.layers.{{i}}.{theirs}" for ours, theirs in together.items()}}
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", Architecture("twostroke.model.llama:Llama", names))
    assert torch.equal(logits(load(folder)), before)


def test_k_and_v_that_a_layer_takes_from_another_are_not_read(tmp_path: Path) -> None:
    """Gemma 4's checkpoints have them."""
    shared = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    sizes = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199}
    naive_model.build(tmp_path, "Gemma4", tie_word_embeddings=True, **shared, **sizes)
    expected = logits(load(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    unread = {f"model.layers.3.self_attn.{name}.weight": torch.ones(64, 64) for name in ("k_proj", "v_proj")}
    save_file({**tensors, **unread, "model.layers.3.self_attn.k_norm.weight": torch.ones(32)}, path)
    assert torch.equal(logits(load(tmp_path)), expected)
    save_file({**tensors, "model.layers.1.self_attn.v_norm.weight": torch.ones(32)}, path)
    with pytest.raises(CorruptCheckpoint, match=r"not of this architecture: model.layers.1.self_attn.v_norm.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "config", "behind"),
    [
        ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}, "model.mtp_block.0"),
        ("Glm4Moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "model.layers.3"),
    ],
)
def test_layers_that_only_predict_further_tokens_are_left_out(
    kind: str, config: dict[str, int], behind: str, tmp_path: Path
) -> None:
    """This holds if config.json declares such layers; otherwise they are refused by name."""
    naive_model.build(tmp_path, kind, **config, num_nextn_predict_layers=1)
    expected = logits(load(tmp_path))
    weights, told = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file({**load_file(weights), f"{behind}.input_layernorm.weight": torch.ones(64)}, weights)
    assert torch.equal(logits(load(tmp_path)), expected)
    told.write_text(json.dumps({**json.loads(told.read_text()), "num_nextn_predict_layers": 0}))
    with pytest.raises(CorruptCheckpoint, match=f"not of this architecture: {behind}.input_layernorm.weight"):
        load(tmp_path)


@pytest.mark.parametrize("gone", ["router.per_expert_scale", "router.scale", "post_feedforward_layernorm_1.weight"])
def test_a_sparse_gemma_4_that_is_not_whole_is_refused(gone: str, tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    naive_model.build(tmp_path, "Gemma4", hidden_size_per_layer_input=0, **experts)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.1.{gone}"]
    save_file(tensors, path)
    with pytest.raises(CorruptCheckpoint, match=f"missing: model.layers.1.{gone}"):
        load(tmp_path)
