"""At least 1,500 requests while one random fault follows another: each ends once and whole, and nothing stays held.

`TIDEMILL_SOAK_SEEDS`, by spaces, chooses the faults; the seeds share the requests. A failing test carries its seed in
its name: with that seed alone the same faults come in the same order.
"""

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
from faults.membership import end_lease
from faults.spread import behind, rank_behind
from faults.wave import until_all_are_routable, whole_again
from harness.network import Line
from harness.pairs import GATEWAYS, LIVENESS_S
from harness.preloaded import Preloaded
from harness.proxy import SharedLine
from harness.running import RunningCluster
from harness.steady import SteadyLoad

SEEDS = [int(seed) for seed in os.environ.get("TIDEMILL_SOAK_SEEDS", "1").split()]
REQUESTS = 1500
FAULTS = 12
CASES = 64
PROMPT_TOKENS = 120
OUTPUT_TOKENS = 40
LANES = 8
WAIT_FOR_RANKS_S = 180.0
REFUSED_FROM_BYTES = 1 << 20
STEP_S = 3600.0


@dataclass(frozen=True)
class Scene:
    """What faults are made of."""

    cluster: RunningCluster
    servers: dict[str, SharedLine]
    """The lines by which all services reach NATS and etcd."""
    line: Line | str
    """To a namespace, or why there is none."""
    library: Preloaded | str
    """In all processes, or why it is in none."""
    choices: random.Random

    def workers(self) -> list[str]:
        """All prefill and decode instances."""
        return [name for service, name in self.cluster.spec.instances() if service in ("prefill", "decode")]

    def others(self) -> list[str]:
        """What else is lost without an end of anybody's stream."""
        return ["router-1", "kvstore-1", "autoscaler-1"]

    async def wait(self, least_s: float = 0.1, most_s: float = 3 * LIVENESS_S) -> None:
        """For a moment, or for longer than anybody may be silent."""
        await asyncio.sleep(self.choices.uniform(least_s, most_s))


async def kill(scene: Scene) -> str:
    """A process dies and is started again after a while."""
    victim = scene.choices.choice([*scene.workers(), *scene.others(), "nats", "etcd"])
    scene.cluster.kill(victim)
    await scene.wait(0.0, 2 * LIVENESS_S)
    await asyncio.to_thread(scene.cluster.restart, victim)
    return f"kill {victim}"


async def freeze(scene: Scene) -> str:
    """A process stands still for a moment or for longer than it may."""
    victim = scene.choices.choice([*scene.workers(), *scene.others(), "nats", "etcd", *GATEWAYS])
    scene.cluster.kill(victim, signal.SIGSTOP)
    await scene.wait()
    scene.cluster.kill(victim, signal.SIGCONT)
    return f"freeze {victim}"


async def kill_rank(scene: Scene) -> str:
    """A rank dies or stands still under its living service, which replaces it."""
    victim = scene.choices.choice(scene.workers())
    end = time.monotonic() + WAIT_FOR_RANKS_S
    while not (before := scene.cluster.rank_pids(victim)):
        assert time.monotonic() < end, f"{victim} has no rank"
        await asyncio.sleep(0.1)
    signum = scene.choices.choice([signal.SIGKILL, signal.SIGSTOP])
    scene.cluster.kill_rank(victim, signum=signum)
    while set(before) & set(scene.cluster.rank_pids(victim)) or not scene.cluster.rank_pids(victim):
        assert time.monotonic() < end, f"{victim}'s rank was not replaced"
        await asyncio.sleep(0.1)
    return f"{signal.Signals(signum).name} to a rank of {victim}"


async def replace(scene: Scene) -> str:
    """A service is replaced as in a rollout."""
    victim = scene.choices.choice([name for _, name in scene.cluster.spec.instances()])
    await asyncio.to_thread(scene.cluster.replace, victim)
    return f"replace {victim}"


async def cut_server(scene: Scene) -> str:
    """Nobody reaches NATS, or etcd, for a while."""
    victim = scene.choices.choice(["nats", "etcd"])
    scene.servers[victim].cut()
    await scene.wait()
    scene.servers[victim].mend()
    return f"cut {victim}"


