"""KV from one CUDA device to another by what a hand-over uses: gather into staging memory, UCX, scatter.

Two processes, each with a pool of Llama-3-8B's shape on a device of its own and `RankTransfers` over UCX, as in two
ranks; blocks are shuffled on both sides. Time runs from the sender's first command until the receiver has written the
last block (both read one clock); bytes are compared afterwards. Both devices multiply matrices right before, as devices
that serve do: an idle device's clock is a sixth of a busy one's.
"""

import asyncio
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

from tidemill_bench.options import Options
from tidemill_bench.report import Row
from tidemill_engine.messages import PieceSpec, RecvKV, Report, SendKV, TransferDone
from tidemill_transfer.agent import new_tags, open_agent

LAYERS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * DIM * BLOCK_SIZE * 2
NUM_BLOCKS = 1024
SIZES_MIB = (32, 256, 1024)
SLABS_MIB = (32, 64, 128, 256)
IN_FLIGHT = (1, 2, 4)
ROUNDS = 5
DEADLINE_S = 30.0
GOALS = {32: ">= 100", 256: ">= 250"}
SEED = 5


@dataclass(frozen=True)
class Round:
    """One hand-over, told to the sender; an empty one ends it."""

    slabs: list[list[int]]
    """Blocks of each message."""
    tags: list[int]
    receiver: str
    in_flight: int


class Side:
    """A rank's pool and transfers; made on the thread of its loop."""

    def __init__(self, fills: bool) -> None:
        import torch

        from tidemill_engine.cuda.kv_pool import CudaKVPool
        from tidemill_engine.kv_groups import KVGroupSpec

        spec = KVGroupSpec(
            name="kv", kind="paged", layers=tuple(range(LAYERS)), dtype="bfloat16", num_heads=KV_HEADS,
            head_values=2 * DIM,
        )  # fmt: skip
        self.pool = CudaKVPool((spec,), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_slots=1, num_snapshots=0)
        if fills:
            slab = self.pool.slabs["kv"]
            numbers = torch.arange(slab.shape[0], device="cuda", dtype=torch.int32).view(-1, *[1] * (slab.dim() - 1))
            within = torch.arange(slab[0].numel(), device="cuda", dtype=torch.int32).view(1, *slab.shape[1:])
            # Every value tells its block and its place in it.
            slab.view(torch.int16).copy_(numbers * 31 + within % 8191)
        self._factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.keep_busy()
        self._finished: asyncio.Queue[Report] = asyncio.Queue()

    def keep_busy(self) -> None:
        """Some 40 ms of work, waited for."""
        import torch

        for _ in range(30):
            torch.mm(self._factor, self._factor)
        torch.cuda.synchronize()

    async def open(self) -> str:
        """Starts the agent; its address."""
        from tidemill_engine.rank_transfers import RankTransfers

        self.agent = await open_agent("ucx", "127.0.0.1")
        self.transfers = RankTransfers(self.agent, self.pool, DEADLINE_S, self._finished.put_nowait)
        return self.agent.address

    async def finished(self) -> None:
        """Waits for one transfer."""
        report = await self._finished.get()
        if not isinstance(report, TransferDone):
            raise RuntimeError(str(report))

    async def close(self) -> None:
        await self.transfers.close()
        await self.agent.close()


def piece(address: str, tag: int, num_blocks: int) -> PieceSpec:
    """All heads of so many blocks."""
    return PieceSpec(address, tag, 0, KV_HEADS, num_blocks * BLOCK_BYTES)


def _send_rounds(connection: Connection) -> None:
    asyncio.run(_sender(connection))


async def _sender(connection: Connection) -> None:
    side = Side(fills=True)
    connection.send(await side.open())
    while True:
        told: Round | None = await asyncio.to_thread(connection.recv)
        if told is None:
            break
        side.keep_busy()
        connection.send(None)
        started = time.perf_counter()
        running = 0
        for index, (blocks, tag) in enumerate(zip(told.slabs, told.tags, strict=True)):
            if running == told.in_flight:
                await side.finished()
                running -= 1
            side.transfers.start(SendKV(index, blocks, piece(told.receiver, tag, len(blocks)), DEADLINE_S))
            running += 1
        for _ in range(running):
            await side.finished()
        connection.send(started)
    await side.close()


