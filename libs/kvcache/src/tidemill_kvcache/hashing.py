"""Block hashes: a keyed 128-bit chain, so that a hash names a block and the whole prefix before it.

Each block is blake2b(tokens) keyed with its parent's hash; the first block's parent is the chain root, which holds the
model's digest, the tenant's salt, the adapter and any extra keys. Nothing here depends on the process or its hash seed.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16

_ROOT_PERSON = b"tidemill.root.1"
_SALT_PERSON = b"tidemill.salt.1"

Hashes = bytes | Sequence[bytes]
"""Block hashes, packed one after the other as on the wire, or singly."""
TokenIds = npt.NDArray[np.uint32] | npt.NDArray[np.int64] | Sequence[int]


def tenant_salt(secret: bytes | str, tenant: str) -> bytes:
    """16 bytes that only holders of the deployment's secret can derive; an empty secret is allowed."""
    secret_bytes = secret.encode() if isinstance(secret, str) else secret
    return _digest(_SALT_PERSON, (secret_bytes, tenant.encode()))


def chain_root(hash_root: bytes, salt: bytes, adapter: str = "", extra: Sequence[str] = ()) -> bytes:
    """16 bytes: the parent of a prompt's first block; `hash_root` is the ModelCard's."""
    return _digest(_ROOT_PERSON, (hash_root, salt, adapter.encode(), *(key.encode() for key in extra)))


def hash_blocks(parent: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, each chained on the one before and the first one on `parent`."""
    assert len(parent) == HASH_BYTES, f"a parent hash has {HASH_BYTES} bytes, got {len(parent)}"
    raw = np.asarray(token_ids).astype("<u4", copy=False).tobytes()
    stride = block_size * 4
    hashes = []
    for start in range(0, len(raw) - stride + 1, stride):
        parent = hashlib.blake2b(raw[start : start + stride], digest_size=HASH_BYTES, key=parent).digest()
        hashes.append(parent)
    return hashes


def split_hashes(packed: bytes) -> list[bytes]:
    """The hashes of a wire field; ValueError when its length is not a multiple of 16."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def join_hashes(hashes: Iterable[bytes]) -> bytes:
    """The wire form of a list of hashes."""
    return b"".join(hashes)


def pack(hashes: Hashes) -> bytes:
    """Hashes one after the other; ValueError when their length is not a multiple of 16."""
    packed = hashes if isinstance(hashes, bytes) else join_hashes(hashes)
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    return packed


def common_blocks(left: bytes, right: bytes) -> int:
    """Leading blocks that two packed chains share, by bisection: chains that agree at one depth agree above it."""
    low, high = 0, min(len(left), len(right)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        here = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        if left[here] == right[here]:
            low = middle
        else:
            high = middle - 1
    return low


def _digest(person: bytes, fields: Sequence[bytes]) -> bytes:
    """Hash of length-prefixed fields, so that no two lists of fields give the same input."""
    state = hashlib.blake2b(digest_size=HASH_BYTES, person=person)
    state.update(len(fields).to_bytes(4, "little"))
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()
