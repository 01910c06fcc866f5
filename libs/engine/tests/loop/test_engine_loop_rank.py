"""Real rank processes over their real socket."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from tidemill_engine.messages import (
    CancelTransfer,
    Command,
    ExportState,
    KVReady,
    KVWanted,
    Output,
    PieceSpec,
    PrefillProgress,
    RankFailed,
    RankReady,
    RecvKV,
    Release,
    Report,
    RequestKey,
    SendKV,
    Shutdown,
    StateExported,
    StepReport,
    Submit,
    TransferDone,
    TransferFailed,
    decode_reports,
    encode,
)
from tidemill_engine.rank_io import RankIO
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings, encode_settings
from tidemill_local.ports import free_port
from tidemill_transfer.checksum import checksum64

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")

PROMPT = [(7 * i) % 250 for i in range(75)]
WAIT_S = 300.0


@dataclass
class RankProcess:
    """One rank process and the service's end of its socket."""

    process: asyncio.subprocess.Process
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    reports: list[Report] = field(default_factory=list)
    writer: asyncio.StreamWriter | None = None
    closed: bool = False

    def send(self, *commands: Command) -> None:
        assert self.writer is not None
        body = encode(list(commands))
        self.writer.write(len(body).to_bytes(4, "little") + body)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                reports = decode_reports(await reader.readexactly(length))
                async with self.changed:
                    self.reports += reports
                    self.changed.notify_all()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            async with self.changed:
                self.closed = True
                self.changed.notify_all()
        finally:
            writer.close()

    async def expect(self, kind: type[T], accept: Callable[[T], bool] = lambda _: True) -> T:
        """The first report of a kind that is accepted, past ones included."""

        def found() -> T | None:
            return next((r for r in self.reports if isinstance(r, kind) and accept(r)), None)

        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: found() is not None or self.closed)
        report = found()
        assert report is not None, f"the rank ended without {kind.__name__}"
        return report

    def outputs(self, key: RequestKey) -> list[Output]:
        reports = [report for report in self.reports if isinstance(report, StepReport)]
        return [output for report in reports for output in report.outputs if output.key == key]

    async def finish(self, key: RequestKey) -> list[int]:
        """All output tokens of a request, once it has ended."""
        await self.expect(StepReport, lambda r: any(o.key == key and o.finish for o in r.outputs))
        return [token for output in self.outputs(key) for token in output.token_ids]