def _combinations() -> Iterator[tuple[int, int, int]]:
    """(MiB, MiB of a message, messages in flight)."""
    for size in SIZES_MIB:
        for slab in SLABS_MIB:
            for in_flight in IN_FLIGHT:
                if slab < size or (slab == size and in_flight == 1):
                    yield size, slab, in_flight


async def _measure(connection: Connection, name: str, rounds: int) -> list[tuple[int, int, int, float]]:
    """Every combination and its seconds."""
    side = Side(fills=False)
    address = await side.open()
    source = connection.recv()
    results = []
    for size, slab, in_flight in _combinations():
        times = [await _hand_over(side, connection, source, address, size, slab, in_flight) for _ in range(rounds + 1)]
        seconds = median(times[1:])
        results.append((size, slab, in_flight, seconds))
        rate = (size << 20) / seconds / 1e9
        print(f"{name}: {size} MiB in messages of {slab} MiB, {in_flight} in flight: {rate:.1f} GB/s", flush=True)
    connection.send(None)
    await side.close()
    return results


async def _hand_over(
    side: Side, connection: Connection, source: str, address: str, size: int, slab: int, in_flight: int
) -> float:
    import torch

    rng = random.Random(SEED + size + slab)
    count, per_slab = (size << 20) // BLOCK_BYTES, (slab << 20) // BLOCK_BYTES
    sent, received = rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)
    side.pool.slabs["kv"].zero_()
    torch.cuda.synchronize()
    starts = range(0, count, per_slab)
    first_tag = new_tags(len(starts))
    tags = list(range(first_tag, first_tag + len(starts)))
    connection.send(Round([sent[i : i + per_slab] for i in starts], tags, address, in_flight))
    side.keep_busy()
    connection.recv()
    for index, (start, tag) in enumerate(zip(starts, tags, strict=True)):
        blocks = received[start : start + per_slab]
        side.transfers.start(RecvKV(index, blocks, piece(source, tag, len(blocks)), DEADLINE_S, "bfloat16"))
    for _ in starts:
        await side.finished()
    seconds = time.perf_counter() - float(connection.recv())
    within = torch.arange(side.pool.slabs["kv"][0].numel(), device="cuda", dtype=torch.int32) % 8191
    words = side.pool.slabs["kv"].view(torch.int16).view(NUM_BLOCKS + 1, -1)
    for from_block, to_block in list(zip(sent, received, strict=True))[:: max(1, count // 16)]:
        if not torch.equal(words[to_block], (within + 31 * from_block).to(torch.int16)):
            raise RuntimeError(f"block {from_block} did not arrive as it was")
    return seconds


def _devices() -> Iterator[tuple[str, str]]:
    """Name, and CUDA_VISIBLE_DEVICES of the sender: another device, then the receiver's own."""
    yield "two devices", "1"
    yield "one device", "0"


def run(options: Options) -> list[Row]:
    """Both ways, all sizes; the best combination of each size is the row."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    for name, visible in _devices():
        here, there = context.Pipe()
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        sender = context.Process(target=_send_rounds, args=(there,), daemon=True)
        sender.start()
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        results = asyncio.run(_measure(here, name, 1 if options.quick else ROUNDS))
        sender.join(DEADLINE_S)
        rows += _rows(name, results)
    return rows


def _rows(name: str, results: list[tuple[int, int, int, float]]) -> list[Row]:
    import torch

    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    rows = []
    for size in SIZES_MIB:
        of_size = [entry for entry in results if entry[0] == size]
        _, slab, in_flight, seconds = min(of_size, key=lambda entry: entry[3])
        rows.append(
            Row(
                metric=f"{name}: hand-over of {size} MiB", unit="GB/s", value=(size << 20) / seconds / 1e9,
                higher_is_better=True, machine=machine,
                workload=f"messages of {slab} MiB, {in_flight} in flight, gather and scatter included",
                goal=GOALS.get(size) if name == "two devices" else None,
            )
        )  # fmt: skip
    return rows
