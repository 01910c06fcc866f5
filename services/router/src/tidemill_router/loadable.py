"""Which blocks that lie elsewhere an instance can load, by the kv_formats of both. Pure.

Who does not say his format, as an older release, is credited with everything, as he was by that release.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from tidemill_kvcache.domain_blocks import FormatHolder, SnapshotHolder
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.index import L3, BlockIndex, Found
from tidemill_kvcache.kv_format import format_id, keeps_precision

Store = FormatHolder | Holder


def shared_blocks(
    index: BlockIndex, found: Found, kv_formats: Iterable[str], leaving: Collection[str] = ()
) -> dict[str, int]:
    """By kv_format: leading blocks of a prompt that the stores, all together, have for instances of that format."""
    stores = stores_in(index, leaving)
    return {name: index.leading(found, readable(stores, name), L3) for name in set(kv_formats)}


def stores_in(index: BlockIndex, leaving: Collection[str] = ()) -> list[Store]:
    """What the stores that stay have, by format."""
    held = (holder for holder in index.holders_in(L3) if not isinstance(holder, SnapshotHolder))
    return [holder for holder in held if isinstance(holder, tuple) and holder[0] not in leaving]


@lru_cache(256)
def loads_from_peer(source: str, taker: str) -> bool:
    """Whether an instance takes blocks of another one's memory: of no less precision than its own pool holds."""
    return not source or not taker or source == taker or keeps_precision(source, taker)


def stores_with(index: BlockIndex, found: Found, stores: Sequence[Store]) -> list[str]:
    """Stores that have any block of a prompt."""
    held = index.holding(found, index.bits(stores, L3))
    return sorted({store[0] for store in stores if index.bits([store], L3) & held})


def readable(stores: Iterable[Store], kv_format: str) -> list[Store]:
    """Those of them that instances of this format can load from; all of them for one that does not say its format."""
    wanted = format_id(kv_format)
    return [
        store for store in stores if not wanted or not isinstance(store, FormatHolder) or store.kv_format_id == wanted
    ]
