"""Steps between leader and followers, and transfers against a pool, in one process over real sockets."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tidemill_engine import rank_transfers
from tidemill_engine.messages import EngineError, PieceSpec, RecvKV, SendKV, TransferDone, TransferFailed
from tidemill_engine.rank_steps import PeerLost, StepFollower, StepLeader
from tidemill_engine.rank_transfers import RankTransfers
from tidemill_engine.step import ScheduledRow, SchedulerOutput
from tidemill_transfer.agent import open_agent
from tidemill_transfer.checksum import checksum64

BLOCK_BYTES = 64


def follow(path: Path, watchdog_s: float = 300.0) -> StepFollower:
    return StepFollower(str(path), 1, 300.0, watchdog_s)


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def domain(tmp_path: Path, lost: list[str]) -> Any:
    leader = StepLeader(str(tmp_path / "steps"), 1, lost.append)
    follower = follow(tmp_path / "steps")
    leader.accept(300.0)
    yield leader, follower
    leader.close()
    follower.close()


def test_a_follower_gets_steps_in_order_and_an_end(domain):
    leader, follower = domain
    steps = [SchedulerOutput(step=i, rows=[ScheduledRow(i, 0, 1, [7], True)]) for i in range(3)]
    leader.send_heartbeat()
    for step in steps:
        leader.send_step(step)
    leader.close()
    assert [follower.receive_step() for _ in range(4)] == [*steps, None]


def test_a_follower_that_leaves_is_noticed_while_idle(tmp_path, lost):
    gone = threading.Event()
    leader = StepLeader(str(tmp_path / "steps"), 1, lambda reason: (lost.append(reason), gone.set()))
    follower = follow(tmp_path / "steps")
    leader.accept(300.0)
    follower.close()
    assert gone.wait(300.0)
    assert lost == ["rank 1 of the domain is gone"]
    leader.close()


def test_a_leader_that_leaves_without_a_word_is_lost(tmp_path, lost):
    leader = StepLeader(str(tmp_path / "steps"), 1, lost.append)
    follower = follow(tmp_path / "steps")
    leader.accept(300.0)
    for connection in leader._followers.values():
        connection.shutdown(2)
    with pytest.raises(PeerLost, match="gone"):
        follower.receive_step()
    leader.close()
    follower.close()


def test_a_silent_leader_is_lost_after_the_watchdog(tmp_path, lost):
    leader = StepLeader(str(tmp_path / "steps"), 1, lost.append)
    follower = follow(tmp_path / "steps", watchdog_s=0.1)
    leader.accept(300.0)
    leader.send_heartbeat()
    with pytest.raises(PeerLost, match="silent"):
        follower.receive_step()
    leader.close()
    follower.close()


def test_a_rank_that_never_joins_is_named(tmp_path, lost):
    leader = StepLeader(str(tmp_path / "steps"), 2, lost.append)
    follower = follow(tmp_path / "steps")
    with pytest.raises(PeerLost, match=r"ranks \[2\]"):
        leader.accept(2.0)
    leader.close()
    follower.close()
    with pytest.raises(PeerLost, match="no leader"):
        StepFollower(str(tmp_path / "nobody"), 1, 0.1, 1.0)


class BytesPool:
    """A pool whose blocks are rows of bytes."""

    num_blocks = 8

    def __init__(self) -> None:
        self.blocks = np.arange(8 * BLOCK_BYTES, dtype=np.uint32).astype(np.uint8).reshape(8, BLOCK_BYTES)
        self.may_write = threading.Event()
        self.may_write.set()
        self.writing = threading.Event()

    def canonical_bytes(self, num_blocks: int, *_: Any) -> int:
        return num_blocks * BLOCK_BYTES

    def gather(self, block_ids: list[int], *_: Any) -> np.ndarray:
        return self.blocks[block_ids].reshape(-1)

    def scatter(self, data: np.ndarray, block_ids: list[int], *_: Any) -> None:
        self.writing.set()
        self.may_write.wait(300.0)
        self.blocks[block_ids] = data.reshape(-1, BLOCK_BYTES)


class Peer:
    """One rank's transfers."""

    def __init__(self, agent: Any, limit_s: float = 300.0) -> None:
        self.agent, self.pool = agent, BytesPool()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.transfers = RankTransfers(agent, self.pool, limit_s, self.answers.put_nowait)


@pytest.fixture
async def peers() -> Any:
    both = [Peer(await open_agent("tcp", "127.0.0.1")) for _ in range(2)]
    yield both
    for peer in both:
        await peer.transfers.close()
        await peer.agent.close()


def piece(peer: Peer, tag: int, blocks: int, **fields: Any) -> PieceSpec:
    return PieceSpec(peer.agent.address, tag, 0, 1, blocks * BLOCK_BYTES, **fields)


