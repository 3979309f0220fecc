"""What two processes have to agree on before the KV of one is worth anything in the other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from twostroke.kv_cache.layout import KVLayout


class KVGeometry(msgspec.Struct, frozen=True, array_like=True):
    """One side's facts, by names that people understand."""

    identity: dict[str, str]
    """What is computed: model, position embedding, weights and their quantization. It must be the same."""
    numerics: dict[str, str]
    """By what it is computed: kernels, their version, device. Where it differs, so may the last bits."""
    layout: dict[str, str]
    """How the bytes lie in a block."""

    def refusal(self, other: KVGeometry, *, allows_drift: bool) -> str:
        """Why nothing may go from `other` to this side, both sides named; empty: it may.

        >>> here = KVGeometry({"model": "a"}, {"kernels": "avx2"}, {"block_size": "16"})
        >>> there = KVGeometry({"model": "a"}, {"kernels": "amx"}, {"block_size": "16"})
        >>> here.refusal(there, allows_drift=False).partition(".")[0]
        'numerics differ: kernels is avx2 here and amx there'
        >>> here.refusal(there, allows_drift=True)
        ''
        """
        for what, mine, yours, remedy in (
            ("models", self.identity, other.identity, "Give both pools the same model with the same settings."),
            ("block layouts", self.layout, other.layout, "Give both pools the same block size and KV dtype."),
            (
                "numerics",
                {} if allows_drift else self.numerics,
                {} if allows_drift else other.numerics,
                "Run both alike, or accept other last bits (--allow-numeric-drift).",
            ),
        ):
            found = differences(mine, yours)
            if found:
                return f"{what} differ: {found}. {remedy}"
        return ""

    def drift(self, other: KVGeometry) -> str:
        """How the numerics differ; empty: they do not."""
        return differences(self.numerics, other.numerics)


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """In words; empty where there are none.

    >>> differences({"a": "1", "b": "2"}, {"a": "1", "c": "3"})
    'b is 2 here and absent there, c is absent here and 3 there'
    """
    names = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    return ", ".join(
        f"{name} is {here.get(name, 'absent')} here and {there.get(name, 'absent')} there" for name in names
    )


def layout_facts(layout: KVLayout, kv_order: str) -> dict[str, str]:
    """What bytes of blocks depend on.

    Args:
        layout: of the KV cache.
        kv_order: the backend's order inside a head's run.
    """
    return {
        "block_size": str(layout.block_size),
        "KV heads": f"{layout.num_kv_heads} of {layout.head_dim}",
        "KV dtype": layout.kv_format,
        "order in a block": kv_order,
        "layers": " ".join(f"{group.layer_ids}:{group.window}" for group in layout.groups),
    }