class Ranks:
    """Starts rank processes and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[RankProcess] = []
        self.servers: list[asyncio.Server] = []

    async def start(self, model_dir: Path, **options: Any) -> RankProcess:
        """A rank process, ready or not."""
        path = str(self.folder / f"rank{len(self.started)}.sock")
        ready: asyncio.Future[RankProcess] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await (await ready).serve(reader, writer)

        self.servers.append(await asyncio.start_unix_server(connected, path))
        fields = {"block_size": 16, "num_blocks": 64, "transport": "tcp", "torch_threads": 1} | options
        settings = EngineSettings(model_dir=str(model_dir), **fields)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidemill_engine.rank", "--settings", encode_settings(settings), "--socket", path
        )
        ready.set_result(RankProcess(process))
        self.started.append(ready.result())
        return ready.result()

    async def start_domain(self, model_dir: Path) -> list[RankProcess]:
        """Two ranks of one domain, ready."""
        port = free_port()
        steps = str(self.folder / f"{port}.steps")
        shared = {"tp_size": 2, "tp_init_method": f"tcp://127.0.0.1:{port}", "step_socket": steps}
        ranks = [await self.start(model_dir, rank=rank, **shared) for rank in range(2)]
        for rank in ranks:
            await rank.expect(RankReady)
        return ranks

    async def close(self) -> None:
        for rank in self.started:
            if rank.process.returncode is None:
                rank.process.kill()
            await rank.process.wait()
            async with rank.changed:
                await rank.changed.wait_for(lambda rank=rank: rank.closed or rank.writer is None)
        for server in self.servers:
            server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def ranks(tmp_path: Path) -> AsyncIterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    await started.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[[str], Path]
) -> AsyncIterator[list[RankProcess]]:
    """Two domains of one rank each, shared by tests that leave them alive."""
    started = Ranks(tmp_path_factory.mktemp("pair"))
    ranks = [await started.start(tiny_checkpoint("llama")) for _ in range(2)]
    for rank in ranks:
        await rank.expect(RankReady)
    yield ranks
    await started.close()


def submit(name: str, token_ids: list[int], stage: Any = "whole", **sampling: Any) -> Submit:
    return Submit(
        key=RequestKey(name),
        stage=stage,
        token_ids=token_ids,
        prompt_tokens=len(token_ids),
        sampling=SamplingParams(temperature=0.0, **sampling),
        hash_salt=b"r" * 16,
    )


def stayed(service: Any, prompt: list[int], **sampling: Any) -> list[int]:
    """Tokens of an engine in this process."""
    key = service.submit(f"{len(service.outputs)}", prompt, temperature=0.0, **sampling)
    service.run()
    tokens: list[int] = service.tokens(key)
    return tokens


async def is_idle(rank: RankProcess) -> StepReport:
    """A report of a rank that has nothing to do."""

    def idle(report: StepReport) -> bool:
        load = report.load
        return load is not None and not report.outputs and load.running_requests + load.used_blocks == 0

    rank.reports = [report for report in rank.reports if isinstance(report, RankReady)]
    return await rank.expect(StepReport, idle)


async def test_a_rank_serves_requests_and_sends_heartbeats_when_idle(pair, real_service):
    rank, service = pair[0], real_service("llama")
    rank.send(submit("served", PROMPT, max_tokens=8), submit("short", PROMPT[:20], max_tokens=4))
    assert await rank.finish(RequestKey("served")) == stayed(service, PROMPT, max_tokens=8)
    assert await rank.finish(RequestKey("short")) == stayed(service, PROMPT[:20], max_tokens=4)
    report = await is_idle(rank)
    assert (report.load.total_blocks, report.load.output_tokens_total) == (64, 12)
    assert await is_idle(rank) is not report


async def test_a_request_moves_from_one_rank_process_to_another(pair, real_service):
    source, target = pair
    ready = [await rank.expect(RankReady) for rank in pair]
    key, prompt = RequestKey("moved"), [*PROMPT[::-1], 1]
    source.send(submit("moved", prompt, "prefill", max_tokens=16), ExportState(key))
    target.send(submit("moved", prompt, "decode", max_tokens=16))
    wanted = await target.expect(KVWanted)
    progress = await source.expect(PrefillProgress, lambda report: report.final)
    state = (await source.expect(StateExported)).state
    size = len(wanted.block_ids) * 16 * ready[0].kv_bytes_per_token
    heads = (ready[0].head_start, ready[0].head_end)
    pieces = [PieceSpec(ready[peer].transfer_address, 5, *heads, size) for peer in (0, 1)]
    target.send(RecvKV(1, wanted.block_ids, pieces[0], 20.0, "float32"))
    source.send(SendKV(1, progress.block_ids, pieces[1], 20.0))
    received, sent = await target.expect(TransferDone), await source.expect(TransferDone)
    assert received.checksum == sent.checksum != 0
    assert (received.good_blocks, received.size_bytes) == (5, size)
    target.send(KVReady(key, state))
    source.send(Release(key))
    moved = await source.finish(key) + await target.finish(key)
    assert moved == stayed(real_service("llama"), prompt, max_tokens=16)
    for rank in pair:
        await is_idle(rank)


async def test_a_transfer_that_cannot_be_is_answered(pair):
    rank = pair[0]
    ready = await rank.expect(RankReady)
    size = 16 * ready.kv_bytes_per_token
    piece = PieceSpec(ready.transfer_address, 7, ready.head_start, ready.head_end, size)
    rank.send(
        RecvKV(11, [3], piece, 0.2, "float32"),
        RecvKV(12, [4], piece, 20.0, "float32"),
        RecvKV(13, [400], piece, 20.0, "float32"),
        RecvKV(14, [5], PieceSpec(piece.peer_address, 9, 0, 2, 17), 20.0, "float32"),
        SendKV(15, [-1], piece, 20.0),
        CancelTransfer(12),
        CancelTransfer(99),
    )
    answers = [await rank.expect(TransferFailed, lambda report, i=i: report.transfer_id == i) for i in range(11, 16)]
    codes = [answer.error.code for answer in answers]
    assert codes == ["DEADLINE_EXCEEDED", "CANCELLED", *["INVALID_ARGUMENT"] * 3]


async def test_stored_blocks_are_taken_up_to_the_first_bad_one(pair):
    source, target = pair
    ready = [await rank.expect(RankReady) for rank in pair]
    block_bytes = 16 * ready[0].kv_bytes_per_token
    heads = (ready[0].head_start, ready[0].head_end)
    zeros = checksum64(bytes(block_bytes))
    pieces = [PieceSpec(ready[peer].transfer_address, 21, *heads, 3 * block_bytes) for peer in (0, 1)]
    stored = {"per_block_snapshots": True, "snapshot_ids": [-1, -1, -1]}
    checksums = [zeros, zeros, zeros + 1]
    target.send(RecvKV(21, [61, 62, 63], pieces[0], 20.0, "float32", block_checksums=checksums, **stored))
    source.send(SendKV(21, [61, 62, 63], pieces[1], 20.0, **stored))
    received = await target.expect(TransferDone, lambda report: report.transfer_id == 21)
    assert received.good_blocks == 2


async def test_two_gloo_ranks_say_what_one_says(tiny_checkpoint, ranks, real_service):
    leader, follower = await ranks.start_domain(tiny_checkpoint("llama"))
    ready = [report for rank in (leader, follower) for report in rank.reports if isinstance(report, RankReady)]
    assert [(r.rank, r.head_start, r.head_end) for r in ready] == [(0, 0, 1), (1, 1, 2)]
    service = real_service("llama")
    for name, prompt in (("a", PROMPT), ("b", PROMPT[:40]), ("c", PROMPT)):
        leader.send(submit(name, prompt, max_tokens=16))
        assert await leader.finish(RequestKey(name)) == stayed(service, prompt, max_tokens=16)
    leader.send(Shutdown())
    follower.send(Shutdown())
    for rank in (leader, follower):
        assert await asyncio.wait_for(rank.process.wait(), WAIT_S) == 0


@pytest.mark.parametrize(("victim", "busy"), [(0, True), (1, False)], ids=["leader", "follower"])
async def test_a_killed_rank_ends_its_domain_by_name(tiny_checkpoint, ranks, victim, busy):
    domain = await ranks.start_domain(tiny_checkpoint("llama"))
    if busy:
        domain[0].send(submit("a", PROMPT, max_tokens=900))
        await domain[0].expect(StepReport, lambda report: bool(report.outputs))
    domain[victim].process.kill()
    survivor = domain[1 - victim]
    failed = await survivor.expect(RankFailed)
    assert failed.rank == 1 - victim
    assert await asyncio.wait_for(survivor.process.wait(), WAIT_S) == 1


async def test_a_rank_whose_service_is_gone_ends(tiny_checkpoint, ranks):
    rank = await ranks.start(tiny_checkpoint("llama"))
    await rank.expect(RankReady)
    rank.writer.close()
    assert await asyncio.wait_for(rank.process.wait(), WAIT_S) == 3


async def test_a_rank_that_cannot_load_says_why(tmp_path, ranks):
    rank = await ranks.start(tmp_path / "nothing")
    failed = await rank.expect(RankFailed)
    assert "nothing" in failed.message
    assert await asyncio.wait_for(rank.process.wait(), WAIT_S) == 1


async def test_a_service_that_is_killed_while_the_rank_writes_is_gone_and_no_fault_of_the_rank():
    lost: list[str] = []
    io = RankIO(EngineSettings(model_dir=""), "", lost.append)
    try:
        reader = asyncio.StreamReader()
        reader.set_exception(BrokenPipeError(32, "Broken pipe"))
        await io._read(reader)
    finally:
        io._loop.close()
    assert lost == [], "the end of reading is told once, by whoever waits for it"
