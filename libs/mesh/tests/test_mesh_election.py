"""One leader at a time, by a lease that the holder itself knows to be over."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.membership import Election
from tidemill_mesh.membership.registration import leader_key

SettingsMaker = Callable[..., ServiceSettings]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]
Child = Callable[..., Awaitable[asyncio.subprocess.Process]]
TTL_S = 2.0
LONG_S = 60.0
"""No machine stands still for so long."""


def election(settings: ServiceSettings, holder: str, ttl_s: float = TTL_S) -> Election:
    return Election(settings, leader_key(settings.mesh, "autoscaler"), ttl_s, holder)


async def test_the_first_leads_and_the_second_follows_when_it_steps_down(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    settings = mesh_settings(etcd=etcd.address)
    one, two = election(settings, "one", LONG_S), election(settings, "two", LONG_S)
    await one.start()
    await eventually(one.is_leader)
    await two.start()
    await eventually(lambda: two.leader == "one")
    assert not two.is_leader()
    token = one.fencing_token
    await one.close()
    assert not one.is_leader()
    # It looks by itself in each third of its lease.
    two._wake.set()
    await eventually(two.is_leader)
    assert two.fencing_token > token > 0
    await two.close()


async def test_a_leader_cut_off_from_etcd_knows_its_time_is_over(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    one = election(mesh_settings(etcd=own_etcd.address), "one")
    await one.start()
    await eventually(one.is_leader)
    own_etcd.send(signal.SIGSTOP)
    await eventually(lambda: not one.is_leader())
    own_etcd.send(signal.SIGCONT)
    await eventually(one.is_leader)
    await one.close()


LEADER = """
import asyncio, os, sys, time
from tidemill_mesh import log
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.membership import Election

async def main():
    log.configure("console", "error", "autoscaler", "frozen")
    settings = ServiceSettings(etcd=sys.argv[1], liveness_s=0.6)
    election = Election(settings, sys.argv[2], 2.0, "frozen")
    await election.start()
    while not election.is_leader():
        await asyncio.sleep(0.01)
    print("leads", flush=True)
    # No await from here on: after the thaw it looks before any task of the process could notice the loss.
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.001)
    print("leads" if election.is_leader() else "stepped down", flush=True)

asyncio.run(main())
"""


async def test_a_frozen_leader_thaws_without_believing_that_it_leads(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually, child: Child, tmp_path: Path
) -> None:
    settings = mesh_settings(etcd=etcd.address)
    key = leader_key(settings.mesh, "autoscaler")
    process = await child(LEADER, settings.etcd, key, str(tmp_path / "look"))
    assert process.stdout is not None
    assert await process.stdout.readline() == b"leads\n"
    os.kill(process.pid, signal.SIGSTOP)
    two = election(settings, "two")
    await two.start()
    await eventually(two.is_leader)
    (tmp_path / "look").touch()
    os.kill(process.pid, signal.SIGCONT)
    assert await process.stdout.readline() == b"stepped down\n"
    await eventually(two.is_leader)
    await two.close()


async def test_a_campaign_starts_before_etcd(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    own_etcd.stop()
    one = election(mesh_settings(etcd=own_etcd.address), "one")
    await one.start()
    await asyncio.to_thread(own_etcd.start)
    await eventually(one.is_leader)
    await one.close()
