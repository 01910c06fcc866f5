"""A worker that loses single requests while it serves others: each is found, tried again, and leaves nothing behind."""

import asyncio
import signal
import sys
from pathlib import Path

from faults.seen import Watch
from faults.wave import PATIENCE_S, until_all_are_routable
from harness.running import END_S, RunningCluster

from tidemill_local import processes, servers
from tidemill_local.cluster import running_addresses
from tidemill_local.spec import service_argv

# The first test's time includes the start of a cluster.
# Each is dropped once inside the process that has it.
FAULTS = {
    "prefill": ["submit of the gateway", "submit", "last output", "last output to the gateway"],
    "decode": [
        "submit of the gateway", "submit", "kv wanted", "kv ready", "output", "last output",
        "last output to the gateway", "abort of the gateway",
    ],
}  # fmt: skip
FORGETFUL = Path(__file__).with_name("forgetful.py")


def add_forgetful(cluster: RunningCluster, role: str) -> processes.ProcessRecord:
    """Starts one more worker, with faults."""
    instance = f"{role}-forgetful"
    _, _, _, *flags = service_argv(cluster.spec, cluster.home, running_addresses(cluster.home), role, instance)
    argv = [sys.executable, str(FORGETFUL), role, ",".join(FAULTS[role]), *flags]
    return servers.launch(instance, argv, cluster.home)


def still_to_come(cluster: RunningCluster) -> set[str]:
    """The faults that have not happened yet."""
    wanted = {(role, name) for role, names in FAULTS.items() for name in names}
    logs = {role: (cluster.home.logs / f"{role}-forgetful.log").read_text().splitlines() for role in FAULTS}
    return {f"{role}: {name}" for role, name in wanted if f"forgets: {name}" not in logs[role]}


async def test_what_a_worker_forgets_is_tried_again_and_leaves_nothing(pairs, wave):
    seen = Watch(pairs)
    added = [add_forgetful(pairs, role) for role in FAULTS]
    members = [*(name for _, name in pairs.spec.instances()), *(record.name for record in added)]
    try:
        await pairs.until_members(*members)
        await until_all_are_routable(pairs, *(record.name for record in added))
        async with asyncio.timeout(2 * PATIENCE_S):
            while still_to_come(pairs):
                async with wave(streams=24, output_tokens=40) as disturbed:
                    pass
                disturbed.check_whole()
        await pairs.holds_are_zero()
        await seen.assert_seen("a request lost inside a worker")
        counters = [member.status.counters for name, member in (await pairs.look()).members.items() if "forget" in name]
        assert sum(counted["forgotten_rank"] for counted in counters) >= 1, counters
    finally:
        for record in added:
            processes.send(record, signal.SIGTERM)
        limit_s = float(pairs.spec.settings["all"]["drain_s"]) + END_S
        assert all([await asyncio.to_thread(processes.wait_gone, record, limit_s) for record in added])
