"""Hand-overs whose bytes do not arrive: both ends say so, and the one that takes names the other as silent."""

import socket

import grpc
import pytest
from emulated_peer import flipping_peer
from gateway_rig import GatewayRig, key, read_card
from worker_rig import Connect, StartWorker

from tidemill.mesh.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import from_rpc_error
from tidemill_transfer.address import AgentAddress
from tidemill_worker.hand_over_source import UNDELIVERED_FIELD

TIMEOUT_S = 2.0
"""Of a transfer: each miss costs it."""
LONG_S = 3600.0
ENOUGH = 20
KV_HEADS = 2
"""Of the tiny model."""


async def silent(d: GatewayRig) -> list[common_pb2.DomainRef]:
    return [source for load in (await d.status()).loads for source in load.silent]


async def test_a_source_whose_bytes_do_not_arrive_twice_is_reported_until_some_do(
    start_worker: StartWorker, connect: Connect
) -> None:
    decode = start_worker("decode", "silent-d", transfer_timeout_s=TIMEOUT_S, silent_s=LONG_S)
    async with connect(decode) as d:
        card = await read_card(d)

        async def hand_over(name: str, source: common_pb2.Target) -> worker_pb2.Output:
            prompt = [(3 * i + 111) % 250 for i in range(3 * card.block_size)]
            ticket = worker_pb2.Ticket(
                secret=b"t" * 16, prefill=source.domain, decode=d.target().domain, deadline_s=300.0
            )
            d.submit(name, prompt, "DECODE", source=worker_pb2.HandOverSource(prefill=source, ticket=ticket))
            return await d.finished(name)

        async with flipping_peer(card.block_size * card.kv_bytes_per_token, "ucx") as (peer, target):
            peer.pull_blocks, peer.is_mute, peer.flips = 3, True, False
            for misses in range(2):
                assert await silent(d) == [], f"after {misses} misses"
                assert (await hand_over(f"mute-{misses}", target)).error.code == errors_pb2.ERROR_CODE_WORKER_LOST
            assert await silent(d) == [target.domain]
            assert (await d.status()).counters["undelivered_transfers"] == 2
            peer.is_mute = False
            # Nobody is kept from trying; a busy machine may need more than one.
            for number in range(ENOUGH):
                await hand_over(f"heard-{number}", target)
                if not await silent(d):
                    break
            assert await silent(d) == []
        await d.until_idle()


@pytest.mark.parametrize("request_s", [LONG_S, TIMEOUT_S / 2])
async def test_prefill_says_that_nobody_took_its_bytes_unless_the_request_had_no_time_for_it(
    start_worker: StartWorker, connect: Connect, request_s: float
) -> None:
    prefill = start_worker("prefill", f"unheard-{request_s:.0f}", transfer_timeout_s=TIMEOUT_S)
    # Takes connections and never says a word.
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        async with connect(prefill) as p:
            card = await read_card(p)
            domain = common_pb2.DomainRef(instance="d", incarnation="i", epoch="e")
            p.submit("unheard", [(5 * i) % 250 for i in range(3 * card.block_size)], "PREFILL")
            await p.due("unheard")
            p.send(hand_overs=[worker_pb2.HandOver(key=key("unheard"), target=common_pb2.Target(domain=domain))])
            await p.until(lambda: "unheard" in p.tickets)
            address = AgentAddress("ucx", "127.0.0.1", nobody.getsockname()[1], "r")
            layout = transfer_pb2.KVLayout(
                kv_format=card.kv_format,
                dtype="float32",
                block_size=card.block_size,
                ranks=[transfer_pb2.RankLayout(rank=0, transfer_address=str(address), head_end=KV_HEADS)],
            )
            request = transfer_pb2.PullRequest(
                ticket=p.tickets["unheard"], key=key("unheard"), layout=layout, deadline_s=request_s
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in transfer_pb2_grpc.TransferServiceStub(p.channel).Pull(request, timeout=300.0):
                    pass
            told = from_rpc_error(caught.value).field
            assert told == (UNDELIVERED_FIELD if request_s > TIMEOUT_S else "")
            await p.until_idle()
