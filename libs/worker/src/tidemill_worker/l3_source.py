"""kvstores as sources of blocks: who has what is asked first, then each store sends its share in batches."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import grpc
import structlog

from tidemill.mesh.v1 import kvstore_pb2
from tidemill_engine import messages
from tidemill_kvcache.hashing import join_hashes
from tidemill_kvcache.shards import HeadRange, Split, shard_name
from tidemill_mesh import request_ids
from tidemill_mesh.errors import MeshError
from tidemill_transfer.agent import new_tag
from tidemill_worker.block_source import FAILURES, MESSAGE_BYTES, first_failure
from tidemill_worker.domain import Domain
from tidemill_worker.l3_lookup import Held, look_up, own_split
from tidemill_worker.l3_stores import KvStores, Store
from tidemill_worker.landing import Landing
from tidemill_worker.rendezvous import chunks, lookups
from tidemill_worker.source_plan import Offer
from tidemill_worker.worker import Worker

log = structlog.get_logger()

LATENCY_S = 0.004
DEFAULT_BYTES_PER_S = 5e8
MAX_ASKED_BLOCKS = 4096
CHOICES = 2
"""Stores that a block is looked for in: a store that joins takes over blocks that its predecessor still has."""
MAX_NAMED_QUESTIONS = 4 * MAX_ASKED_BLOCKS
"""Asked of the stores that a placement names, all together; a question takes a store about a microsecond."""


class L3Source:
    """One store, for one onboarding."""

    def __init__(
        self,
        worker: Worker,
        domain: Domain,
        stores: KvStores,
        store: Store,
        offer: Offer,
        split_of: Mapping[int, Split] | None = None,
    ) -> None:
        """`split_of`: wanted blocks that the store has in another split than the domain's own."""
        self._worker = worker
        self._domain = domain
        self._stores = stores
        self._store = store
        self._offer = offer
        self._own_split = own_split(domain)
        self._split_of = split_of or {}

    @property
    def offer(self) -> Offer:
        return self._offer

    async def fetch(self, indices: Sequence[int], landing: Landing, deadline_s: float) -> None:
        size = max(1, MESSAGE_BYTES // max(1, landing.shape.block_bytes))
        in_flight = asyncio.Semaphore(self._worker.settings.slabs_in_flight)
        started = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for split, in_split in self._by_split(indices).items():
                    for part in chunks(in_split, size):
                        group.create_task(self._fetch_part(part, split, landing, deadline_s, in_flight))
        except FAILURES:
            self._stores.failed(self._store.name)
            self._worker.counts.l3_error("get")
            raise
        seconds = time.monotonic() - started - LATENCY_S
        self._worker.rates.measured(self._store.name, len(indices) * landing.shape.block_bytes, seconds)

    def _by_split(self, indices: Sequence[int]) -> dict[Split, list[int]]:
        found: dict[Split, list[int]] = {}
        for index in indices:
            found.setdefault(self._split_of.get(index, self._own_split), []).append(index)
        return found

    async def _fetch_part(
        self, part: list[int], split: Split, landing: Landing, deadline_s: float, in_flight: asyncio.Semaphore
    ) -> None:
        async with in_flight:
            shards = [
                self._fetch_shard(part, heads, landing, rank, deadline_s)
                for rank in self._domain.ready
                for heads in split
                if heads[0] < rank.head_end and rank.head_start < heads[1]
            ]
            answers = await asyncio.gather(*shards, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        received = [answer for answer in answers if isinstance(answer, tuple)]
        good = min(count for count, _ in received)
        # The shards of a block may differ in age: its snapshot is there only where every one of them had one.
        places = [min(of_block) for of_block in zip(*(of_shard[:good] for _, of_shard in received), strict=True)]
        landing.landed(part[:good], places, "l3")

    async def _fetch_shard(
        self, part: list[int], heads: HeadRange, landing: Landing, rank: messages.RankReady, deadline_s: float
    ) -> tuple[int, list[int]]:
        """Leading blocks of whose shard the rank has received and verified its heads, and where their snapshots
        went."""
        shape = landing.shape
        kept = max(heads[0], rank.head_start), min(heads[1], rank.head_end)
        request = kvstore_pb2.GetRequest(
            kv_format=rank.kv_format,
            shard=shard_name(heads, shape.num_heads),
            block_hashes=join_hashes(landing.hashes(part)),
            dest_address=rank.transfer_address,
            tag=new_tag(),
            deadline_s=deadline_s,
            max_bytes=shape.piece_bytes(len(part), heads, with_sequence=False, snapshots=len(part)),
        )
        answer = await self._store.stub.Get(request, timeout=deadline_s, metadata=request_ids.outgoing())
        if answer.HasField("error"):
            raise MeshError.from_detail(answer.error)
        if not answer.blocks:
            return 0, []
        sent = part[: len(answer.blocks)]
        places = landing.places_of(sent, [header.has_snapshot for header in answer.blocks])
        command = messages.RecvKV(
            transfer_id=0,
            block_ids=landing.block_ids(sent),
            piece=messages.PieceSpec(self._store.transfer_address, request.tag, *heads, answer.size_bytes),
            deadline_s=deadline_s,
            source_dtype=rank.kv_dtype,
            snapshot_ids=places,
            per_block_snapshots=True,
            block_checksums=[header.checksum for header in answer.blocks],
            keep_heads=kept if kept != heads else None,
            to_host=landing.to_host,
        )
        done = await self._worker.transfers.recv_kv(self._domain, rank.rank, command)
        self._worker.counts.l3_blocks("damaged", len(sent) - done.good_blocks)
        return done.good_blocks, places


async def find_in_l3(
    worker: Worker,
    domain: Domain,
    stores: KvStores,
    landing: Landing,
    deadline_s: float,
    named_stores: Sequence[str] = (),
) -> list[L3Source]:
    """The stores that have wanted blocks; one that does not answer has none, and rests.

    Named ones are known to have some, which need not be among a block's first choices any more.
    """
    usable = stores.usable()
    if not usable:
        return []
    hashes = landing.wanted.block_hashes[:MAX_ASKED_BLOCKS]
    asked = lookups(hashes, list(usable), CHOICES, named_stores, MAX_NAMED_QUESTIONS)
    worker.counts.l3_blocks("asked", len(hashes))
    answers = await asyncio.gather(
        *(
            look_up(usable[name], domain, landing.shape, landing.hashes(indices), deadline_s)
            for name, indices in asked.items()
        ),
        return_exceptions=True,
    )
    sources = []
    for name, answer in zip(asked, answers, strict=True):
        if isinstance(answer, FAILURES):
            log.warning("kvstore failed", store=name, operation="has", error=str(first_failure(answer)))
            stores.failed(name)
            worker.counts.l3_error("deadline" if _is_late(answer) else "has")
        elif isinstance(answer, BaseException):
            raise answer
        elif any(held.present for held in answer):
            has, has_snapshot, split_of = _join(answer, asked[name], landing.num_blocks)
            rate = worker.rates.bytes_per_s(name, DEFAULT_BYTES_PER_S)
            offer = Offer(name, has, has_snapshot, LATENCY_S, rate)
            sources.append(L3Source(worker, domain, stores, usable[name], offer, split_of))
    worker.counts.l3_blocks("found", sum(map(any, zip(*(source.offer.has for source in sources), strict=True))))
    return sources


def _join(
    held: Sequence[Held], indices: Sequence[int], num_blocks: int
) -> tuple[list[bool], list[bool], dict[int, Split]]:
    """Which wanted blocks there are, which with a snapshot, and the splits of those that are not in the first; of
    several copies the first one with a snapshot, else the first."""
    has, has_snapshot = [False] * num_blocks, [False] * num_blocks
    split_of: dict[int, Split] = {}
    for bit, index in enumerate(indices):
        copies = [one for one in held if one.present >> bit & 1]
        if not copies:
            continue
        chosen = next((one for one in copies if one.snapshots >> bit & 1), copies[0])
        has[index], has_snapshot[index] = True, bool(chosen.snapshots >> bit & 1)
        if chosen is not held[0]:
            split_of[index] = chosen.split
    return has, has_snapshot, split_of


def _is_late(error: BaseException) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, TimeoutError)