async def cut_service(scene: Scene) -> str:
    """A process, or a worker's rank alone, is moved behind the line, which is cut for a while, and home again."""
    victim, alone = scene.choices.choice([*scene.workers(), *scene.others()]), scene.choices.random() < 0.5
    pause_s = scene.choices.uniform(0.1, 3 * LIVENESS_S)
    if isinstance(scene.line, str):
        return f"no cut of {victim}: {scene.line}"
    home = scene.cluster.cluster.record(victim).argv
    rank_alone = alone and victim in scene.workers()
    async with (rank_behind if rank_alone else behind)(scene.cluster, scene.line, victim):
        await until_all_are_routable(scene.cluster)
        scene.line.cut()
        await asyncio.sleep(pause_s)
    await asyncio.to_thread(scene.cluster.replace, victim, home)
    return f"cut {'the rank of ' if rank_alone else ''}{victim}"


async def lose_lease(scene: Scene) -> str:
    """A lease ends while its process is well."""
    service, victim = scene.choices.choice(list(scene.cluster.spec.instances()))
    await end_lease(scene.cluster, service, victim)
    return f"end the lease of {victim}"


async def refuse_disk(scene: Scene) -> str:
    """The disk of kvstore takes nothing more for a while, as if it were full."""
    store = scene.cluster.cluster.record("kvstore-1").pid
    soft, hard = resource.prlimit(store, resource.RLIMIT_FSIZE)
    resource.prlimit(store, resource.RLIMIT_FSIZE, (REFUSED_FROM_BYTES, hard))
    await scene.wait()
    resource.prlimit(store, resource.RLIMIT_FSIZE, (soft, hard))
    return "refuse what kvstore-1 writes"


async def told_library(scene: Scene, what: str, tell: Callable[[Preloaded, float], None], value: float) -> str:
    """The library in all processes does something for a while, and then no more."""
    pause_s = scene.choices.uniform(0.1, 3 * LIVENESS_S)
    if isinstance(scene.library, str):
        return f"no {what}: {scene.library}"
    tell(scene.library, value)
    await asyncio.sleep(pause_s)
    tell(scene.library, 0.0)
    return what


async def slow_disk(scene: Scene) -> str:
    """The disk of kvstore takes its time."""
    return await told_library(scene, "slow disk", Preloaded.slow_disk, scene.choices.uniform(0.1, LIVENESS_S))


async def step_clock(scene: Scene) -> str:
    """The wall clock jumps, and back."""
    return await told_library(scene, "step of the clock", Preloaded.set_clock, scene.choices.choice([-STEP_S, STEP_S]))


KINDS = [
    kill, kill, freeze, kill_rank, replace, cut_server, cut_service, lose_lease, refuse_disk, slow_disk, step_clock,
]  # fmt: skip


def in_random_order(choices: random.Random) -> Iterator[Callable[[Scene], Awaitable[str]]]:
    """All kinds of faults, again and again, each time in another order."""
    while True:
        yield from choices.sample(KINDS, len(KINDS))


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", SEEDS)
async def test_fifteen_hundred_requests_outlive_random_faults(
    spread, servers, namespace, library, spread_wave, oracle, record_property, seed
):
    print(f"again: TIDEMILL_SOAK_SEEDS={seed} make test-full ARGS=tests/faults/test_faults_soak.py")
    requests, faults = -(-REQUESTS // len(SEEDS)), -(-FAULTS // len(SEEDS))
    scene = Scene(spread, servers, namespace, library, random.Random(seed))
    everybody = [name for _, name in spread.spec.instances()]
    prompts, answers = oracle.cases("soak", CASES, PROMPT_TOKENS, OUTPUT_TOKENS)
    done, to_come = [], in_random_order(scene.choices)
    async with SteadyLoad(spread, prompts, answers, lanes=LANES, gateways=GATEWAYS, timeout_s=180.0) as load:
        while load.served < requests or len(done) < faults:
            done.append(await next(to_come)(scene))
            print(f"{load.served} requests, fault {len(done)}: {done[-1]}")
            await spread.until_members(*everybody)
            # A rank that is frozen while it starts would be waited for as long as a large model may take to load.
            await until_all_are_routable(spread)
            await load.until_served(scene.choices.randrange(1, 2 * LANES))
    record_property("faults", done)
    assert any(stream.attempts > 1 for stream in load.streams), "no fault met a request"
    await whole_again(spread, spread_wave)
