"""A light closed-loop load on an OpenAI completions endpoint.

Raw asyncio streams, so that the client takes little from the cores that the server runs on."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one streamed request took, in seconds."""

    ttft_s: float
    total_s: float
    output_tokens: int
    cached_tokens: int
    longest_gap_s: float

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a workload."""

    timings: Sequence[Timing]
    wall_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return sum(t.output_tokens for t in self.timings) / self.wall_s

    @property
    def ttft_p50_s(self) -> float:
        return median(t.ttft_s for t in self.timings)

    @property
    def tpot_p50_s(self) -> float:
        return median(t.tpot_s for t in self.timings)


async def _read_headers(reader: asyncio.StreamReader) -> int:
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return status


async def stream_completion(host: str, port: int, body: dict[str, Any], api_key: str = "") -> Timing:
    """Streams one completion. Raises RuntimeError on any answer that is not a whole stream."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n"
        )
        if api_key:
            head += f"Authorization: Bearer {api_key}\r\n"
        start = time.perf_counter()
        writer.write(head.encode() + b"\r\n" + payload)
        status = await _read_headers(reader)
        first = last = longest = 0.0
        usage: dict[str, Any] | None = None
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                if status != 200 and line.startswith(b"{"):
                    raise RuntimeError(f"HTTP {status}: {line.decode()[:300]}")
                continue
            data = line[6:].strip()
            now = time.perf_counter()
            if data == b"[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            usage = chunk.get("usage") or usage
            if chunk["choices"]:
                longest = max(longest, now - last) if first else 0.0
                first, last = first or now, now
        if status != 200 or usage is None:
            raise RuntimeError(f"HTTP {status}: the stream ended without usage")
        details = usage.get("prompt_tokens_details") or {}
        return Timing(
            ttft_s=first - start,
            total_s=last - start,
            output_tokens=usage["completion_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            longest_gap_s=longest,
        )
    finally:
        writer.close()


async def closed_loop(host: str, port: int, bodies: Sequence[dict[str, Any]], concurrency: int) -> Run:
    """Runs all bodies, `concurrency` at a time."""
    waiting = iter(bodies)
    timings: list[Timing] = []

    async def client() -> None:
        for body in waiting:
            timings.append(await stream_completion(host, port, body))

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return Run(timings=timings, wall_s=time.perf_counter() - start)
