"""The identity of a block's content: a chained hash of every token up to its end.

    salt ──► root ──► h0 = H(root, tokens 0..15) ──► h1 = H(h0, tokens 16..31) ──► …

K and V of a token depend on all tokens before it, so a block's name must as well: equal hashes mean equal prefixes,
not only equal blocks. A salt gives a tenant a cache of its own: nothing hashed under one salt is found under another.

Collisions: blake2b with 16 bytes. By accident two different prefixes meet with probability n² / 2^129, 1e-21 for a
billion blocks; on purpose it takes about 2^64 hashes. A hit is therefore trusted and the tokens are not compared; who
must not trust that gives each tenant a salt that the others do not know.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

HASH_BYTES = 16


def hash_blocks(
    token_ids: Sequence[int], block_size: int, salt: str | None = None, parent: bytes | None = None
) -> tuple[bytes, ...]:
    """Hashes of the full blocks of `token_ids`; a last block that is not full has none.

    Args:
        token_ids: tokens from a block border on; each fits into 32 bits.
        block_size: tokens in a block.
        salt: separates caches; an empty one is none. It has a say only where the chain begins.
        parent: hash of the block before; None where the chain begins.

    >>> whole = hash_blocks(range(8), block_size=4)
    >>> len(whole), len(hash_blocks(range(7), block_size=4))
    (2, 1)
    >>> hash_blocks(range(4, 8), block_size=4, parent=whole[0]) == whole[1:]
    True
    >>> hash_blocks(range(8), block_size=4, salt="tenant") == whole
    False
    """
    if len(token_ids) < block_size:
        return ()
    chain = parent if parent is not None else _root(salt)
    pack = struct.Struct(f"<{block_size}I").pack
    hashes: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = pack(*token_ids[start : start + block_size])
        chain = hashlib.blake2b(chain + tokens, digest_size=HASH_BYTES).digest()
        hashes.append(chain)
    return tuple(hashes)


def extend_hashes(
    block_hashes: Sequence[bytes], token_ids: Sequence[int], block_size: int, salt: str | None = None
) -> tuple[bytes, ...]:
    """Hashes of the blocks that `token_ids`, all tokens from position 0, fill beyond those hashed already.

    Costs nothing while no further block is full.

    >>> known = hash_blocks(range(8), block_size=4)
    >>> extend_hashes(known, range(11), block_size=4)
    ()
    >>> extend_hashes(known, range(12), block_size=4) == hash_blocks(range(12), block_size=4)[2:]
    True
    """
    num_hashed = len(block_hashes)
    num_full = len(token_ids) // block_size
    if num_full <= num_hashed:
        return ()
    fresh = token_ids[num_hashed * block_size : num_full * block_size]
    return hash_blocks(fresh, block_size, salt, block_hashes[-1] if block_hashes else None)


def salt_of_drift(salt: str | None, numerics: Mapping[str, str]) -> str:
    """Return the salt for hashes of blocks whose KV may have other numerics than their worker.

    Args:
        salt: salt of the request.
        numerics: numerics of the worker that computes and lends the KV.

    >>> salt_of_drift(None, {"dtype": "float32"}) == salt_of_drift("tenant", {"dtype": "float32"})
    False
    """
    found = hashlib.blake2b((salt or "").encode(), digest_size=HASH_BYTES, person=b"twostroke-drift")
    for name, value in sorted(numerics.items()):
        found.update(f"{name}={value}\n".encode())
    return found.hexdigest()


def _root(salt: str | None) -> bytes:
    """What stands before the first block; its own domain, so that no block can pose as a root."""
    return hashlib.blake2b((salt or "").encode(), digest_size=HASH_BYTES, person=b"twostroke-root").digest()
