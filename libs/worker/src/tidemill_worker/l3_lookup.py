"""Which blocks a store has. A block is stored in one or several shards by head range, as its writer's ranks split the
heads; an instance that splits them otherwise can read it all the same."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.mesh.v1 import kvstore_pb2
from tidemill_kvcache.hashing import join_hashes
from tidemill_kvcache.shards import Split, shard_name, splits_of
from tidemill_mesh import request_ids
from tidemill_worker.domain import Domain
from tidemill_worker.l3_stores import Store, heads_of
from tidemill_worker.slabs import KVShape


@dataclass(frozen=True, slots=True)
class Held:
    """What a store has of the asked blocks in one split; bit i stands for block i."""

    split: Split
    present: int
    snapshots: int
    """Of those that are present: which have a snapshot in each shard."""


def own_split(domain: Domain) -> Split:
    """How a domain's ranks split the heads."""
    return tuple(sorted({heads_of(rank) for rank in domain.ready}))


async def look_up(
    store: Store, domain: Domain, shape: KVShape, hashes: Sequence[bytes], timeout_s: float
) -> list[Held]:
    """By split, the domain's own first, then those in which the store may have what is missing in that one.

    Others are asked only of a store that has shards of theirs. Raises what block_source.FAILURES names.
    """
    kv_format, joined = domain.ready[0].kv_format, join_hashes(hashes)
    everything = (1 << len(hashes)) - 1

    async def ask(split: Split) -> tuple[Held, list[str]]:
        present = snapshots = everything
        shards: list[str] = []
        for heads in split:
            request = kvstore_pb2.HasRequest(
                kv_format=kv_format, shard=shard_name(heads, shape.num_heads), block_hashes=joined
            )
            answer = await store.stub.Has(request, timeout=timeout_s, metadata=request_ids.outgoing())
            present &= int.from_bytes(answer.present_bitmap, "little") or (1 << answer.num_blocks) - 1
            snapshots &= int.from_bytes(answer.snapshot_bitmap, "little")
            shards = list(answer.shards)
        return Held(split, present, present & snapshots), shards

    async with asyncio.timeout(timeout_s):
        mine = own_split(domain)
        first, shards = await ask(mine)
        found = [first]
        if first.present != everything or shape.has_sequence_state:
            for split in splits_of(shards, shape.num_heads):
                if split != mine:
                    found.append((await ask(split))[0])
    return found
