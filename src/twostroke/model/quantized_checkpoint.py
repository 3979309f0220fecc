"""Weight sources for quantized safetensors checkpoints.

QuantizedCheckpoint: matrices are quantized integers, repacked to QuantizedWeight.

Fp8Weights: matrices are stored as 8-bit floats (e4m3) with scales.

    X.weight            float8_e4m3fn [N, K]
    X.weight_scale_inv  or X.weight_scale, floats: one, [N, 1], or [ceil(N / rows), ceil(K / columns)] for blocks
    X.activation_scale  or X.input_scale: scales for rounding activations, which is not done here
    X.k_scale           or X.v_scale: scales for a KV cache of 8-bit floats; here `--kv-cache-dtype` decides

A weight is the product of both, in float32. The model holds it in its own type: twice the file's size in bfloat16.
`--quantization int8`, or fp8 if the operators have it, makes 8-bit weights again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twostroke.config.quantization import FLOAT_LAYERS_KEY, GROUP_SIZES, Fp8Config, QuantizationConfig
from twostroke.errors import CorruptCheckpoint, UnsupportedModel
from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight, order_digest
from twostroke.log import get_logger
from twostroke.model.checkpoint import Checkpoint
from twostroke.model.float_weights import FLOAT_TYPES, check_floats, stored_floats
from twostroke.model.packed_layouts import LAYOUTS, PackedLayout
from twostroke.model.weight_source import ALL_ROWS, StoredWeight


class QuantizedCheckpoint:
    """Packed tensors as the weights they make up, and all others as stored. Implements WeightSource.

    Codes are kept as stored. Scales become float16, and a zero point z the float16 number scale (z - middle). Its
    rounding to 11 bits is at most 1/256 of a 4-bit step and 1/16 of an 8-bit step.
    """

    def __init__(self, checkpoint: Checkpoint, config: QuantizationConfig) -> None:
        """Find the quantized matrices and check the shapes and types of their tensors.

        Raises:
            UnsupportedModel: a tensor type, or a group size of a matrix, that is not implemented.
            CorruptCheckpoint: tensors that are missing, misshapen or duplicated.
        """
        self._checkpoint, self._config = checkpoint, config
        self._layout = LAYOUTS[config.layout](config)
        self._parts_of = _find_parts(checkpoint, self._layout)
        packed = {name for parts in self._parts_of.values() for name in parts.values()}
        plain = {name: shape for name, shape in checkpoint.shapes.items() if name not in packed}
        twice = sorted(plain.keys() & {f"{module}.weight" for module in self._parts_of})
        if twice:
            raise CorruptCheckpoint(f"{checkpoint.path}: {twice[0]} is stored twice, as floats and quantized.")
        self._check_main_tensors(plain)
        check_floats(checkpoint, plain, f"It does not belong to a quantized matrix ({config.layout}).")
        self._check_exemptions(plain)
        self.weights: Mapping[str, StoredWeight] = {
            **stored_floats(checkpoint, plain),
            **{f"{module}.weight": self._stored(module) for module in self._parts_of},
        }

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def quantization(self) -> str:
        return self._config.method

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        module = name.removesuffix(".weight")
        if module not in self._parts_of:
            return self._checkpoint.read(name, rows)
        shape = self.weights[name].shape
        parts = {suffix: self._checkpoint.read(part) for suffix, part in self._parts_of[module].items()}
        if "weight_shape" in parts and tuple(parts["weight_shape"].tolist()) != shape:
            said = parts["weight_shape"].tolist()
            raise CorruptCheckpoint(f"{module}.weight_shape is {said}; {self._layout.main} holds {list(shape)}.")
        select_rows = {suffix: self._layout.rows_of(suffix, part, rows, shape[0]) for suffix, part in parts.items()}
        found = self._layout.unpack(module, select_rows)
        order = self._order(module, found.group_of, found.codes.shape[1])
        scales = _half_scales(module, found.scales)
        mins = None
        if found.zeros is not None:
            mins = (scales.float() * (found.zeros.float() - 2 ** (self._config.bits - 1))).half()
        codes = found.codes if order is None else found.codes.index_select(1, order)
        size, times = _kernel_groups(self._config.group_size, codes.shape[1])
        scales, mins = (None if x is None else x.repeat_interleave(times, 1) for x in (scales, mins))
        assert scales is not None
        return QuantizedWeight(codes.contiguous(), scales, mins, self._config.bits, size, dtype, order)

    def _check_main_tensors(self, plain: Mapping[str, object]) -> None:
        """Raise if scales have no matching codes; the error names the missing tensor, not the type of the scales."""
        main, kinds = self._layout.main, ", ".join(self._layout.main_types)
        others = self._layout.parts(0, 0).keys() - {main}
        for name in plain:
            module, _, suffix = name.rpartition(".")
            if suffix not in others:
                continue
            kind = self._checkpoint.types.get(f"{module}.{main}")
            if kind is None:
                raise CorruptCheckpoint(f"{self.path}: {module}.{main} is missing ({self._config.layout}).")
            raise UnsupportedModel(f"{self.path}: {module}.{main} has type {kind}; known: {kinds}.")

    def _check_exemptions(self, plain: Mapping[str, tuple[int, ...]]) -> None:
        """Raise if a layer has a float matrix that config.json does not exempt from quantization."""
        for name, shape in plain.items():
            module = name.removesuffix(".weight")
            is_map_of_layer = ".layers." in module and module != name and len(shape) == 2
            is_map_of_layer &= not module.endswith("norm")  # a norm may have a weight for each head
            if is_map_of_layer and not self._config.stays_float(module):
                main = f"{module}.{self._layout.main}"
                raise UnsupportedModel(
                    f"{self.path}: {name} is stored as {self._checkpoint.types[name]}, but config.json says that "
                    f"matrices are quantized ({self._config.method}: {main}). Supported: all matrices of a layer "
                    "quantized, except those that quantization_config leaves out "
                    f"({FLOAT_LAYERS_KEY[self._config.method]}); or no quantization_config, if none is quantized."
                )

    def _stored(self, module: str) -> StoredWeight:
        """Check the tensors of a matrix; return the weight that they make up."""
        main = self._checkpoint.shapes[self._parts_of[module][self._layout.main]]
        n, k = self._layout.weight_shape((main[0], main[1]))
        group_size, bits = self._config.group_size, self._config.bits
        if group_size is not None and k % group_size:
            raise UnsupportedModel(
                f"{self.path}: {module}: group_size {group_size} does not divide its {k} inputs; it must."
            )
        stored_as = f"{bits} bits, {'whole rows' if group_size is None else f'groups of {group_size}'}"
        for suffix, part in self._layout.parts(n, k).items():
            name = self._parts_of[module].get(suffix)
            if name is None:
                if part.is_optional:
                    continue
                raise CorruptCheckpoint(f"{self.path}: {module}.{suffix} is missing ({self._config.layout}).")
            shape, kind = self._checkpoint.shapes[name], self._checkpoint.types[name]
            if shape != part.shape:
                raise CorruptCheckpoint(
                    f"{self.path}: {name} is {list(shape)} instead of {list(part.shape)}; every matrix must be stored "
                    f"as config.json says ({self._config.layout}, {stored_as})."
                )
            if kind not in part.types:
                raise UnsupportedModel(f"{self.path}: {name} has type {kind}; known: {', '.join(part.types)}.")
        size, _ = _kernel_groups(group_size, k)
        order = self._order(module, self._group_of(module), k)
        digest = None if order is None else order_digest(order)
        stored_format = QuantizedFormat(bits, size, not self._config.symmetric, digest)
        return StoredWeight((n, k), stored_format, bool(self._layout.by_rows))

    def _group_of(self, module: str) -> Tensor | None:
        """Return the group of each input; read early, because the packed size depends on it."""
        parts = self._parts_of[module]
        indices = {suffix: self._checkpoint.read(name) for suffix, name in parts.items() if suffix.endswith("g_idx")}
        return self._layout.group_of(indices)

    def _order(self, module: str, group_of: Tensor | None, k: int) -> Tensor | None:
        """Return the inputs sorted by their group, int64 [K]; None if they are sorted already."""
        if group_of is None:
            return None
        size = self._config.group_size or k
        in_order = torch.arange(k) // size
        order = group_of.sort(stable=True).indices
        if not torch.equal(group_of[order].long(), in_order):
            raise UnsupportedModel(
                f"{self.path}: {module}: its inputs must be in {k // size} groups of {size} each (g_idx)."
            )
        return None if torch.equal(order, torch.arange(k)) else order


def _find_parts(checkpoint: Checkpoint, layout: PackedLayout) -> dict[str, dict[str, str]]:
    """Return the tensors of each quantized matrix: the last part of their names, and their names."""
    found: dict[str, dict[str, str]] = {}
    for name, kind in checkpoint.types.items():
        module, _, suffix = name.rpartition(".")
        if suffix != layout.main or kind not in layout.main_types:
            continue
        shape = checkpoint.shapes[name]
        if len(shape) != 2 or 0 in shape:
            raise CorruptCheckpoint(f"{checkpoint.path}: {name} has shape {list(shape)}; it must be a matrix.")
        found[module] = {
            suffix: f"{module}.{suffix}" for suffix in layout.parts(0, 0) if f"{module}.{suffix}" in checkpoint.shapes
        }
    return found


def _kernel_groups(group_size: int | None, k: int) -> tuple[int, int]:
    """Return the kernels' group size, and how many such groups share a stored scale."""
    largest = GROUP_SIZES[-1]
    if group_size is None:
        return largest, -(-k // largest)
    return (group_size, 1) if group_size <= largest else (largest, group_size // largest)


def _half_scales(module: str, scales: Tensor) -> Tensor:
    """Return the scales as float16 [N, G]; raise if that loses more than a thousandth of the largest scale.

    NaN is left for the loader to find.
    """
    half, wide = scales.half(), scales.float()
    most = wide.abs().amax()
    if bool(most.isfinite()) and not bool(((half.float() - wide).abs() <= most / 1000).all()):
        raise UnsupportedModel(
            f"{module}: its scales reach from {wide.abs().amin():g} to {most:g}; they are kept in float16, which "
            "cannot represent them."
        )
    return half


log = get_logger(__name__)

_FP8 = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_OTHER_SCALES = ("activation_scale", "input_scale", "k_scale", "v_scale")


class Fp8Weights:
    """Fp8 matrices multiplied by their scales, and all other floats as stored. Implements WeightSource."""

    quantization = None

    def __init__(self, checkpoint: Checkpoint, config: Fp8Config) -> None:
        """Find the scales and check their shapes.

        Raises:
            UnsupportedModel: a tensor of a type that is not implemented.
            CorruptCheckpoint: a matrix without its scale, a scale without its matrix, or of another shape.
        """
        self._checkpoint, self._config = checkpoint, config
        self._scale_of: dict[str, str] = {}
        found = {name: shape for name, shape in checkpoint.shapes.items() if not name.endswith(_OTHER_SCALES)}
        for name, kind in checkpoint.types.items():
            if kind == _FP8:
                self._scale_of[name] = scale = self._scale(name)
                found.pop(scale, None)
        left = sorted(name for name in found if name.endswith(_SCALES))
        if left:
            raise CorruptCheckpoint(f"{self.path}: {left[0]} does not belong to a matrix of type {_FP8}.")
        floats = {name: shape for name, shape in found.items() if name not in self._scale_of}
        check_floats(checkpoint, floats, f"Beside floats, matrices of type {_FP8} are read.")
        self.weights: Mapping[str, StoredWeight] = stored_floats(checkpoint, found)
        log.info("%s: %d matrices of 8-bit floats, loaded in the model's dtype", self.path.name, len(self._scale_of))

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor:
        del dtype
        found = self._checkpoint.read(name, rows)
        if name not in self._scale_of:
            return found
        scale = self._checkpoint.read(self._scale_of[name]).float()
        shape = self._checkpoint.shapes[name]
        begin, end, _ = rows.indices(shape[0])
        return found.float() * self._spread(scale, shape, begin, end)

    def _spread(self, scale: Tensor, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
        """Return the scale of each number in rows [begin, end), or a tensor that broadcasts to that."""
        if scale.numel() == 1:
            return scale.view(1, 1)
        if self._config.block_size is None:
            return scale.view(-1, 1)[begin:end]
        height, width = self._config.block_size
        select_rows = scale[torch.arange(begin, end) // height]
        return select_rows.repeat_interleave(width, 1)[:, : shape[1]]

    def _scale(self, name: str) -> str:
        """Return the name of a matrix's scale."""
        shape = self._checkpoint.shapes[name]
        known = [f"{name.removesuffix('weight')}{suffix}" for suffix in _SCALES]
        scales = [one for one in known if one in self._checkpoint.shapes]
        if len(scales) > 1:
            raise CorruptCheckpoint(f"{self.path}: {' and '.join(scales)} scale one matrix; only one may exist.")
        if not scales or len(shape) != 2:
            what = f"{name} has shape {list(shape)} and is not a matrix" if scales else f"{known[0]} is missing"
            raise CorruptCheckpoint(f"{self.path}: {what}.")
        (scale,) = scales
        kind = self._checkpoint.types[scale]
        if kind not in FLOAT_TYPES:
            raise UnsupportedModel(
                f"{self.path}: {scale} has type {kind}, which is not implemented; known: {', '.join(FLOAT_TYPES)}."
            )
        found, allowed = self._checkpoint.shapes[scale], self._shapes_of_scale(shape)
        if found not in allowed:
            wanted = " or ".join(str(list(one)) for one in allowed)
            told = f"{scale} has shape {list(found)}; for {list(shape)} it must be {wanted}."
            raise CorruptCheckpoint(f"{self.path}: {told}")
        return scale

    def _shapes_of_scale(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        num_rows, num_columns = shape
        if self._config.block_size is None:
            return (), (1,), (1, 1), (num_rows, 1), (num_rows,)
        height, width = self._config.block_size
        return ((-(-num_rows // height), -(-num_columns // width)),)
