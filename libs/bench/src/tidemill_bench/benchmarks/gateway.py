"""What the gateway costs in front of canned workers: processor time for each request and token, added latency.

Emulated workers answer at once, so the time to the first token through the gateway (HTTP in, placement by the real
router, both stages' streams) is all added. Peers, where installed, are HTTP routers before a canned HTTP server: they
neither tokenise nor hand over between stages.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from tidemill_bench.local_cluster import Served, emulated_cluster
from tidemill_bench.openai_load import Timing, closed_loop
from tidemill_bench.options import Options
from tidemill_bench.peers.http_router import peer_router
from tidemill_bench.processor_time import processor_s
from tidemill_bench.report import Row, machine
from tidemill_local.home import Home
from tidemill_local.models import ensure_smollm2

STEP_S = 0.01
TEXT = "The river carries the mill's wheel round while the tide holds its breath. "


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One load on one router."""

    timings: Sequence[Timing]
    requests: int
    wall_s: float
    processor_s: float


def _measure(host: str, port: int, pid: int, model: str, *, requests: int, tokens: int, concurrency: int) -> Measured:
    bodies = [
        {"model": model, "prompt": f"{i} " + TEXT * 5, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        for i in range(requests)
    ]
    before, start = processor_s(pid), time.perf_counter()
    run = asyncio.run(closed_loop(host, port, bodies, concurrency))
    return Measured(
        timings=run.timings,
        requests=requests,
        wall_s=time.perf_counter() - start,
        processor_s=processor_s(pid) - before,
    )


def _gateway_pid(served: Served) -> int:
    return served.cluster.record("gateway-1").pid


def _percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]


def run(options: Options) -> list[Row]:
    """Alternates short and long answers on our gateway and on each peer."""
    tokenizer = ensure_smollm2(Home(options.home)) / "tokenizer.json"
    requests = 100 if options.quick else 400
    rounds = 1 if options.quick else 3
    ours: dict[int, list[Measured]] = {1: [], 65: []}
    single: list[Measured] = []
    peers: dict[str, dict[int, list[Measured]]] = {}
    with emulated_cluster(tokenizer, STEP_S) as served:
        pid = _gateway_pid(served)
        address = served.host, served.http_port, pid, served.model
        _measure(*address, requests=50, tokens=4, concurrency=4)
        for _ in range(rounds):
            single.append(_measure(*address, requests=requests // 4, tokens=2, concurrency=1))
            for tokens, runs in ours.items():
                runs.append(_measure(*address, requests=requests, tokens=tokens, concurrency=16))
        for name in ("sglang-router", "vllm-router"):
            with peer_router(options.peers, name, options.home / f"{name}.log") as peer:
                if peer is None:
                    continue
                peers[name] = {1: [], 65: []}
                for _ in range(rounds):
                    for tokens, runs in peers[name].items():
                        runs.append(
                            _measure(
                                "127.0.0.1", peer.port, peer.pid, "peer",
                                requests=requests, tokens=tokens, concurrency=16,
                            )
                        )  # fmt: skip
    return _rows(single, ours, peers)


def _per_request_us(runs: Sequence[Measured]) -> float:
    return median(run.processor_s / run.requests for run in runs) * 1e6


def _per_token_us(short: Sequence[Measured], long: Sequence[Measured]) -> float:
    return (_per_request_us(long) - _per_request_us(short)) / 64


def _rows(
    single: Sequence[Measured], ours: dict[int, list[Measured]], peers: dict[str, dict[int, list[Measured]]]
) -> list[Row]:
    ttft_ms = [timing.ttft_s * 1000 for measured in single for timing in measured.timings]
    workload = "1 KB prompts over HTTP, streamed, tokenised, emulated workers"
    here = machine()
    latency = f"{workload}, one client, a connection for each request"
    load = f"{workload}, 16 clients"
    rows = [
        Row(metric="added TTFT p50", unit="ms", value=median(ttft_ms), higher_is_better=False, goal="<= 2 ms",
            workload=latency, machine=here),
        Row(metric="added TTFT p99", unit="ms", value=_percentile(ttft_ms, 99), higher_is_better=False,
            workload=latency, machine=here),
        Row(metric="requests", unit="1/s", value=median(m.requests / m.wall_s for m in ours[1]),
            higher_is_better=True, workload=load + ", one token", machine=here),
    ]  # fmt: skip
    names: list[str | None] = [*peers] or [None]
    for name in names:
        peer = peers.get(name) if name else None
        rows += [
            Row(metric="processor time a request", unit="us", value=_per_request_us(ours[1]), higher_is_better=False,
                baseline=name, baseline_value=_per_request_us(peer[1]) if peer else None,
                goal="<= 700-1,300 us: a third of vLLM production-stack's 2-4 ms", workload=load + ", one token",
                machine=here),
            Row(metric="processor time an output token", unit="us", value=_per_token_us(ours[1], ours[65]),
                higher_is_better=False, baseline=name,
                baseline_value=_per_token_us(peer[1], peer[65]) if peer else None,
                workload=load + ", 65 tokens less one", machine=here),
        ]  # fmt: skip
    return rows
