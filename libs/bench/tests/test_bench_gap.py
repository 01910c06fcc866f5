"""The forms of the cache whose scheduling gaps are compared do what their names say, in the same steps."""

import pytest

from tidemill_bench.scheduling_gap import RescanningCache, engine_steps
from tidemill_kvcache import cache as cache_module
from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.hashing import TokenIds, hash_blocks


@pytest.mark.parametrize(("form", "hashed"), [(PrefixCache, 0), (RescanningCache, 1024 + 2048 + 3072 + 4096)])
def test_only_the_rescanning_form_hashes_a_prompt_again_for_each_chunk(
    form: type[PrefixCache], hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []

    def hashing(parent: bytes, ids: TokenIds, block_size: int) -> list[bytes]:
        tokens.append(len(ids) // block_size * block_size)
        return hash_blocks(parent, ids, block_size)

    monkeypatch.setattr(cache_module, "hash_blocks", hashing)
    assert len(engine_steps(4096, 16, 1024, form)) == 4
    # The scheduler has hashed the whole prompt when it looked it up.
    assert sum(tokens) == hashed
