"""API keys: reading them, and finding a key's tenant in a time that reveals nothing about the keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)", re.DOTALL)


class Keys:
    """API keys of a server.

    Args:
        given: SECRET or NAME:SECRET; several secrets may share a name, which is one tenant.

    Raises:
        InvalidParameter: two tenants have the same secret.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self._keys = [_parse(key) for key in given]
        tenants: dict[bytes, str] = {}
        for tenant, secret in self._keys:
            if tenants.setdefault(secret, tenant) != tenant:
                who = f"{tenants[secret]} and {tenant}"
                raise InvalidParameter("api_key", who, "two tenants have the same secret", "Use different secrets.")

    def tenant_of(self, given: bytes) -> str | None:
        """Return the tenant of a key; None if the key is unknown."""
        # compare all keys, each in constant time
        found = [tenant for tenant, secret in self._keys if hmac.compare_digest(secret, given)]
        return found[0] if found else None


def _parse(key: str) -> tuple[str, bytes]:
    named = _NAMED.fullmatch(key)
    if named is not None:
        return named[1], named[2].encode()
    # the name must not reveal the key
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}", key.encode()


def with_keys_from_files(config: ServerConfig) -> ServerConfig:
    """Return the settings with the keys from key files added.

    Raises:
        InvalidParameter: a file cannot be read or has no key, or the administrator's has several.
    """
    if config.api_key_file is not None:
        keys = _keys_of("api_key_file", config.api_key_file)
        config = replace(config, api_key=(*config.api_key, *keys), api_key_file=None)
    if config.admin_api_key_file is not None:
        path = config.admin_api_key_file
        keys = _keys_of("admin_api_key_file", path)
        if len(keys) > 1:
            raise InvalidParameter("admin_api_key_file", str(path), f"has {len(keys)} keys; it must have one")
        config = replace(config, admin_api_key=keys[0], admin_api_key_file=None)
    return config


def _keys_of(name: str, path: Path) -> list[str]:
    remedy = "Give a text file with one key a line; lines that begin with # are comments."
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InvalidParameter(name, str(path), f"cannot be read ({error.strerror})", remedy) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(name, str(path), "is not UTF-8 text", remedy) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidParameter(name, str(path), "contains no key", remedy)
    return keys
