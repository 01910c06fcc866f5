"""The kvstores that can be used now, as membership shows them; one that fails rests for a while."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidemill.mesh.v1 import kvstore_pb2_grpc, membership_pb2
from tidemill_engine.messages import RankReady
from tidemill_kvcache.shards import HeadRange, shard_name
from tidemill_mesh.channels import Channels

REST_S = 5.0


class Instances(Protocol):
    """What is needed of tidemill_mesh's InstanceView."""

    @property
    def records(self) -> Mapping[str, membership_pb2.MembershipRecord]: ...


@dataclass(frozen=True)
class Store:
    """One kvstore."""

    name: str
    endpoint: str
    transfer_address: str
    stub: "kvstore_pb2_grpc.KvStoreServiceAsyncStub"


class KvStores:
    """Finds stores; several may join or die at any time."""

    def __init__(self, instances: Instances, channels: Channels, clock: Callable[[], float] = time.monotonic) -> None:
        self._instances = instances
        self._channels = channels
        self._clock = clock
        self._resting_until: dict[str, float] = {}

    def usable(self) -> dict[str, Store]:
        """Stores by instance; without draining ones and those that failed a moment ago."""
        now = self._clock()
        return {
            name: Store(
                name,
                record.endpoint,
                record.transfer_address,
                kvstore_pb2_grpc.KvStoreServiceStub(self._channels.get(record.endpoint)),
            )
            for name, record in sorted(self._instances.records.items())
            if record.role == membership_pb2.ROLE_KVSTORE
            and not record.draining
            and record.transfer_address
            and self._resting_until.get(record.incarnation, 0.0) <= now
        }

    def failed(self, name: str) -> None:
        """Lets a store rest; a new incarnation of it is tried at once."""
        record = self._instances.records.get(name)
        now = self._clock()
        self._resting_until = {key: until for key, until in self._resting_until.items() if until > now}
        if record is not None:
            self._resting_until[record.incarnation] = now + REST_S


def storing_ranks(ready: Sequence[RankReady], num_heads: int) -> list[RankReady]:
    """One rank for each part of a block: where KV belongs to no head, all ranks hold the same bytes."""
    first = {shard_name(heads_of(rank), num_heads): rank for rank in reversed(ready)}
    return sorted(first.values(), key=lambda rank: rank.rank)


def heads_of(rank: RankReady) -> HeadRange:
    """The heads that a rank holds."""
    return rank.head_start, rank.head_end
