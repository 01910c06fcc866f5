"""A rank process on a CUDA device over its real socket."""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import asyncio
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from gpu.driver import prompt
from gpu.test_gpu_engine import CUDA, SHAPE, settings

from tidemill_engine.engine import Engine
from tidemill_engine.loading.tiny import make_tiny
from tidemill_engine.messages import RankReady, RequestKey, Shutdown, StepReport, Submit, decode_reports, encode
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.runners import start_runner
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings, encode_settings

LENGTHS = (5, 40, 130)


def submits() -> list[Submit]:
    return [
        Submit(
            key=RequestKey(f"r{length}"),
            stage="whole",
            token_ids=prompt(length, seed=length),
            prompt_tokens=length,
            sampling=SamplingParams(temperature=0.0, max_tokens=20),
            hash_salt=bytes(16),
            deadline_s=60.0,
        )
        for length in LENGTHS
    ]


async def serve(fields: EngineSettings, path: Path) -> tuple[RankReady, dict[RequestKey, list[int]]]:
    """Starts a rank, gives it the requests, and returns what it said."""
    done: asyncio.Future[tuple[RankReady, dict[RequestKey, list[int]]]] = asyncio.get_running_loop().create_future()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(commands: list[object]) -> None:
            body = encode(commands)  # type: ignore[arg-type]
            writer.write(len(body).to_bytes(4, "little") + body)

        tokens: dict[RequestKey, list[int]] = {}
        ready, ended = None, 0
        while ended < len(LENGTHS):
            length = int.from_bytes(await reader.readexactly(4), "little")
            for report in decode_reports(await reader.readexactly(length)):
                if isinstance(report, RankReady):
                    ready = report
                    send(list(submits()))
                for output in report.outputs if isinstance(report, StepReport) else ():
                    tokens.setdefault(output.key, []).extend(output.token_ids)
                    ended += bool(output.finish)
        send([Shutdown()])
        assert ready is not None
        done.set_result((ready, tokens))
        # The rank closes its side at its end.
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(talk, path)
    argv = ("-m", "tidemill_engine.rank", "--settings", encode_settings(fields), "--socket", str(path))
    process = await asyncio.create_subprocess_exec(sys.executable, *argv)
    try:
        async with asyncio.timeout(300):
            result = await done
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        server.close()
        async with asyncio.timeout(60):
            await server.wait_closed()
    return result


async def test_a_rank_serves_what_the_engine_gives(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", **SHAPE)
    fields = settings(folder, **CUDA, batch_invariant=True, transport="tcp")
    ready, tokens = await serve(fields, tmp_path / "rank")
    engine, expected = Engine(fields, start_runner(fields, TensorParallel())), {}
    for submit in submits():
        engine.handle(submit)
    for _ in range(200):
        for report in engine.step()[1]:
            for output in getattr(report, "outputs", ()):
                expected.setdefault(output.key, []).extend(output.token_ids)
    assert {len(ids) for ids in tokens.values()} == {20}
    assert tokens == expected
    assert "batch-invariant" in ready.backend
