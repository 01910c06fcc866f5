"""What a fault costs 16 running streams, beside the plain policy that gives each request one attempt.

Two prefill and two decode instances of SmolLM2 behind one gateway. A stream is broken if it ends with an error or
without its last token; a token is wrong if it differs from the same stream's in a run that nothing disturbed. Under the
plain policy everything else is the same: what a lost worker computed is lost with it.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.client import Client
from tidemill.errors import TidemillError
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill_bench.local_cluster import running_cluster
from tidemill_bench.options import Options
from tidemill_bench.report import Row, machine
from tidemill_bench.workload import shared_prefix_prompts
from tidemill_local import health
from tidemill_local.cluster import LocalCluster, running_addresses
from tidemill_local.home import Home
from tidemill_local.mesh_view import look
from tidemill_local.models import ensure_smollm2
from tidemill_local.spec import ClusterSpec, Setting

STREAMS = 16
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 96
VOCAB = 49_152
LIVENESS_S = 2.0
BEGUN_TOKENS = 4
RESTORE_S = 60.0
POLL_S = 0.01
WORKER: dict[str, Setting] = {"torch_threads": 1, "kv_memory_bytes": 256 << 20, "restart_limit": 100}
PLAIN = "one attempt"


@dataclass
class Stream:
    """One stream as its client saw it."""

    tokens: list[int] = field(default_factory=list)
    longest_gap_s: float = 0.0
    error: TidemillError | None = None

    @property
    def broken(self) -> bool:
        return self.error is not None or len(self.tokens) < OUTPUT_TOKENS

    async def run(self, client: Client, model: str, prompt: Sequence[int]) -> None:
        """Reads it to its end; the gap before the first token is no gap."""
        last_s = 0.0
        with suppress(TidemillError):
            try:
                async for response in client.generate(
                    model=model, token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
                ):
                    now_s = time.monotonic()
                    self.longest_gap_s = max(self.longest_gap_s, now_s - last_s if self.tokens else 0.0)
                    last_s = now_s
                    self.tokens += [token for choice in response.choices for token in choice.token_ids]
            except TidemillError as error:
                self.error = error
                raise


@dataclass(frozen=True)
class Fault:
    """What is done to whom, once so many streams have so many tokens."""

    name: str
    role: "Role.ValueType"
    signum: int
    begun_streams: int = STREAMS


FAULTS = (
    Fault("decode instance killed", Role.ROLE_DECODE, signal.SIGKILL),
    Fault("decode instance frozen", Role.ROLE_DECODE, signal.SIGSTOP),
    Fault("prefill instance killed", Role.ROLE_PREFILL, signal.SIGKILL, begun_streams=1),
    Fault("router killed", Role.ROLE_ROUTER, signal.SIGKILL, begun_streams=1),
)


def run(options: Options) -> list[Row]:
    """Both policies, one cluster after the other."""
    model_dir = ensure_smollm2(Home(options.home))
    faults = FAULTS[:1] if options.quick else FAULTS
    with running_cluster(spec_of(model_dir, max_attempts=4)) as cluster:
        ours = asyncio.run(suffer(cluster, faults))
    with running_cluster(spec_of(model_dir, max_attempts=1)) as cluster:
        plain = asyncio.run(suffer(cluster, faults))
    return [row for fault in faults for row in rows_of(fault, ours, plain)]


def spec_of(model_dir: Path, max_attempts: int) -> ClusterSpec:
    """Two of each worker."""
    settings: dict[str, dict[str, Setting]] = {
        "all": {"liveness_s": LIVENESS_S},
        "prefill": WORKER,
        "decode": WORKER,
        "gateway": {"max_attempts": max_attempts},
    }
    return ClusterSpec(
        model=str(model_dir), model_name="smollm2", grpc_port=0, http_port=0, prefill=2, decode=2, autoscalers=0,
        settings=settings,
    )  # fmt: skip


Suffered = dict[str, list[Stream]]
UNDISTURBED = ""


async def suffer(cluster: LocalCluster, faults: Sequence[Fault]) -> Suffered:
    """Streams by fault, those that nothing disturbed among them."""
    suffered: Suffered = {}
    async with Client(cluster.endpoint("gateway-1")) as client:
        suffered[UNDISTURBED] = await one_round(cluster, client, None)
        for fault in faults:
            suffered[fault.name] = await one_round(cluster, client, fault)
    return suffered


async def one_round(cluster: LocalCluster, client: Client, fault: Fault | None) -> list[Stream]:
    """All streams at once, the fault in their midst; afterwards all processes run again."""
    prompts = shared_prefix_prompts(STREAMS, prompt_tokens=PROMPT_TOKENS, shared_tokens=0, vocab_size=VOCAB, seed=1)
    streams = [Stream() for _ in prompts]
    async with asyncio.TaskGroup() as group:
        for stream, prompt in zip(streams, prompts, strict=True):
            group.create_task(stream.run(client, cluster.spec.served_name, prompt))
        if fault is not None:
            await until_begun(streams, fault.begun_streams)
            victim = await busiest(cluster, fault.role)
            cluster.kill(victim, fault.signum)
    if fault is not None:
        await asyncio.to_thread(restore, cluster, victim, fault.signum)
    return streams


async def until_begun(streams: Sequence[Stream], count: int) -> None:
    """Waits until so many have some tokens; RuntimeError if they do not come."""
    end = time.monotonic() + RESTORE_S
    while sum(len(stream.tokens) >= BEGUN_TOKENS for stream in streams) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"not within {RESTORE_S:.0f} s: {count} streams have begun")
        await asyncio.sleep(POLL_S)


async def busiest(cluster: LocalCluster, role: "Role.ValueType") -> str:
    """The instance of the role that has the most requests."""
    members = (await look(running_addresses(cluster.home))).with_role(role)
    return max(members, key=lambda member: member.holds.get("requests", 0)).record.instance


def restore(cluster: LocalCluster, victim: str, signum: int) -> None:
    """Starts a killed process again, or lets a frozen one go on, until the router would place on every worker."""
    if signum == signal.SIGSTOP:
        cluster.kill(victim, signal.SIGCONT)
    else:
        cluster.restart(victim)
    workers = {name for service, name in cluster.spec.instances() if service in ("prefill", "decode")}
    health.wait_for_router(cluster.record("router-1"), cluster.endpoint("router-1"), workers, RESTORE_S)


def wrong_tokens(streams: Sequence[Stream], right: Sequence[Stream]) -> int:
    """Tokens that are not those of the undisturbed run; what is missing counts as broken, not as wrong."""
    pairs = zip(streams, right, strict=True)
    return sum(
        token != expected for got, want in pairs for token, expected in zip(got.tokens, want.tokens, strict=False)
    )


def rows_of(fault: Fault, ours: Suffered, plain: Suffered) -> list[Row]:
    """Broken streams, wrong tokens and the longest pause of one fault."""

    def row(metric: str, unit: str, figure: Callable[[Suffered], float], goal: str | None) -> Row:
        return Row(
            metric=f"{fault.name}: {metric}",
            unit=unit,
            value=figure(ours),
            higher_is_better=False,
            baseline=PLAIN,
            baseline_value=figure(plain),
            goal=goal,
            workload=f"{STREAMS} greedy streams of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, SmolLM2, 2 prefill and "
            f"2 decode instances, liveness {LIVENESS_S:g} s",
            machine=machine(),
        )

    def broken(suffered: Suffered) -> float:
        return sum(stream.broken for stream in suffered[fault.name])

    def wrong(suffered: Suffered) -> float:
        return wrong_tokens(suffered[fault.name], suffered[UNDISTURBED])

    def pause_s(suffered: Suffered) -> float:
        return max(stream.longest_gap_s for stream in suffered[fault.name])

    known = "0 (Dynamo's default breaks 8 of 16)" if fault is FAULTS[0] else "0"
    return [
        row("broken streams", "streams", broken, known),
        row("wrong tokens", "tokens", wrong, "0"),
        row("longest pause of a stream", "s", pause_s, None),
    ]
