"""A model folder on disk: finding it, its config files, and the tensors in its safetensors files by name.

Tensor names are converted to those of a text-only checkpoint, also for models that read images and for older
architectures:

model.language_model.layers.0.mlp.up_proj.weight   ─► model.layers.0.mlp.up_proj.weight
language_model.model.norm.weight                   ─► model.norm.weight
vision_tower.encoder.layers.0.layer_norm1.weight   ─► none: a request with images is refused
embed_out.weight                                   ─► lm_head.weight: the older name in GPT-NeoX
h.0.attn.c_attn.weight                             ─► transformer.h.0.attn.c_attn.weight: GPT-2 and BLOOM
transformer.h.0.ln_mlp.weight                      ─► transformer.h.0.post_attention_layernorm.weight: Falcon 40B
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.config.model import ModelConfig
from twostroke.config.nearest import architecture_by_model_type
from twostroke.config.text_config import text_config, tied_text_config, unread_text_config
from twostroke.errors import CorruptCheckpoint, ModelNotFound, shorten, show_name, shown
from twostroke.lfs_pointer import remedy_for
from twostroke.log import get_logger
from twostroke.model.model_path import HUB_ID, local_path, no_config, no_folder
from twostroke.model.weight_source import ALL_ROWS
from twostroke.plain_words import reason_of
from twostroke.weight_file import WeightFile

_TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.", "embed_vision.", "embed_audio.")


def text_name(name: str) -> str | None:
    """Return a tensor's name in a text-only checkpoint; None: the text model does not have it.

    >>> text_name("language_model.lm_head.weight"), text_name("model.visual.merger.norm.weight")
    ('lm_head.weight', None)
    """
    if name.removeprefix("model.").startswith(_TOWERS):
        return None
    if name.startswith("embed_out."):
        return name.replace("embed_out", "lm_head", 1)
    if name.startswith(("h.", "wte.", "wpe.", "ln_f.", "word_embeddings")):
        return f"transformer.{name}"
    if name.startswith("transformer.h."):
        return name.replace(".ln_attn.", ".input_layernorm.").replace(".ln_mlp.", ".post_attention_layernorm.")
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")


_CONSTANTS = (
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
    ".mlp.act_fn.beta",
    ".mlp.act_fn.eps",
)


def is_constant(name: str) -> bool:
    """Return whether a tensor is not a weight: causal masks in old GPT checkpoints, and constants common to all xIELUs.

    >>> is_constant("transformer.h.0.attn.bias"), is_constant("transformer.h.0.attn.c_attn.bias")
    (True, False)
    """
    return name.endswith(_CONSTANTS)


_OF_KV = re.compile(
    r"(?:model\.layers|blk)\.(?P<layer>\d+)\.(?:self_attn\.(?:k|v)_(?:proj|norm)|attn_(?:k|v|k_norm))\..+"
)


def is_shared_kv_tensor(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor projects K or V in a layer that uses the K and V of another layer.

    `name` is the name in a checkpoint or a GGUF file.
    """
    found = _OF_KV.fullmatch(name)
    layer_id = -1 if found is None else int(found["layer"])
    return 0 <= layer_id < config.num_layers and config.layers[layer_id].kv_source is not None


_OF_A_LAYER = re.compile(r"(?:model\.layers|blk)\.(?P<layer>\d+)\..+")


