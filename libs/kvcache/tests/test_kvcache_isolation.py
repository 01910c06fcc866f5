"""Caches of tenants, adapters and models are apart, and a hash that agrees in part with another one credits nothing."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.hashing import HASH_BYTES, chain_root, hash_blocks, tenant_salt
from tidemill_kvcache.index import L1, BlockIndex, TierDepth
from tidemill_kvcache.runs import StoredRun

SECRET = b"deployment secret"
TOKENS = np.arange(64, dtype=np.uint32)

texts = st.text(alphabet="ab0_", max_size=4)
# Everything that makes KV differ: the model's digest (weights, architecture, dtypes), tenant, adapter, extra keys.
scopes = st.tuples(texts.map(str.encode), texts, texts, st.lists(texts, max_size=2).map(tuple))


def chain(scope: tuple[bytes, str, str, tuple[str, ...]]) -> list[bytes]:
    digest, tenant, adapter, extra = scope
    return hash_blocks(chain_root(digest, tenant_salt(SECRET, tenant), adapter, extra), TOKENS, 16)


@given(st.lists(scopes, min_size=2, max_size=8, unique=True))
def test_no_two_scopes_share_a_hash_of_the_same_tokens(
    listed: list[tuple[bytes, str, str, tuple[str, ...]]],
) -> None:
    hashes = [block_hash for scope in listed for block_hash in chain(scope)]
    assert len(set(hashes)) == len(hashes)


def test_a_deployment_with_another_secret_has_other_hashes() -> None:
    salts = [tenant_salt(secret, "acme") for secret in (b"", b"one", b"two")]
    assert len({chain_root(b"m", salt) for salt in salts}) == 3


def test_another_tenants_prompt_shows_in_no_count_of_a_cache() -> None:
    cache = PrefixCache(16, 16)
    mine, theirs = (chain_root(b"m", tenant_salt(SECRET, tenant)) for tenant in ("acme", "other"))
    seq = cache.open(mine)
    assert cache.allocate(seq, 64) is not None
    cache.commit(seq, TOKENS, 64)
    cache.free(seq)
    [stored] = cache.take_events()
    assert isinstance(stored, StoredRun)
    probe = cache.open(theirs)
    assert cache.match_prefix(probe, TOKENS, 64).num_tokens == 0
    assert cache.cached_depth(hash_blocks(theirs, TOKENS, 16)) == 0
    assert cache.lookup(hash_blocks(theirs, TOKENS, 16)) == ([], [])
    index = BlockIndex(1 << 20)
    index.stored(("p-0", 0), stored.parent, stored.hashes, L1)
    assert index.match(hash_blocks(theirs, TOKENS, 16)) == {}
    assert index.match(hash_blocks(mine, TOKENS, 16)) == {("p-0", 0): TierDepth(4)}


@given(
    kept=st.sampled_from([slice(0, 8), slice(8, 16), slice(0, 4), slice(4, 16), slice(0, 15)]),
    count=st.integers(1, 40),
    seed=st.integers(0, 999),
)
@settings(deadline=None)
def test_hashes_that_agree_in_part_are_different_blocks(kept: slice, count: int, seed: int) -> None:
    """As if the identity were cut to fewer bits: every collision of the table's position is a miss."""
    rng = np.random.default_rng(seed)
    real = [rng.bytes(HASH_BYTES) for _ in range(count)]
    alike = []
    for block_hash in real:
        forged = bytearray(byte ^ int(rng.integers(1, 256)) for byte in block_hash)
        forged[kept] = block_hash[kept]
        alike.append(bytes(forged))
    index = BlockIndex(1 << 20)
    index.stored("a", b"", real, L1)
    assert index.match(alike) == {}
    assert index.match([real[0], *alike[1:]]) == {"a": TierDepth(1)}
    index.removed("a", alike, L1)
    assert index.match(real) == {"a": TierDepth(count)}
    index.stored("b", alike[-1], [rng.bytes(HASH_BYTES)], L1)
    assert index.orphan_runs == 1, "a parent that agrees in part is not the parent"
    for table_only in (real, alike):
        index.removed("a", table_only[::-1], L1)
    assert index.num_blocks == 1
