"""A disk that is slow while its kvstore is well, by a library in every process."""

import grpc
import pytest
from faults.seen import Watch
from faults.wave import Wave, run_whole, whole_again
from harness.fixtures import kept
from harness.pairs import SETTINGS, WORKER
from harness.running import RunningCluster

from tidemill.mesh.v1 import membership_pb2, worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.full

ONBOARD_S = 0.5
READ_S = 5.0
"""Of one read on the slow disk."""
PROMPT_TOKENS = 300


@pytest.fixture(scope="module")
def shimmed_cluster(checkpoint, library):
    """One of each, with the library in them."""
    if isinstance(library, str):
        pytest.skip(library)
    onboards = {"onboard_choice": "always", "onboard_min_blocks": 1, "onboard_deadline_s": ONBOARD_S}
    settings = {**SETTINGS, "prefill": {**WORKER, **onboards}}
    made = RunningCluster.start(checkpoint("llama"), settings=settings)
    with kept(made):
        yield made


@pytest.fixture
def shimmed(shimmed_cluster, shim):
    """The cluster; afterwards its disk is as quick as ever."""
    return shimmed_cluster


@pytest.fixture
def wave(shimmed, oracle, request):
    made = 0

    def make(streams: int = 8, output_tokens: int = 100) -> Wave:
        nonlocal made
        made += 1
        return Wave(shimmed, *oracle.cases(f"{request.node.name}/{made}", streams, PROMPT_TOKENS, output_tokens))

    return make


async def forget(cluster):
    """Empties L1 and L2 of all workers."""
    view = await cluster.look()
    for member in view.with_role(membership_pb2.ROLE_PREFILL, membership_pb2.ROLE_DECODE):
        async with grpc.aio.insecure_channel(member.record.endpoint) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).ResetCache(worker_pb2.ResetCacheRequest())


async def test_a_slow_disk_costs_hits_and_no_token_and_the_store_answers_meanwhile(shimmed, shim, wave, oracle):
    prompts, answers = oracle.cases("stored", 4, PROMPT_TOKENS, 20)
    await run_whole(Wave(shimmed, prompts, answers))
    await shimmed.holds_are_zero()
    await forget(shimmed)
    seen = Watch(shimmed)
    shim.slow_disk(READ_S)
    async with Wave(shimmed, prompts, answers) as slowed:
        await slowed.until_tokens(1)
        # Reads are still under way: nobody waits for them any more, and they hold nothing else up.
        assert not (await shimmed.look()).members["kvstore-1"].problem
    slowed.check_whole()
    shim.slow_disk(0.0)
    await seen.assert_seen("kvstore's disk slow")
    await whole_again(shimmed, wave)
    # Once more, under load: what is computed is on its way to the disk.
    async with wave(output_tokens=300) as disturbed:
        await disturbed.until_tokens(1)
        shim.slow_disk(READ_S)
    disturbed.check_whole()
    shim.slow_disk(0.0)
    await whole_again(shimmed, wave)
