"""GGUFWeights: the weight source for GGUF files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint, shorten
from twostroke.gguf.container import TYPES, GGUFFile, StoredTensor
from twostroke.kernels.quantized_weight import LARGEST_SCALE, QuantizedFormat, QuantizedWeight
from twostroke.kernels.stored_rows import StoredRows
from twostroke.log import get_logger
from twostroke.model.checkpoint import is_mtp_tensor, is_shared_kv_tensor
from twostroke.model.gguf.architectures import GGUFArchitecture, gguf_architecture, listed_number
from twostroke.model.gguf.blocks import REPACKED, repack
from twostroke.model.gguf.model_config import ROPE_FACTORS, ROPE_FREQS
from twostroke.model.gguf.names import gguf_names, of_layer, stack_of_experts
from twostroke.model.registry import parts_of
from twostroke.model.weight_source import ALL_ROWS, StoredStack, StoredWeight

log = get_logger(__name__)

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """Tensors of a GGUF file, read on demand. Implements WeightSource."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Find the tensors that the model needs.

        Raises:
            CorruptCheckpoint: tensors are missing, or there are extra ones; all are named as in the file.
        """
        self._file, self._config = file, config
        theirs = gguf_architecture(file.metadata)
        self._has_permuted_heads, self._has_grouped_qkv = theirs.has_permuted_heads, theirs.has_grouped_qkv
        self._has_whole_norms = theirs.norms_include_one
        _check_stacks(file, config)
        self._stored: dict[str, StoredTensor] = {}
        used, missing = {ROPE_FREQS, *ROPE_FACTORS.values()}, list[str]()
        parts = (part for stored in parts_of(config).values() for part in stored)
        known_of = {name: gguf_names(name, theirs.names) or (name,) for name in parts}
        alone = {known[0] for known in known_of.values() if len(known) == 1}
        for name, known in known_of.items():
            # of several names, take the one in the file, but not one that is the only name of another tensor
            possible = [one for one in known if len(known) == 1 or one not in alone]
            stored = next((one for one in possible if one in file.tensors), possible[-1])
            found = file.tensors.get(stored) or _tensor_from_list(file, name, theirs)
            found = found or _part_of_qkv(file, name, config.layers[0]) or _of_stack(file, name)
            if found is None:
                stack = stack_of_experts(name)
                missing.append(stored if stack is None else stack[0])
            else:
                self._stored[name] = _as_matrix(name, found)
                used.add(found.name)
        own = {found.name for found in self._stored.values()}
        self._factors = {name: _factor(file, name, found, own) for name, found in self._stored.items()}
        used.update(name for found in self._stored.values() for name in _factor_names(found))
        extra = [
            name
            for name in file.tensors
            if name not in used and not is_shared_kv_tensor(name, config) and not is_mtp_tensor(name, config)
        ]
        missing = list(dict.fromkeys(missing))
        problems = [f"{what}: {shorten(found)}" for what, found in (("missing", missing), ("unknown", extra)) if found]
        if problems:
            raise CorruptCheckpoint(
                f"{file.path}: the tensors do not fit its metadata ({config.architecture}); {'; '.join(problems)}. "
                "Convert the model again."
            )
        self.weights: Mapping[str, StoredWeight] = {
            name: StoredWeight(
                tensor.shape,
                _format(tensor),
                stored_name=tensor.name,
                stack=_stack(file, tensor),
                float_type=tensor.type.name if tensor.type.name in _FLOATS else None,
            )
            for name, tensor in self._stored.items()
        }
        stored = [(tensor.type.name, self._factors[name] is not None) for name, tensor in self._stored.items()]
        self.quantization = "gguf" if {kind for kind, _ in stored} - _FLOATS.keys() else None
        log.info("%s: %s", file.path.name, ", ".join(_described(*one, count) for one, count in Counter(stored).items()))

    @property
    def path(self) -> Path:
        return self._file.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        if self._has_whole_norm(name):
            return self.read_float32(name, rows)
        tensor = self._stored[name]
        # reorder rows before unpacking, when they have fewer bytes
        data, places = self._data(name, rows)
        if not tensor.type.is_quantized:
            return data.view(_FLOATS[tensor.type.name])[places]
        blocks = data[places].unflatten(-1, (-1, tensor.type.block_bytes))
        weight, factor = repack(tensor.type.name, blocks, (len(blocks), tensor.shape[1]), dtype), self._factors[name]
        if factor is not None:
            weight.scales.copy_((weight.scales.float() * factor).clamp_(-LARGEST_SCALE, LARGEST_SCALE))
        return weight

    def read_float32(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Return the numbers that a weight encodes, by ggml's formulas in float32, without rounding scales."""
        tensor = self._stored[name]
        data, places = self._data(name, rows)
        if not tensor.type.is_quantized:
            numbers = data.view(_FLOATS[tensor.type.name])[places].float()
            return numbers - 1.0 if self._has_whole_norm(name) else numbers
        blocks = data[places].unflatten(-1, (-1, tensor.type.block_bytes))
        numbers = REPACKED[tensor.type.name].numbers(blocks, (len(blocks), tensor.shape[1]))
        factor = self._factors[name]
        return numbers if factor is None else numbers * factor

    def stored_rows(self, name: str) -> StoredRows | None:
        tensor = self._stored[name]
        if tensor.file is None or not tensor.type.is_quantized or len(tensor.shape) != 2:
            return None
        if self._factors[name] is not None:  # the rows in the file lack the factor
            return None
        offsets = np.arange(tensor.shape[0], dtype=np.int64) * tensor.row_bytes + tensor.begin
        places = self._places(name, ALL_ROWS)
        if not isinstance(places, slice):
            offsets = offsets[places.numpy()]
        files = np.full(len(offsets), tensor.file.descriptor, np.int32)
        check = partial(tensor.file.check_unchanged, tensor.name)
        return StoredRows(tensor.type.name, REPACKED[tensor.type.name].format, files, offsets, check)

    def _has_whole_norm(self, name: str) -> bool:
        """Return whether the file stores a norm's weight including the 1 that the model adds."""
        return self._has_whole_norms and name.endswith("norm.weight")

    def _data(self, name: str, rows: slice) -> tuple[Tensor, slice | Tensor]:
        """Return bytes of a weight that include some of its rows, and the positions of these rows in them."""
        tensor, places = self._stored[name], self._places(name, rows)
        if len(tensor.shape) == 1:
            return torch.from_numpy(tensor.data), places
        if isinstance(places, slice):
            begin, end, _ = places.indices(tensor.shape[0])
            return torch.from_numpy(tensor.rows(begin, max(begin, end))), ALL_ROWS
        begin, end = int(places.min()), int(places.max()) + 1
        return torch.from_numpy(tensor.rows(begin, end)), places - begin

    def _places(self, name: str, rows: slice) -> slice | Tensor:
        """Return the positions of some rows of a weight in the file."""
        spec = self._config.layers[0]  # the file has one number of heads for all layers
        module = name.split(".")[-2]
        if self._has_grouped_qkv and module == "query_key_value":
            return _by_kv_head(spec)[rows]
        num_heads = {"q_proj": spec.num_heads, "k_proj": spec.kv.num_kv_heads}.get(module)
        if num_heads is None or not self._has_permuted_heads:
            return rows
        return _unpermuted_rows(self._stored[name].shape[0], num_heads)[rows]


