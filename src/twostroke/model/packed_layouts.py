"""The published layouts of quantized checkpoints: the tensors that make up a weight, and how their bits are unpacked.

Fields of 4 or 8 bits are packed into int32 words, the first in the lowest bits. N are a matrix's outputs, K its
inputs, G its groups of inputs.

    awq-gemm         qweight [K, N/8], qzeros [G, N/8], scales [G, N]; of eight outputs the even ones come first
    gptq, gptq_v2    qweight [K bits/32, N], qzeros [G, N bits/32], scales [G, N], g_idx [K]
    pack-quantized   weight_packed [N, K bits/32], weight_scale [N, G], weight_shape [2],
                     weight_zero_point [N bits/32, G], weight_g_idx [K]
    int-quantized    weight int8 [N, K], weight_scale [N, G], weight_zero_point int8 [N, G]

Sources: AutoAWQ (`packing_utils`), AutoGPTQ and GPTQModel (`qlinear`), compressed-tensors (`compressors`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twostroke.config.quantization import PackedLayoutName, QuantizationConfig
from twostroke.errors import CorruptCheckpoint

_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One of the tensors that make up a weight."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = ("I32",)
    is_optional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Unpacked:
    """An unpacked weight: w[n, k] = scales[n, g] (codes[n, k] - zeros[n, g]), g the group of k."""

    codes: Tensor
    """uint8 [N, K]."""
    scales: Tensor
    """Float type, [N, G]."""
    zeros: Tensor | None
    """uint8 [N, G]; None: 2^(bits - 1) everywhere."""
    group_of: Tensor | None = None
    """Group of each input, [K]; None: groups are consecutive inputs."""


class PackedLayout(ABC):
    """One layout, for the settings of one checkpoint."""

    main: ClassVar[str]
    """Name of the tensor that identifies a quantized matrix."""
    main_types: ClassVar[tuple[str, ...]] = ("I32",)
    by_rows: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that have a row per output; empty if the main tensor has none."""

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config
        self.per_word = 32 // config.bits

    @abstractmethod
    def weight_shape(self, main: tuple[int, int]) -> tuple[int, int]:
        """Return N and K, from the shape of the main tensor."""

    @abstractmethod
    def parts(self, n: int, k: int) -> dict[str, PackedPart]:
        """Return every tensor of a weight [n, k] by the last part of its name."""

    @abstractmethod
    def unpack(self, module: str, parts: Mapping[str, Tensor]) -> Unpacked:
        """Return the unpacked numbers of one weight.

        Args:
            module: its name, for messages.
            parts: tensors shaped as `parts` says; optional ones may be absent.

        Raises:
            CorruptCheckpoint: the tensors contradict each other.
        """

    def group_of(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Return the group of each input, [K]; None: groups are consecutive inputs.

        compressed-tensors initializes it to -1, and leaves it so if nothing is reordered.
        """
        group_of = parts.get("weight_g_idx")
        return None if group_of is None or bool((group_of == -1).all()) else group_of

    def rows_of(self, suffix: str, part: Tensor, rows: slice, n: int) -> Tensor:
        """Return the part of a tensor that some rows of a weight [n, K] need.

        Args:
            suffix: the last part of the tensor's name.
            part: the tensor.
            rows: range of rows, whose begin is a multiple of 8.
            n: rows of the weight.
        """
        if suffix not in self.by_rows or part.shape == (1,):  # one scale for all rows
            return part
        begin, end, _ = rows.indices(n)
        per_row = -(-n // part.shape[0])
        return part[begin // per_row : -(-end // per_row)]

    def num_groups(self, k: int) -> int:
        """Return the number of groups in a row of k inputs."""
        return 1 if self.config.group_size is None else k // self.config.group_size


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of int32 words [..., M] as uint8 [..., M * 32 / bits].

    >>> _fields(torch.tensor([[0x76543210]], dtype=torch.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    octets = words.contiguous().view(torch.uint8)  # lowest first: safetensors and this machine are little-endian
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


class AwqGemm(PackedLayout):
    """AWQ (Lin et al. 2023, arXiv:2306.00978) in AutoAWQ's layout `gemm`."""

    main = "qweight"

    def weight_shape(self, main: tuple[int, int]) -> tuple[int, int]:
        return main[1] * self.per_word, main[0]

    def parts(self, n: int, k: int) -> dict[str, PackedPart]:
        words, groups = n // self.per_word, self.num_groups(k)
        return {
            "qweight": PackedPart((k, words)),
            "qzeros": PackedPart((groups, words)),
            "scales": PackedPart((groups, n), _FLOATS),
        }

    def unpack(self, module: str, parts: Mapping[str, Tensor]) -> Unpacked:
        del module
        return Unpacked(self._outputs(parts["qweight"]), parts["scales"].T, self._outputs(parts["qzeros"]))

    def _outputs(self, words: Tensor) -> Tensor:
        """Convert [rows, N/8] to [N, rows]; a word holds outputs 0 2 4 6 1 3 5 7."""
        fields = _fields(words, self.config.bits).unflatten(-1, (-1, 2, self.per_word // 2))
        return fields.transpose(-1, -2).flatten(1).T.contiguous()


class Gptq(PackedLayout):
    """GPTQ (Frantar et al. 2022, arXiv:2210.17323) in AutoGPTQ's layout; version 1 stores zero points minus one."""

    main = "qweight"

    def weight_shape(self, main: tuple[int, int]) -> tuple[int, int]:
        return main[1], main[0] * self.per_word

    def parts(self, n: int, k: int) -> dict[str, PackedPart]:
        groups = self.num_groups(k)
        return {
            "qweight": PackedPart((k // self.per_word, n)),
            "qzeros": PackedPart((groups, -(-n // self.per_word))),
            "scales": PackedPart((groups, n), _FLOATS),
            "g_idx": PackedPart((k,), is_optional=not self.config.has_act_order),
        }

    def unpack(self, module: str, parts: Mapping[str, Tensor]) -> Unpacked:
        bits = self.config.bits
        codes = _fields(parts["qweight"].T, bits)
        zeros = self._zeros(module, _fields(parts["qzeros"], bits)[:, : len(codes)].T)
        return Unpacked(codes, parts["scales"].T, zeros, self.group_of(parts))

    def group_of(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        return parts.get("g_idx")

    def _zeros(self, module: str, stored: Tensor) -> Tensor | None:
        middle, most = 2 ** (self.config.bits - 1), 2**self.config.bits - 1
        if self.config.symmetric:
            # "sym" decides, not the declared version: files with the other version's zero points are published
            if not bool(((stored == middle) | (stored == middle - 1)).all()) or len(stored.unique()) > 1:
                raise CorruptCheckpoint(
                    f"{module}.qzeros: config.json says that it is symmetric (sym), but its zero points differ."
                )
            return None
        if self.config.layout == "gptq_v2":
            return stored
        if bool((stored == most).any()):
            # 0 - 1 overflowed when packed, possibly into neighbouring fields; readers disagree about such files
            raise CorruptCheckpoint(
                f"{module}.qzeros: a zero point of 0 cannot be stored in version 1 of the layout (it overflows to "
                f"{most}). Store the model with checkpoint_format gptq_v2."
            )
        return stored + 1


class PackQuantized(PackedLayout):
    """compressed-tensors' weights of 4 or 8 bits, packed into words."""

    main = "weight_packed"
    by_rows = ("weight_packed", "weight_scale", "weight_zero_point")

    def weight_shape(self, main: tuple[int, int]) -> tuple[int, int]:
        return main[0], main[1] * self.per_word

    def parts(self, n: int, k: int) -> dict[str, PackedPart]:
        groups, words = self.num_groups(k), -(-n // self.per_word)
        found = {
            "weight_packed": PackedPart((n, k // self.per_word)),
            "weight_scale": _scale(self.config, n, groups),
            "weight_shape": PackedPart((2,), ("I64", "I32")),
        }
        if not self.config.symmetric:
            found["weight_zero_point"] = PackedPart((words, groups))
        if self.config.has_act_order:
            found["weight_g_idx"] = PackedPart((k,), ("I32", "I64"))
        return found

    def unpack(self, module: str, parts: Mapping[str, Tensor]) -> Unpacked:
        codes = _fields(parts["weight_packed"], self.config.bits)
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros = _fields(zeros.T, self.config.bits)[:, : len(codes)].T
        scales = parts["weight_scale"].view(-1, self.num_groups(codes.shape[1])).expand(len(codes), -1)
        return Unpacked(codes, scales, zeros, self.group_of(parts))


class IntQuantized(PackedLayout):
    """compressed-tensors' signed 8-bit weights, one byte each."""

    main = "weight"
    by_rows = ("weight", "weight_scale", "weight_zero_point")
    main_types = ("I8",)

    def weight_shape(self, main: tuple[int, int]) -> tuple[int, int]:
        return main

    def parts(self, n: int, k: int) -> dict[str, PackedPart]:
        groups = self.num_groups(k)
        scale = _scale(self.config, n, groups)
        found = {"weight": PackedPart((n, k), ("I8",)), "weight_scale": scale}
        if not self.config.symmetric:
            found["weight_zero_point"] = PackedPart(scale.shape, ("I8",))
        if self.config.has_act_order:
            found["weight_g_idx"] = PackedPart((k,), ("I32", "I64"))
        return found

    def unpack(self, module: str, parts: Mapping[str, Tensor]) -> Unpacked:
        codes = self._unsigned(module, parts["weight"])
        rows = (len(codes), self.num_groups(codes.shape[1]))
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros = self._unsigned(module, zeros).view(-1, rows[1]).expand(rows)
        return Unpacked(codes, parts["weight_scale"].view(-1, rows[1]).expand(rows), zeros, self.group_of(parts))

    def _unsigned(self, module: str, signed: Tensor) -> Tensor:
        middle = 2 ** (self.config.bits - 1)
        if self.config.bits < 8 and not bool(((signed >= -middle) & (signed < middle)).all()):
            raise CorruptCheckpoint(f"{module}.weight has numbers beyond its {self.config.bits} bits.")
        return (signed + middle if self.config.bits < 8 else signed.view(torch.uint8) ^ 128).to(torch.uint8)


def _scale(config: QuantizationConfig, n: int, groups: int) -> PackedPart:
    return PackedPart((1,) if config.scale_per_tensor else (n, groups), _FLOATS)


LAYOUTS: dict[PackedLayoutName, Callable[[QuantizationConfig], PackedLayout]] = {
    "awq-gemm": AwqGemm,
    "gptq": Gptq,
    "gptq_v2": Gptq,
    "pack-quantized": PackQuantized,
    "int-quantized": IntQuantized,
}
