"""Block hashes are the same in every process and depend on everything that makes KV differ."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_kvcache.hashing import HASH_BYTES, chain_root, hash_blocks, join_hashes, split_hashes, tenant_salt

_VECTOR_SCRIPT = """
import numpy as np
from tidemill_kvcache.hashing import chain_root, hash_blocks, tenant_salt
root = chain_root(b"model-digest", tenant_salt("00ff", "acme"), "lora-1", ["image:7"])
print(root.hex(), *[h.hex() for h in hash_blocks(root, np.arange(10, dtype=np.uint32), 4)])
"""
_VECTORS = " ".join(
    [
        "3f70cbb77e7c645a9ead95c81a6609f9",
        "6941a26bbabfa2b743686e1672926e7e",
        "2e5c357819f4a211ba9be71c32c7ca08",
    ]
)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242", "random"])
def test_hashes_equal_fixed_vectors_under_any_hash_seed(hash_seed: str) -> None:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", _VECTOR_SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == _VECTORS


def test_only_full_blocks_are_hashed() -> None:
    root = chain_root(b"m", b"")
    assert hash_blocks(root, np.arange(3, dtype=np.uint32), 4) == []
    assert len(hash_blocks(root, np.arange(8, dtype=np.uint32), 4)) == 2
    assert len(hash_blocks(root, np.arange(11, dtype=np.uint32), 4)) == 2


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
def test_the_dtype_of_the_token_array_does_not_matter(dtype: type) -> None:
    root = chain_root(b"m", b"")
    assert hash_blocks(root, np.arange(8).astype(dtype), 4) == hash_blocks(root, list(range(8)), 4)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), cut=st.integers(0, 10))
def test_hashing_in_parts_equals_hashing_at_once(tokens: list[int], cut: int) -> None:
    root = chain_root(b"m", b"s")
    whole = hash_blocks(root, tokens, 4)
    cut = min(cut, len(whole))
    head = hash_blocks(root, tokens[: cut * 4], 4)
    assert whole == head + hash_blocks(head[-1] if head else root, tokens[cut * 4 :], 4)


def test_equal_content_at_different_positions_has_different_hashes() -> None:
    hashes = hash_blocks(chain_root(b"m", b""), [7] * 64, 4)
    assert len(set(hashes)) == len(hashes)


def test_tenants_whose_names_join_to_the_same_text_differ() -> None:
    pairs = [("org_1", "2345"), ("org_12345", ""), ("", "org_12345"), ("org_1234", "5")]
    assert len({tenant_salt(secret, tenant) for secret, tenant in pairs}) == len(pairs)


def test_every_part_of_the_root_counts() -> None:
    roots = {
        chain_root(b"m", b"s"),
        chain_root(b"ms", b""),
        chain_root(b"m", b"s", "a"),
        chain_root(b"m", b"s", "", ["a"]),
        chain_root(b"m", b"s", "", ["a", ""]),
        chain_root(b"m", b"s", "a", [""]),
    }
    assert len(roots) == 6


def test_packed_hashes_come_back_and_odd_lengths_are_refused() -> None:
    hashes = hash_blocks(chain_root(b"m", b""), list(range(8)), 4)
    assert split_hashes(join_hashes(hashes)) == hashes
    with pytest.raises(ValueError, match="17 bytes"):
        split_hashes(bytes(HASH_BYTES + 1))