async def test_bytes_move_and_both_ends_know_their_checksum(peers):
    source, target = peers
    source.pool.blocks[1:3] += 1
    expected = source.pool.blocks[[2, 1]].copy()
    source.transfers.start(SendKV(1, [2, 1], piece(target, 5, 2), 300.0))
    target.transfers.start(RecvKV(1, [6, 7], piece(source, 5, 2, checksum=checksum64(expected)), 300.0, "float32"))
    sent, received = await source.answers.get(), await target.answers.get()
    assert sent.checksum == received.checksum == checksum64(expected)
    assert (target.pool.blocks[[6, 7]] == expected).all()


async def test_bytes_with_a_wrong_checksum_never_reach_the_pool(peers):
    source, target = peers
    before = target.pool.blocks.copy()
    source.transfers.start(SendKV(1, [2], piece(target, 5, 1), 10.0))
    target.transfers.start(RecvKV(1, [6], piece(source, 5, 1, checksum=1234), 10.0, "float32"))
    answer = await target.answers.get()
    assert isinstance(answer, TransferFailed)
    assert "other bytes" in answer.error.message
    assert (target.pool.blocks == before).all()


@pytest.mark.parametrize("bad", [0, 1, 2])
async def test_good_blocks_before_a_bad_one_are_kept(peers, bad):
    source, target = peers
    source.pool.blocks += 9
    before = target.pool.blocks.copy()
    checksums = [checksum64(source.pool.blocks[i]) for i in range(3)]
    checksums[bad] += 1
    source.transfers.start(SendKV(1, [0, 1, 2], piece(target, 5, 3), 10.0))
    receive = RecvKV(1, [5, 6, 7], piece(source, 5, 3), 10.0, "float32", block_checksums=checksums)
    target.transfers.start(receive)
    answer = await target.answers.get()
    assert answer.good_blocks == bad
    assert (target.pool.blocks[5 : 5 + bad] == source.pool.blocks[:bad]).all()
    assert (target.pool.blocks[5 + bad :] == before[5 + bad :]).all()


async def test_a_cancel_during_the_write_is_answered_when_the_write_is_over(peers):
    source, target = peers
    target.pool.may_write.clear()
    source.transfers.start(SendKV(1, [2], piece(target, 5, 1), 10.0))
    target.transfers.start(RecvKV(1, [6], piece(source, 5, 1), 10.0, "float32"))
    await source.answers.get()
    await asyncio.to_thread(target.pool.writing.wait, 300.0)
    target.transfers.cancel(1)
    await asyncio.sleep(0.05)
    assert target.answers.empty()
    target.pool.may_write.set()
    assert isinstance(await target.answers.get(), TransferDone)


async def test_a_cancel_before_the_bytes_is_answered_at_once(peers):
    _, target = peers
    target.transfers.start(RecvKV(1, [6], piece(target, 5, 1), 10.0, "float32"))
    target.transfers.cancel(1)
    assert (await target.answers.get()).error.code == "CANCELLED"


@pytest.mark.parametrize(
    "more", [{}, {"sequence_slot": 0}, {"snapshot_ids": [1]}, {"per_block_snapshots": True}], ids=str
)
def test_only_blocks_alone_go_from_device_to_device(more: dict[str, Any]):
    """Gathering and scattering on a device take no state and no snapshot."""
    of_piece = PieceSpec("tcp://127.0.0.1:1/x", 5, 0, 1, BLOCK_BYTES)
    for command in (SendKV(1, [2], of_piece, 10.0, **more), RecvKV(1, [2], of_piece, 10.0, "float32", **more)):
        assert rank_transfers._is_plain(command) == (not more)


async def test_no_transfer_outlasts_the_ranks_limit(peers):
    target = Peer(peers[1].agent, limit_s=0.1)
    target.transfers.start(RecvKV(1, [6], piece(peers[0], 5, 1), 1000.0, "float32"))
    answer = await target.answers.get()
    assert answer == TransferFailed(1, EngineError("DEADLINE_EXCEEDED", answer.error.message))
    await target.transfers.close()


async def test_bytes_that_waited_for_other_copies_beyond_the_deadline_never_reach_the_pool(peers, monkeypatch):
    """The service gives up a little after the deadline, and the blocks go to another request."""
    source, target = peers
    before = target.pool.blocks.copy()
    now_s, copies = [time.monotonic()], threading.Event()
    monkeypatch.setattr(rank_transfers, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    target.transfers._copier.submit(copies.wait, 300.0)
    source.transfers.start(SendKV(1, [2], piece(target, 5, 1), 10.0))
    target.transfers.start(RecvKV(1, [6], piece(source, 5, 1), 10.0, "float32"))
    await source.answers.get()
    async with asyncio.timeout(300.0):
        while 1 not in target.transfers._writing:
            await asyncio.sleep(0)
    now_s[0] += 11.0
    copies.set()
    answer = await target.answers.get()
    assert answer == TransferFailed(1, EngineError("DEADLINE_EXCEEDED", answer.error.message))
    assert (target.pool.blocks == before).all()
