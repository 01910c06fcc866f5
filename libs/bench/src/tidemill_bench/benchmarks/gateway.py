"""What the gateway costs in front of canned workers: processor time for each request and token, added latency.

Emulated workers answer at once: what the time to the first token through the gateway (HTTP in, placement by the real
router, both stages' streams) has beyond that of a canned HTTP server, which the same client asks without anything
between, is added. Peers, where installed, are HTTP routers before such servers: they neither tokenise nor hand over
between stages. Below a placement lies a round trip on an open stream: it is measured on
the mesh's own streams and on gRPC's core.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from tidemill_bench.local_cluster import Served, emulated_cluster
from tidemill_bench.openai_load import Timing, closed_loop
from tidemill_bench.options import Options
from tidemill_bench.peers.http_router import PeerRouter, canned, peer_router
from tidemill_bench.processor_time import processor_s
from tidemill_bench.report import Row, machine
from tidemill_bench.stream_echo import Echo, measure
from tidemill_local.home import Home
from tidemill_local.models import ensure_smollm2

STEP_S = 0.01
WORKLOAD = "1 KB prompts over HTTP, streamed, tokenised, emulated workers"
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
        {"model": model, "prompt": f"{i} " + TEXT * 14, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
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


def _address(peer: PeerRouter) -> tuple[str, int, int, str]:
    return "127.0.0.1", peer.port, peer.pid, "peer"


def _gateway_pid(served: Served) -> int:
    return served.cluster.record("gateway-1").pid


def _percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]


def run(options: Options) -> list[Row]:
    """Alternates short and long answers on our gateway and on each peer."""
    tokenizer = ensure_smollm2(Home(options.home)) / "tokenizer.json"
    requests = 100 if options.quick else 800
    rounds = 1 if options.quick else 5
    ours: dict[int, list[Measured]] = {1: [], 65: []}
    single: list[Measured] = []
    direct: list[Measured] = []
    peers: dict[str, dict[int, list[Measured]]] = {}
    peers_single: dict[str, list[Measured]] = {}
    with emulated_cluster(tokenizer, STEP_S) as served, canned(options.home / "canned.log") as server:
        pid = _gateway_pid(served)
        address = served.host, served.http_port, pid, served.model
        _measure(*address, requests=50, tokens=4, concurrency=4)
        for _ in range(rounds):
            single.append(_measure(*address, requests=requests // 8, tokens=2, concurrency=1))
            direct.append(_measure(*_address(server), requests=requests // 8, tokens=2, concurrency=1))
            for tokens, runs in ours.items():
                # Long answers tell of tokens, of which few requests have many.
                count = requests if tokens == 1 else requests // 4
                runs.append(_measure(*address, requests=count, tokens=tokens, concurrency=16))
        for name in ("sglang-router", "vllm-router"):
            with peer_router(options.peers, name, options.home / f"{name}.log") as peer:
                if peer is None:
                    continue
                peers[name], peers_single[name] = {1: [], 65: []}, []
                to_peer = _address(peer)
                for _ in range(rounds):
                    peers_single[name].append(_measure(*to_peer, requests=requests // 8, tokens=2, concurrency=1))
                    for tokens, runs in peers[name].items():
                        count = requests if tokens == 1 else requests // 4
                        runs.append(_measure(*to_peer, requests=count, tokens=tokens, concurrency=16))
    return _latency_rows(single, direct, peers_single) + _load_rows(ours, peers) + _echo_rows(*measure(requests))


def _echo_rows(ours: Echo, core: Echo) -> list[Row]:
    """What the figures above contain of the streams alone: two round trips before the first token."""
    rows = [
        ("round trip on an open stream p50", ours.round_trip_us, core.round_trip_us),
        ("processor time of a round trip in its client", ours.client_processor_us, core.client_processor_us),
    ]
    workload = "a placement of one gateway and an empty answer, another process, one at a time"
    return [
        Row(metric=metric, unit="us", value=value, higher_is_better=False, baseline="grpc.aio",
            baseline_value=baseline, workload=workload, machine=machine())
        for metric, value, baseline in rows
    ]  # fmt: skip


def _per_request_us(runs: Sequence[Measured]) -> float:
    return median(run.processor_s / run.requests for run in runs) * 1e6


def _per_token_us(short: Sequence[Measured], long: Sequence[Measured]) -> float:
    return (_per_request_us(long) - _per_request_us(short)) / 64


def _latency_rows(single: list[Measured], direct: list[Measured], peers: dict[str, list[Measured]]) -> list[Row]:
    workload = f"{WORKLOAD}, one client, a connection for each request"
    ours, without, here = _ttft_ms(single), median(_ttft_ms(direct)), machine()
    rows = []
    baselines: list[tuple[str | None, list[Measured]]] = [*peers.items()] or [(None, [])]
    for name, runs in baselines:
        theirs = median(_ttft_ms(runs)) if name else None
        rows += [
            Row(metric="TTFT p50", unit="ms", value=median(ours), higher_is_better=False, baseline=name,
                baseline_value=theirs, workload=workload, machine=here),
            Row(metric="added TTFT p50", unit="ms", value=median(ours) - without, higher_is_better=False, baseline=name,
                baseline_value=theirs and theirs - without, goal="<= 2 ms",
                workload=f"{workload}, less that of a canned server without a router", machine=here),
        ]  # fmt: skip
    rows += [
        Row(metric="TTFT p50 of a canned server without a router", unit="ms", value=without, higher_is_better=False,
            workload=workload, machine=here),
        Row(metric="TTFT p99", unit="ms", value=_percentile(ours, 99), higher_is_better=False,
            workload=workload, machine=here),
    ]  # fmt: skip
    return rows


def _ttft_ms(runs: Sequence[Measured]) -> list[float]:
    return [timing.ttft_s * 1000 for measured in runs for timing in measured.timings]


def _load_rows(ours: dict[int, list[Measured]], peers: dict[str, dict[int, list[Measured]]]) -> list[Row]:
    load = f"{WORKLOAD}, 16 clients"
    here = machine()
    rows = [
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
