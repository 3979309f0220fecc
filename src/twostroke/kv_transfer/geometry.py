"""Compatibility of two processes: the properties that must match before one can use the other's KV."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from twostroke.config.kv_format import KV_FORMATS, KVFormat
from twostroke.errors import EngineError
from twostroke.kv_cache.layout import KVLayout

_BLOCK_SIZE = "block_size"
_PAGES = "pages in a block"
_RANKS = "ranks"
_ORDER = "order in a block"
KV_LAYOUT = ("block_size", "tensor_parallel_size", "kv_order")
"""Properties of a process's KV layout that change no number."""
KV_CACHE_DTYPE = "kv_cache_dtype"
"""Name of the KV format among the numerics; its values are those of config/kv_format.py."""


class KVGeometry(msgspec.Struct, frozen=True, array_like=True):
    """One side's properties, under names for people."""

    identity: dict[str, str]
    """Identity of the numbers: model, position embedding and weights. Both sides must have the same."""
    numerics: dict[str, str]
    """Numerics: element type, KV format, quantization, kernels, their version, device. If they differ, tokens may
    differ."""
    layout: dict[str, str]
    """Layout of the bytes in a block. The block size and the share of the heads may differ: then blocks are converted
    (conversion.py). The order may differ where the numerics may: then blocks are recoded (recoding.py)."""

    @property
    def block_size(self) -> int:
        """Tokens of a page; 0: not given."""
        return _number(self.layout.get(_BLOCK_SIZE, ""))

    @property
    def pages_per_block(self) -> tuple[int, ...]:
        """Pages per block for each KV group; empty: not given."""
        return tuple(_number(said) for said in self.layout.get(_PAGES, "").split())

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the KV heads; 0: not given."""
        return _number(self.layout.get(_RANKS, ""))

    @property
    def kv_format(self) -> KVFormat:
        """Format of K and V.

        Raises:
            EngineError: the format is unknown here.
        """
        said = self.numerics.get(KV_CACHE_DTYPE, "")
        for kv_format in KV_FORMATS:
            if kv_format == said:
                return kv_format
        raise EngineError(f"{KV_CACHE_DTYPE}={said}: no KV format that is known here; known: {', '.join(KV_FORMATS)}.")

    @property
    def formats(self) -> dict[str, str | int]:
        """Numerics and layout of KV in a block (KV_LAYOUT)."""
        lies = dict(zip(KV_LAYOUT, (self.block_size, self.num_ranks, self.layout.get(_ORDER, "")), strict=True))
        return {**self.numerics, **lies}

    def has_other_blocks(self, other: KVGeometry) -> bool:
        """Return whether blocks of `other` must be converted before this side can read them."""
        mine, yours = ((g.numerics.get(KV_CACHE_DTYPE), g.layout.get(_ORDER)) for g in (self, other))
        return mine != yours

    def refusal(self, other: KVGeometry, *, allows_drift: bool) -> str:
        """Return why KV may not go from `other` to this side, naming both sides; empty: it may.

        >>> here = KVGeometry({"model": "a"}, {"kernels": "avx2"}, {"block_size": "16"})
        >>> there = KVGeometry({"model": "a"}, {"kernels": "amx"}, {"block_size": "16"})
        >>> here.refusal(there, allows_drift=False).partition(".")[0]
        'numerics differ: kernels is avx2 here and amx there'
        >>> here.refusal(there, allows_drift=True)
        ''
        >>> here.refusal(KVGeometry({"model": "a"}, {"kernels": "avx2"}, {"block_size": "32"}), allows_drift=False)
        ''
        """
        exempt = {_BLOCK_SIZE, _PAGES, _RANKS} if _sizes_fit(self.block_size, other.block_size) else set[str]()
        exempt |= {_ORDER} if allows_drift else set[str]()
        for what, mine, yours, remedy in (
            ("models", self.identity, other.identity, "Give both pools the same model with the same settings."),
            (
                "numerics",
                {} if allows_drift else self.numerics,
                {} if allows_drift else other.numerics,
                "Run both alike, or allow other tokens (--allow-numeric-drift).",
            ),
            (
                "block layouts",
                _without(self.layout, exempt),
                _without(other.layout, exempt),
                "Give both pools the same kernels, and block sizes of which one divides the other.",
            ),
        ):
            found = differences(mine, yours)
            if found:
                return f"{what} differ: {found}. {remedy}"
        return ""

    def drift(self, other: KVGeometry) -> str:
        """Return how the numerics differ; empty: they do not."""
        return differences(self.numerics, other.numerics)


def _sizes_fit(here: int, there: int) -> bool:
    """Return whether one page size is a multiple of the other.

    >>> _sizes_fit(16, 4), _sizes_fit(16, 24), _sizes_fit(16, 0)
    (True, False, False)
    """
    return min(here, there) > 0 and max(here, there) % min(here, there) == 0


def _number(said: str) -> int:
    return int(said) if said.isdecimal() else 0


def _without(layout: Mapping[str, str], names: Set[str]) -> dict[str, str]:
    return {name: value for name, value in layout.items() if name not in names}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return the differences in words; empty if there are none.

    >>> differences({"a": "1", "b": "2"}, {"a": "1", "c": "3"})
    'b is 2 here and absent there, c is absent here and 3 there'
    """
    names = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    return ", ".join(
        f"{name} is {here.get(name, 'absent')} here and {there.get(name, 'absent')} there" for name in names
    )


def layout_facts(layout: KVLayout, kv_order: str, num_ranks: int = 1) -> dict[str, str]:
    """Return the properties that determine the bytes of a block.

    Args:
        layout: of the KV cache, as each rank has it.
        kv_order: the backend's order inside a head's run.
        num_ranks: number of ranks that share the KV heads.
    """
    of_model = layout.for_ranks(1, num_ranks)
    return {
        _BLOCK_SIZE: str(layout.block_size),
        _PAGES: " ".join(str(group.pages_per_block) for group in layout.groups),
        _RANKS: str(num_ranks),
        "KV heads": " and ".join(
            dict.fromkeys(f"{group.spec.num_kv_heads} of {group.spec.head_dim}" for group in of_model.groups)
        ),
        _ORDER: kv_order,
        "layers": " ".join(f"{group.layer_ids}:{group.window}" for group in layout.groups),
    }
