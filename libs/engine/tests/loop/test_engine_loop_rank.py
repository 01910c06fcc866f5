"""Real rank processes over their real socket."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tidemill_engine.loading.tiny import make_tiny
from tidemill_engine.messages import (
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
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings, encode_settings

T = TypeVar("T")

PROMPT = [(7 * i) % 250 for i in range(75)]
WAIT_S = 60.0


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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp("model") / architecture
            make_tiny(architecture, made[architecture])
        return made[architecture]

    return make


@pytest.fixture
async def start_rank(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """await start_rank(model_dir, **settings) -> RankProcess, ready or not."""
    ranks: list[RankProcess] = []
    servers: list[asyncio.Server] = []

    async def start(model_dir: Path, **options: Any) -> RankProcess:
        path = str(tmp_path / f"rank{len(ranks)}.sock")
        ready: asyncio.Future[RankProcess] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await (await ready).serve(reader, writer)

        servers.append(await asyncio.start_unix_server(connected, path))
        fields = {"block_size": 16, "num_blocks": 64, "transport": "tcp", "torch_threads": 1} | options
        settings = EngineSettings(model_dir=str(model_dir), **fields)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidemill_engine.rank", "--settings", encode_settings(settings), "--socket", path
        )
        ready.set_result(RankProcess(process))
        ranks.append(ready.result())
        return ready.result()

    yield start
    for rank in ranks:
        if rank.process.returncode is None:
            rank.process.kill()
        await rank.process.wait()
        async with rank.changed:
            await rank.changed.wait_for(lambda rank=rank: rank.closed or rank.writer is None)
    for server in servers:
        server.close()


def submit(name: str, token_ids: list[int], stage: Any = "whole", **sampling: Any) -> Submit:
    return Submit(
        key=RequestKey(name),
        stage=stage,
        token_ids=token_ids,
        prompt_tokens=len(token_ids),
        sampling=SamplingParams(temperature=0.0, **sampling),
        hash_salt=b"r" * 16,
    )


async def test_a_rank_serves_a_request_and_ends_on_shutdown(checkpoints, start_rank):
    rank = await start_rank(checkpoints("llama"))
    ready = await rank.expect(RankReady)
    assert (ready.rank, ready.num_blocks, ready.head_start) == (0, 64, 0)
    rank.send(submit("a", PROMPT, max_tokens=8), submit("b", PROMPT[:20], max_tokens=4))
    first, second = await rank.finish(RequestKey("a")), await rank.finish(RequestKey("b"))
    assert (len(first), len(second)) == (8, 4)
    idle = await rank.expect(StepReport, lambda r: r.load is not None and not r.outputs and r.load.running_requests == 0)
    assert idle.load.used_blocks == 0
    rank.send(Shutdown())
    assert await asyncio.wait_for(rank.process.wait(), WAIT_S) == 0