def _factor_names(tensor: StoredTensor) -> tuple[str, ...]:
    """Return the names of factors that may accompany an NVFP4 tensor: for all its numbers, and for its inputs."""
    stem = tensor.name.removesuffix("weight")
    return (f"{stem}scale", f"{stem}input_scale") if tensor.type.name == "NVFP4" else ()


def _factor(file: GGUFFile, name: str, tensor: StoredTensor, own: Container[str]) -> float | None:
    """Return the factor of all numbers of a tensor, if the file has one; otherwise None.

    The factor of its inputs is for products of 4-bit weights and 4-bit inputs, which are not implemented.

    Args:
        file: file with the tensor.
        name: name of the weight in checkpoints. A stack has a factor for each expert.
        tensor: the weight as it is stored.
        own: names of tensors that are weights themselves: Gemma 4's factors of experts have such names.
    """
    stored = next(iter(_factor_names(tensor)), "")
    found, stack = file.tensors.get(stored), _stack(file, tensor)
    if found is None or stored in own:
        return None
    place = None if stack is None else stack_of_experts(name)
    shape, index = ((1,), 0) if stack is None or place is None else (stack.shape[:1], place[1])
    factor = float(found.data.view(np.float32)[index]) if found.type.name == "F32" and found.shape == shape else None
    if factor is None or not math.isfinite(factor):
        numbers = "one finite number" if stack is None else f"{shape[0]} finite numbers, one for each expert,"
        raise CorruptCheckpoint(f"{file.path}: {stored} must be {numbers} of F32. Convert the model again.")
    return factor


