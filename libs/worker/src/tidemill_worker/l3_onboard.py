"""Onboarding: a request's missing blocks are fetched from kvstore before its prompt is computed, within a deadline."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import grpc
import structlog

from tidemill.mesh.v1 import kvstore_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_transfer.agent import new_tag
from tidemill_worker.domain import Domain
from tidemill_worker.l3_stores import MESSAGE_BYTES, KvStores, Store, shard_name
from tidemill_worker.rendezvous import chunks, leading_of_chunks, leading_run, split
from tidemill_worker.slabs import shape_of
from tidemill_worker.worker import Worker

log = structlog.get_logger()

FAILURES = (grpc.aio.AioRpcError, MeshError, TimeoutError, ExceptionGroup)


@dataclass(frozen=True)
class Share:
    """A store's blocks of what is wanted: indices into the wanted lists."""

    store: Store
    indices: list[int]


class Onboarding:
    """Answers one OnboardWanted."""

    def __init__(self, worker: Worker, domain: Domain, stores: KvStores, wanted: messages.OnboardWanted) -> None:
        self._worker = worker
        self._domain = domain
        self._stores = stores
        self._wanted = wanted
        self._shape = shape_of(domain.ready[0], worker.settings.block_size)
        self._snapshots_loaded: set[int] = set()
        self._in_flight = asyncio.Semaphore(worker.settings.slabs_in_flight)

    async def run(self) -> messages.OnboardReady:
        """Loads what it can; a failure of any kind is only a lost hit."""
        wanted = self._wanted
        loaded = 0
        try:
            async with asyncio.timeout(wanted.deadline_s):
                loaded = await self._load()
        except TimeoutError:
            self._worker.counts.l3_error("deadline")
            log.info("onboarding took too long", request_id=wanted.key.request_id, blocks=len(wanted.block_hashes))
        boundary = 0
        if self._shape.has_sequence_state:
            loaded = max((index + 1 for index in self._snapshots_loaded if index < loaded), default=0)
            boundary = wanted.first_block + loaded if loaded else 0
        self._worker.counts.l3_blocks("onboarded", loaded)
        self._worker.counts.l3_blocks("missed", len(wanted.block_hashes) - loaded)
        return messages.OnboardReady(wanted.key, loaded, boundary)

    async def _load(self) -> int:
        stores = self._stores.usable()
        hashes = self._wanted.block_hashes
        if not stores:
            return 0
        shares = split(hashes, list(stores))
        found = await self._each_share({name: self._found(Share(stores[name], shares[name])) for name in shares}, "has")
        run = leading_run(found, shares, len(hashes))
        if not run:
            return 0
        wanted = {name: [index for index in indices if index < run] for name, indices in shares.items()}
        wanted = {name: indices for name, indices in wanted.items() if indices}
        good = await self._each_share({name: self._get(Share(stores[name], wanted[name])) for name in wanted}, "get")
        return leading_run(good, wanted, run)

    async def _each_share(self, calls: dict[str, Awaitable[int]], operation: str) -> dict[str, int]:
        """Leading blocks by store; a store that fails has none, and rests."""
        answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        counts: dict[str, int] = {}
        for name, answer in zip(calls, answers, strict=True):
            if isinstance(answer, FAILURES):
                log.warning("kvstore failed", store=name, operation=operation, error=str(_first(answer)))
                self._stores.failed(name)
                self._worker.counts.l3_error(operation)
            elif isinstance(answer, BaseException):
                raise answer
            counts[name] = answer if isinstance(answer, int) else 0
        return counts

    async def _found(self, share: Share) -> int:
        """Leading blocks of the share that the store has for every rank, and that there is room for."""
        found = len(share.indices)
        for rank in self._domain.ready:
            request = kvstore_pb2.HasRequest(
                kv_format=rank.kv_format,
                shard=shard_name(rank, self._shape.num_heads),
                block_hashes=self._hashes(share.indices),
            )
            answer = await share.store.stub.Has(request, timeout=self._wanted.deadline_s)
            found = min(found, answer.num_blocks)
        return found

    async def _get(self, share: Share) -> int:
        """Leading blocks of the share that every rank has received and verified; in messages of bounded size."""
        size = max(1, MESSAGE_BYTES // max(1, self._shape.block_bytes))
        parts = chunks(share.indices, size)
        async with asyncio.TaskGroup() as group:
            gets = [group.create_task(self._get_part(Share(share.store, part))) for part in parts]
        return leading_of_chunks(parts, [get.result() for get in gets])

    async def _get_part(self, share: Share) -> int:
        async with self._in_flight:
            return await self._get_ranks(share)

    async def _get_ranks(self, share: Share) -> int:
        ranks = [self._get_rank(share, rank) for rank in self._domain.ready]
        answers = await asyncio.gather(*ranks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return min(answer for answer in answers if isinstance(answer, int))

    async def _get_rank(self, share: Share, rank: messages.RankReady) -> int:
        deadline_s = self._wanted.deadline_s
        heads = (rank.head_start, rank.head_end)
        request = kvstore_pb2.GetRequest(
            kv_format=rank.kv_format,
            shard=shard_name(rank, self._shape.num_heads),
            block_hashes=self._hashes(share.indices),
            dest_address=rank.transfer_address,
            tag=new_tag(),
            deadline_s=deadline_s,
            max_bytes=self._shape.piece_bytes(
                len(share.indices), heads, with_sequence=False, snapshots=len(share.indices)
            ),
        )
        answer = await share.store.stub.Get(request, timeout=deadline_s)
        if answer.HasField("error"):
            raise MeshError.from_detail(answer.error)
        if not answer.blocks:
            return 0
        indices = share.indices[: len(answer.blocks)]
        command = messages.RecvKV(
            transfer_id=0,
            block_ids=[self._wanted.block_ids[index] for index in indices],
            piece=messages.PieceSpec(share.store.transfer_address, request.tag, *heads, answer.size_bytes),
            deadline_s=deadline_s,
            source_dtype=rank.kv_dtype,
            snapshot_ids=self._snapshot_slots(indices, answer.blocks),
            per_block_snapshots=True,
            block_checksums=[header.checksum for header in answer.blocks],
        )
        done = await self._worker.transfers.recv_kv(self._domain, rank.rank, command)
        self._snapshots_loaded |= {
            index for index, slot in zip(indices[: done.good_blocks], command.snapshot_ids, strict=False) if slot >= 0
        }
        return done.good_blocks

    def _snapshot_slots(self, indices: Sequence[int], headers: Sequence[kvstore_pb2.BlockHeader]) -> list[int]:
        """Where the snapshots that travel go; each has a slot, since both sides take them at the same boundaries."""
        slots = [
            self._wanted.snapshot_ids[index] if header.has_snapshot else -1
            for index, header in zip(indices, headers, strict=True)
        ]
        if any(header.has_snapshot and slot < 0 for slot, header in zip(slots, headers, strict=True)):
            raise MeshError(errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "a stored snapshot has no slot to go to")
        return slots

    def _hashes(self, indices: Sequence[int]) -> bytes:
        return b"".join(self._wanted.block_hashes[index] for index in indices)


def _first(error: BaseException) -> BaseException:
    return error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