def is_mtp_tensor(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to multi-token prediction, which is not read.

    Those are layers behind the last one, and ERNIE's tensors of that kind. `name` is the name in a checkpoint or a
    GGUF file.
    """
    found = _OF_A_LAYER.fullmatch(name)
    is_behind = found is not None and int(found["layer"]) >= config.num_layers
    return config.num_prediction_layers > 0 and (is_behind or name.startswith("model.mtp_"))


log = get_logger(__name__)

_EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
MAX_JSON_BYTES = 64 * 2**20
"""Maximum size of a config or an index. The index of a thousand layers has a few megabytes."""
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_FILES_LEFT_OUT = ["consolidated*", "original/*"]
"""Copies of the same weights in the format of the model's makers."""
_MAX_NAME_BYTES = 255
"""Maximum length of a file name on common systems; the system reports an error for a longer one."""
_MAX_CHARACTERS = 240
"""Maximum length of a quoted message of the hub's client, which may be a whole page."""


def find_model_folder(model: str, *, with_weights: bool = True) -> Path:
    """Return the local folder of a model given as a folder, a hub id (fetched once and then kept) or "embedded".

    Args:
        model: the model as the user gave it.
        with_weights: False fetches only the files that a tokenizer needs.

    Raises:
        ModelNotFound: there is no such folder, and the hub does not have it or cannot be reached.
    """
    path = _EMBEDDED if model == "embedded" else local_path(model)
    if path.is_dir():
        return path
    if path.is_file() or not HUB_ID.fullmatch(model):
        raise no_folder(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFound(f"no folder {model!r}; fetching it from the hub needs huggingface_hub.") from error
    left_out = _HUB_FILES_LEFT_OUT if with_weights else [*_HUB_FILES_LEFT_OUT, "*.safetensors"]
    try:
        path = Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=left_out))
    except Exception as error:  # the hub client raises many unrelated types for "no network" and "no such model"
        raise ModelNotFound(
            f"there is no folder {model!r}, and it could not be fetched from the hub ({_shortened(reason_of(error))}). "
            "Check the name and the network, or download the model and give its folder."
        ) from error
    if not any((path / name).is_file() for name in ("config.json", "tokenizer.json")):
        raise ModelNotFound(
            f"{model} on the hub has no config.json. If it holds GGUF files, download one (hf download {model} FILE) "
            "and give its path."
        )
    return path


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def read_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a folder.

    Raises:
        ModelNotFound: the folder has no config.json.
        CorruptCheckpoint: a file is not JSON, or its numbers contradict each other.
        UnsupportedModel: the config needs a feature that is not implemented.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise no_config(folder)
    try:
        read = ModelConfig.from_hf(config)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{folder}: {error} Correct config.json, or download the model again.") from error
    unread = unread_text_config(config, read.architecture) if text_config(config) is config else ""
    if unread:
        log.warning("%s: config.json: %s", folder, unread)
    other = architecture_by_model_type(read.architecture, config.get("model_type"), ARCHITECTURE_TRAITS)
    if other is not None:
        log.warning(
            "%s: config.json names the architecture %s, but model_type %s means %s; the architecture is used",
            folder,
            read.architecture,
            show_name(config["model_type"]),
            other,
        )
    tied = None if read.tie_word_embeddings else tied_text_config(config)
    return read if tied is None or _may_store_head(folder) else ModelConfig.from_hf(tied)


def _may_store_head(folder: Path) -> bool:
    """Return whether the files have an output head.

    The answer is also True if files are absent or cannot be read; their reader reports that.
    """
    index = read_json(folder / "model.safetensors.index.json")
    names = [] if index is None else list(_weight_map(index, folder))
    for path in [] if names else [folder / name for name in _files_without_index(folder)]:
        try:
            if path.is_file():  # opening a pipe would block
                with cast(Any, safe_open(path, framework="pt")) as file:
                    names += file.keys()
        except (SafetensorError, OSError):
            return True
    return not names or any((text_name(name) or "").startswith("lm_head.") for name in names)


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorruptCheckpoint(f"{path}: {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        told = f"{path} cannot be read as JSON ({reason_of(error)}). {remedy_for(path)}"
        raise CorruptCheckpoint(told) from error
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path} does not hold a JSON object. Download it again.")
    return content


