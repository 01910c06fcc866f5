"""Names of stored KV tell what can be read as what."""

from hashlib import blake2b

from tidemill_kvcache.kv_format import format_id, keeps_precision, num_heads
from tidemill_kvcache.shards import shard_heads, shard_name, splits_of

PAGED = "v1/b16/kv:paged:{}:4x8x64,state:state:float32:2x4x5"


def test_the_number_of_a_name_is_as_the_contract_says() -> None:
    name = PAGED.format("float32")
    assert format_id(name) == int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
    assert format_id("v1/b16/kv") == 0x5CFC83B71277FEEB
    assert format_id("") == 0


def test_heads_are_those_of_the_group_that_has_most() -> None:
    assert num_heads(PAGED.format("bfloat16")) == 8
    assert num_heads("v1/b16/latent:paged:float32:2x1x576:p1,index:paged:float32:2x1x64:p1:r4") == 1
    assert [num_heads(name) for name in ("", "v1/b16/kv", "v2/x:paged:float32:axbxc", "emulated")] == [0] * 4


def test_a_type_that_this_release_does_not_know_is_only_what_it_is() -> None:
    new, known = PAGED.format("float4"), PAGED.format("float32")
    assert not keeps_precision(new, known)
    assert not keeps_precision(known, new)
    assert keeps_precision(new, new)
    assert keeps_precision(known, PAGED.format("bfloat16"))


def test_shards_are_named_by_their_heads() -> None:
    for heads in ((0, 8), (0, 4), (4, 8)):
        assert shard_heads(shard_name(heads, 8), 8) == heads
    assert shard_name((0, 8), 8) == "all"
    assert splits_of(["4-8", "0-4", "0-2"], 8) == [((0, 4), (4, 8))]
