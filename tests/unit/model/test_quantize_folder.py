"""A folder that was quantized ahead gives the bits of quantizing on load, and is whole or not there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gguf_files import fixture
from twostroke import LLM, SamplingParams
from twostroke.errors import InvalidParameter, ModelNotFound, SetupError, TwostrokeError, UnsupportedModel
from twostroke.model import quantize_folder as module
from twostroke.model.quantize_folder import quantize_folder

FORMATS: list[dict[str, Any]] = [
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "int4", "group_size": 64},
]


def scores(model: str, **config: Any) -> list[Any]:
    with LLM(model, threads=1, kv_cache_memory=1 << 24, **config) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": list(range(n, 60))} for n in (0, 20, 59)], params)
    return [[(t, p.logprob) for at in o.outputs[0].logprobs or [] for t, p in at.items()] for o in outputs]


FAMILIES = ("qwen3", "qwen2", "stablelm", "gpt2", "qwen3_moe", "qwen2_moe", "granite_moe", "glm4_moe", "embedded")
CASES = [(family, given) for family in FAMILIES for given in FORMATS]


@pytest.mark.parametrize(
    ("family", "given"), [c for c in CASES if c[0] == "embedded" or "group_size" not in c[1]], ids=str
)
def test_the_bits_of_quantizing_on_load(
    family: str, given: dict[str, Any], random_models: dict[str, Path], tmp_path: Path
) -> None:
    model = str(random_models.get(family, family))
    made = quantize_folder(model, tmp_path / "out", **given)
    assert made.bytes_after < 0.7 * made.bytes_before
    assert scores(str(tmp_path / "out")) == scores(model, **given)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_many_files(random_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES_PER_FILE", 20_000)
    quantize_folder(str(random_models["llama"]), tmp_path / "out", "int8")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert scores(str(tmp_path / "out")) == scores(str(random_models["llama"]), quantization="int8")


def test_refusals(random_models: dict[str, Path], tmp_path: Path) -> None:
    model, out = str(random_models["llama"]), tmp_path / "out"
    for given, kind, words in (
        ({"quantization": "int4", "group_size": 64}, InvalidParameter, "does not divide the 96 inputs of .*down_proj"),
        ({"quantization": "int4", "group_size": 48}, InvalidParameter, "must be one of 32, 64, 128"),
        ({"quantization": "int8", "group_size": 32}, InvalidParameter, "changes nothing"),
    ):
        with pytest.raises(kind, match=words):
            quantize_folder(model, out, **given)
    quantize_folder(model, out, "int8")
    with pytest.raises(InvalidParameter, match="exists already"):
        quantize_folder(model, out, "int8")
    with pytest.raises(SetupError, match="quantized already"):
        quantize_folder(str(out), tmp_path / "again", "int8")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidParameter, match="cannot be written"):
        quantize_folder(model, tmp_path / "file" / "out", "int8")


def test_nothing_is_left_of_what_failed(random_models: dict[str, Path], tmp_path: Path) -> None:
    """A tensor that cannot be used is found half-way: the folder must not appear, nor anything else."""
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for path in random_models["llama"].iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TwostrokeError, match=r"NaN or infinity in model\.norm\.weight"):
        quantize_folder(str(broken), tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_config_says_how_weights_are_stored(random_models: dict[str, Path], tmp_path: Path) -> None:
    quantize_folder(str(random_models["llama"]), tmp_path / "out", "int4", group_size=32)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"] | {"num_bits": 4, "group_size": 32, "symmetric": True} == group["weights"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        random_models["llama"] / "tokenizer.json"
    ).read_bytes()


def test_a_gguf_file_is_refused_for_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"llama-q4_0\.gguf' is a GGUF file; .*Give the folder or hub id"):
        quantize_folder(str(fixture("llama-q4_0")), tmp_path / "out", "int8")
    with pytest.raises(ModelNotFound, match="there is no file"):
        quantize_folder(str(tmp_path / "absent.gguf"), tmp_path / "out", "int8")


def test_a_full_disk_is_said_in_a_line(random_models: dict[str, Path], tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does: in the library that writes them."""
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "from twostroke.cli.main import main; main()"
    )
    arguments = ["quantize", str(random_models["llama"]), str(tmp_path / "out"), "--quantization", "int8"]
    ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
    assert re.search(r"OUT=.*: cannot be written \(.*\)", ran.stderr)
    assert not list(tmp_path.iterdir())