def _tensor_from_list(file: GGUFFile, name: str, theirs: GGUFArchitecture) -> StoredTensor | None:
    """Return a single-number tensor that the metadata store in a list; None if it is not one."""
    place = of_layer(name)
    if place is None or place[1] not in theirs.lists:
        return None
    number = listed_number(file.metadata, key := theirs.lists[place[1]], place[0])
    data = np.array([number], np.float32).view(np.uint8)

    def read(first: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        return data[first : first + num_bytes]

    return StoredTensor(key, TYPES[0], (1,), read)


def _part_of_qkv(file: GGUFFile, name: str, spec: LayerSpec) -> StoredTensor | None:
    """Return the rows of q, k or v from a joint tensor, as older conversions wrote it; None if the file has none."""
    module, _, kind = name.rpartition(".")
    begins = {"q_proj": 0, "k_proj": spec.q_size, "v_proj": spec.q_size + spec.kv_size}
    place, part = of_layer(name), module.rpartition(".")[-1]
    stored = None if place is None else file.tensors.get(f"blk.{place[0]}.attn_qkv.{kind}")
    if stored is None or part not in begins or stored.shape[0] != spec.q_size + 2 * spec.kv_size:
        return None
    begin, num_rows = begins[part], spec.q_size if part == "q_proj" else spec.kv_size
    before = begin * (stored.nbytes // stored.shape[0])

    def read(first: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        return stored.read(before + first, num_bytes)

    return replace(stored, shape=(num_rows, *stored.shape[1:]), read=read, begin=stored.begin + before)


def _check_stacks(file: GGUFFile, config: ModelConfig) -> None:
    """Raise if a stack has another number of experts than the metadata, or an expert is also stored by itself."""
    for name, tensor in file.tensors.items():
        if (single := _SINGLE.fullmatch(name)) is not None:
            stack = f"{single['part']}_exps.{single['kind']}"
            if stack in file.tensors:
                raise CorruptCheckpoint(f"{file.path}: {name} is stored twice: by itself and within {stack}.")
        layer_id, kind = name.removeprefix("blk.").partition(".")[::2]
        is_stack = kind.partition(".")[0].endswith("_exps") and not kind.endswith(".input_scale")
        if not is_stack or not layer_id.isdecimal():
            continue
        experts = config.layers[int(layer_id)].experts if int(layer_id) < len(config.layers) else None
        if experts is not None and tensor.shape[0] != experts.num_experts:
            raise CorruptCheckpoint(
                f"{file.path}: {name} is {list(tensor.shape)}, {tensor.shape[0]} experts; its metadata say "
                f"{experts.num_experts}. Convert the model again."
            )


def _of_stack(file: GGUFFile, name: str) -> StoredTensor | None:
    """Return one expert's matrix or bias in a stack, which may hold gate and up as halves; None if there is none."""
    place = stack_of_experts(name)
    if place is None:
        return None
    stored, half, num_parts = file.tensors.get(place[0]), 0, 1
    if stored is None and (found := _GATE_OR_UP.search(place[0])) is not None:
        stored = file.tensors.get(_GATE_OR_UP.sub("ffn_gate_up_exps", place[0]))
        half, num_parts = int(found[1] == "up"), 2
    if stored is None or len(stored.shape) < 2 or place[1] >= stored.shape[0] or stored.shape[1] % num_parts:
        return None
    num_rows = stored.shape[1] // num_parts
    size = stored.nbytes // stored.shape[0] // num_parts
    before = (place[1] * num_parts + half) * size

    def read(first: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        return stored.read(before + first, num_bytes)

    return replace(stored, shape=(num_rows, *stored.shape[2:]), read=read, begin=stored.begin + before)


def _stack(file: GGUFFile, tensor: StoredTensor) -> StoredStack | None:
    """Return the stack that contains an expert's matrix or bias; None: the tensor is a weight of its own."""
    whole = file.tensors.get(tensor.name)
    if whole is None or len(whole.shape) == len(tensor.shape) or "_exps" not in tensor.name:
        return None
    return StoredStack(whole.name, whole.shape)


_SINGLE = re.compile(r"(?P<part>blk\.\d+\.ffn_(?:gate|up|down))\.\d+\.(?P<kind>\w+)")
_GATE_OR_UP = re.compile("ffn_(gate|up)_exps")


def _as_matrix(name: str, stored: StoredTensor) -> StoredTensor:
    """Return the gate of a shared expert, a vector in files, as a matrix of one row, as in checkpoints."""
    is_gate = name.endswith("shared_expert_gate.weight") and len(stored.shape) == 1
    return replace(stored, shape=(1, *stored.shape)) if is_gate else stored


def _unpermuted_rows(num_rows: int, num_heads: int) -> Tensor:
    """Return the rows of each head in Hugging Face's order, undoing the interleaving of llama.cpp's conversion.

    The file stores row 0 of the first half, row 0 of the second, row 1 of the first ... int64 [num_rows]

    >>> _unpermuted_rows(12, num_heads=2).tolist()
    [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _by_kv_head(spec: LayerSpec) -> Tensor:
    """Return the rows of q, k and v grouped by KV head, for a file with all of q, then k, then v; int64 [num_rows]."""
    num_q, num_kv = spec.num_heads, spec.kv.num_kv_heads
    q, k = torch.arange(num_q).view(num_kv, -1), num_q + torch.arange(num_kv)[:, None]
    heads = torch.cat([q, k, k + num_kv], dim=1).flatten()
    return (heads[:, None] * spec.kv.head_dim + torch.arange(spec.kv.head_dim)).flatten()


def _format(tensor: StoredTensor) -> QuantizedFormat | None:
    return REPACKED[tensor.type.name].format if tensor.type.is_quantized else None


def _described(type_name: str, has_factor: bool, count: int) -> str:
    if type_name not in REPACKED:
        return f"{count} x {type_name}"
    layout = REPACKED[type_name]
    rounding = "exactly" if layout.is_exact and not has_factor else "scales rounded to float16"
    return f"{count} x {type_name} as {layout.bits} bits in groups of {layout.group_size}, {rounding}"
