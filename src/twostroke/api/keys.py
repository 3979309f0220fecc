"""API keys: where they are, and which tenant a key stands for, found in a time that tells nothing about the keys."""

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


def with_keys_of_files(config: ServerConfig) -> ServerConfig:
    """Return the settings with the keys that are in files.

    Raises:
        InvalidParameter: a file cannot be read, or has no key in it; or several for the administrator, who has one.
    """
    if config.api_key_file is not None:
        keys = _keys_of("api_key_file", config.api_key_file)
        config = replace(config, api_key=(*config.api_key, *keys), api_key_file=None)
    if config.admin_api_key_file is not None:
        path = config.admin_api_key_file
        keys = _keys_of("admin_api_key_file", path)
        if len(keys) > 1:
            raise InvalidParameter(
                "admin_api_key_file", str(path), f"has {len(keys)} keys, and the administrator has one"
            )
        config = replace(config, admin_api_key=keys[0], admin_api_key_file=None)
    return config


def _keys_of(name: str, path: Path) -> list[str]:
    remedy = "Give a text file with one key a line; lines that begin with # are comments."
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InvalidParameter(name, str(path), f"cannot be read ({error.strerror})", remedy) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(name, str(path), "is no text in UTF-8", remedy) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidParameter(name, str(path), "has no key in it", remedy)
    return keys
