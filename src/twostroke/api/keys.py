"""API keys: which tenant a key stands for, found in a time that tells nothing about the keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from twostroke.errors import InvalidParameter

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)", re.DOTALL)


class Keys:
    """The keys of a server.

    Args:
        given: SECRET, or NAME:SECRET; several secrets of one name are one tenant's.

    Raises:
        InvalidParameter: a secret is two tenants'.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self._keys = [_parse(key) for key in given]
        tenants: dict[bytes, str] = {}
        for tenant, secret in self._keys:
            if tenants.setdefault(secret, tenant) != tenant:
                who = f"{tenants[secret]} and {tenant}"
                raise InvalidParameter("api_key", who, "two tenants have the same secret", "Give each one of its own.")

    def __bool__(self) -> bool:
        return bool(self._keys)

    def tenant_of(self, given: bytes) -> str | None:
        """Whose key this is; None for one that is nobody's."""
        # every key is compared, in constant time each
        found = [tenant for tenant, secret in self._keys if hmac.compare_digest(secret, given)]
        return found[0] if found else None


def _parse(key: str) -> tuple[str, bytes]:
    named = _NAMED.fullmatch(key)
    if named is not None:
        return named[1], named[2].encode()
    # a name that does not give the key away
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}", key.encode()
