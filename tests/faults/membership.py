"""Faults of membership that tests cause in etcd."""

import asyncio

from harness.running import RunningCluster

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.membership.etcd import EtcdClient, LeaseClient

PATIENCE_S = 180.0


async def end_lease(cluster: RunningCluster, role: str, instance: str) -> None:
    """Ends an instance's lease in etcd, as if no renewal had come in time; returns when it has registered anew."""
    settings = ServiceSettings(etcd=cluster.etcd, liveness_s=60.0)
    key = f"/tidemill/default/instances/{role}/{instance}"
    before = (await cluster.look()).members[instance].record.incarnation
    client, leases = EtcdClient(settings), LeaseClient(settings)
    try:
        holder = await client.create(key, b"", 0)
        await asyncio.to_thread(leases.revoke, holder.lease, 60.0)
    finally:
        await client.close()
        leases.close()
    async with asyncio.timeout(PATIENCE_S):
        while (now := (await cluster.look()).members.get(instance)) is None or now.record.incarnation == before:
            await asyncio.sleep(0.1)