class Checkpoint:
    """The tensors of a folder's safetensors files, single or sharded, without those of image and audio towers."""

    def __init__(self, folder: Path) -> None:
        """Open the files and read their headers.

        Raises:
            ModelNotFound: there are no safetensors files.
            CorruptCheckpoint: a file is missing, truncated or not a safetensors file, or the index disagrees.
        """
        self.path = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        """Types in safetensors' spelling: F32, BF16, I32 ..."""
        self._file_of: dict[str, tuple[WeightFile, int]] = {}
        """For each tensor, its file and its first byte there."""
        self._file_name_of: dict[str, str] = {}
        """Name of the file of each tensor, by the tensor's name in the file."""
        skipped: list[str] = []
        index = read_json(folder / "model.safetensors.index.json")
        if index is not None:
            file_names = sorted(set(_weight_map(index, folder).values()))
        else:
            file_names = _files_without_index(folder)
        if not file_names:
            raise ModelNotFound(f"{folder} has no safetensors files; other weight formats are not read.")
        for file_name in file_names:
            self._open(folder / file_name, skipped)
        if index is not None:
            misplaced = [
                n for n, file_name in _weight_map(index, folder).items() if self._file_name_of.get(n) != file_name
            ]
            if misplaced:
                raise CorruptCheckpoint(
                    f"{folder}: the index names tensors that are not in the files it gives: {shorten(misplaced)}."
                )

        if skipped:
            log.warning(
                "%s: %d tensors outside the text model are not loaded: %s", folder, len(skipped), shorten(skipped, 2)
            )

    def _open(self, path: Path, skipped: list[str]) -> None:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise CorruptCheckpoint(f"{path} is not a regular file. Download it again.")
        try:
            content = WeightFile(path)
            file: Any = safe_open(path, framework="pt")  # validates the header; tensors are read by WeightFile
            places = _places(content)
            for name in file.keys():  # noqa: SIM118  a handle, not a mapping
                header = file.get_slice(name)
                if name in self._file_name_of:
                    both = f"{self._file_name_of[name]} and {path.name}"
                    raise CorruptCheckpoint(
                        f"{path.parent}: {show_name(name)} is in {both}. Remove the file that is not the model's."
                    )
                self._file_name_of[name] = path.name
                if is_constant(name):
                    continue
                ours = text_name(name)
                if ours is None:
                    skipped.append(name)
                    continue
                if ours in self.shapes:
                    raise CorruptCheckpoint(f"{path.parent}: {show_name(ours)} is stored under two names.")
                self.shapes[ours], self.types[ours] = tuple(header.get_shape()), header.get_dtype()
                self._file_of[ours] = content, places[name]
        except (SafetensorError, OSError) as error:
            told = f"{path} cannot be read ({_without(path, error)}). {remedy_for(path)}"
            raise CorruptCheckpoint(told) from error

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Return a copy of a tensor, or of some of its rows, in its stored type.

        Raises:
            CorruptCheckpoint: its bytes cannot be read, or their type does not exist in torch.
        """
        (file, begin), shape, kind = self._file_of[name], self.shapes[name], self.types[name]
        if kind not in _TYPES:
            raise CorruptCheckpoint(f"{file.path}: {show_name(name)} has type {kind}; known: {', '.join(_TYPES)}.")
        dtype = _TYPES[kind]
        first, end, _ = rows.indices(shape[0]) if shape else (0, 1, 1)
        num_rows, of_row = max(0, end - first), shape[1:]
        size = prod(of_row) * dtype.itemsize
        data = torch.from_numpy(file.read(begin + first * size, num_rows * size, name))
        return data.view(dtype).view((num_rows, *of_row) if shape else ())


def _places(file: WeightFile) -> dict[str, int]:
    """Return the first byte of each tensor; the header must be valid."""
    size = int.from_bytes(file.read(0, _LENGTH_BYTES, "the length of the header").tobytes(), "little")
    header = json.loads(file.read(_LENGTH_BYTES, size, "the header").tobytes())
    begin = _LENGTH_BYTES + size
    return {name: begin + one["data_offsets"][0] for name, one in header.items() if name != "__metadata__"}


_LENGTH_BYTES = 8
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def _files_without_index(folder: Path) -> list[str]:
    """Return the weight files of a model without an index: its single file, or its numbered ones.

    Other files beside these (Mistral's own format, adapters, copies) do not belong to the model.

    Raises:
        CorruptCheckpoint: a numbered file is missing.
    """
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in names:
        return ["model.safetensors"]
    shards = {name: shard for name in names if (shard := _SHARD.fullmatch(name)) is not None}
    for name, shard in shards.items():
        count = int(shard[2])
        wanted = (f"model-{number:05}-of-{shard[2]}.safetensors" for number in range(1, count + 1))
        absent = next((other for other in wanted if other not in shards), None)
        if absent is not None:
            raise CorruptCheckpoint(f"{folder}: {name} is one of {count} files, but {absent} is missing. Download it.")
    return list(shards) or names


def _without(path: Path, error: Exception) -> str:
    """Return the library's message without the path at its end."""
    return str(error).removesuffix(f": {path}")


def _weight_map(index: dict[str, Any], folder: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpoint(f"{folder}: model.safetensors.index.json has no weight_map. Download it again.")
    for name, file_name in cast(dict[str, Any], weight_map).items():
        # only names of files in the folder: a path would let a checkpoint read any file of this machine
        if not _is_weight_file_name(file_name):
            raise CorruptCheckpoint(
                f"{folder}: weight_map in model.safetensors.index.json gives {shown(file_name)} for {shorten([name])}; "
                "it must be the name of a safetensors file beside it. Download it again."
            )
    return cast(dict[str, str], weight_map)


def _is_weight_file_name(name: object) -> bool:
    if not (isinstance(name, str) and name.endswith(".safetensors") and name.isprintable()):
        return False
    return Path(name).name == name and len(name.encode()) <= _MAX_NAME_BYTES


def bundled_drafter(folder: Path, kind: str) -> Path | None:
    """Return the folder `kind` with a drafter that comes with the embedded model; None if there is none."""
    path = folder / kind
    return path if folder == _EMBEDDED and path.is_dir() else None
