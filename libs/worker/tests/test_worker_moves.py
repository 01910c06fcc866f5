"""Moves of running requests as the worker sees them: what is told to the engine and to the gateway in each state."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ready_rank import RANK

from tidemill.mesh.v1 import common_pb2, membership_pb2, transfer_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_engine.sampling_params import RequestState
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import Metrics
from tidemill_worker import moves
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.hand_over_source import serve_pull
from tidemill_worker.reaper import reap
from tidemill_worker.requests import LiveRequest, SourceProgress
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.slabs import layout_of
from tidemill_worker.ticket_offers import to_domain_id
from tidemill_worker.tickets import TicketBook
from tidemill_worker.transfers import RankTransfers
from tidemill_worker.translate import from_key
from tidemill_worker.worker import Worker

KEY = messages.RequestKey("r", 0, 1)
TARGET = common_pb2.DomainRef(instance="d-2", incarnation="i2", epoch="e2")
STATE = RequestState(
    prompt_tokens=3,
    committed_token_ids=[1, 2, 3, 7, 8],
    pending_token_id=8,
    computed_tokens=4,
    sampler_position=2,
    seed=5,
)


@dataclass
class Domain:
    """Takes commands."""

    index: int = 0
    epoch: str = "e1"
    up: bool = True
    ready: list[Any] = field(default_factory=lambda: [SimpleNamespace(kv_format="f")])
    sent: list[Any] = field(default_factory=list)

    def send(self, *commands: Any) -> None:
        self.sent += commands

    def send_rank(self, _rank: int, *commands: Any) -> None:
        self.send(*commands)


class World:
    """A decode worker with one request that decodes."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.domain = Domain()
        self.session = GatewaySession(common_pb2.InstanceRef(instance="g-1"), 1000)
        self.worker = Worker(
            settings=WorkerSettings(hold_s=10.0),
            role=membership_pb2.ROLE_DECODE,
            instance="d-1",
            channels=None,  # type: ignore[arg-type]
            counts=WorkerCounts(Metrics("decode", "d-1")),
            tickets=TicketBook(lambda: self.now_s),
            transfers=None,  # type: ignore[arg-type]
            clock=lambda: self.now_s,
            incarnation="i1",
            domains=[self.domain],  # type: ignore[list-item]
            sessions={self.session},
        )
        self.live = LiveRequest(
            KEY, self.session, 0, "whole", deadline_at=1000.0, progress=SourceProgress(total_tokens=3)
        )
        self.worker.table.add(self.live)

    def told(self) -> list[worker_pb2.ConnectResponse]:
        """What the gateway was told since the last call."""
        outbox, messages_sent = self.session._outbox, []
        while outbox:
            messages_sent.append(outbox.popleft())
        return messages_sent

    def commands(self) -> list[Any]:
        """What the engine was told since the last call."""
        sent, self.domain.sent = self.domain.sent, []
        return sent

    def offer(self) -> None:
        assert moves.offer(self.worker, self.live, "test")

    def hand_over(self) -> messages.Suspend | None:
        order = worker_pb2.HandOver(key=from_key(KEY), target=common_pb2.Target(domain=TARGET))
        moves.hand_over(self.worker, self.live, order)
        return next((c for c in self.commands() if isinstance(c, messages.Suspend)), None)

    def suspended(self, move_id: int) -> None:
        report = messages.Suspended(KEY, move_id, [4, 5], [b"h" * 16], -1, STATE)
        moves.suspended(self.worker, report)

    def standing_still(self) -> worker_pb2.Ticket:
        self.offer()
        suspend = self.hand_over()
        assert suspend is not None
        self.told()
        self.suspended(suspend.move_id)
        [offered] = self.told()
        return offered.tickets[0].ticket

    def stays(self) -> None:
        moves.stays(self.worker, self.session, from_key(KEY))


def totals(world: World) -> dict[str, int]:
    found = world.worker.counts.totals
    return {name: count for name, count in found.items() if name.startswith("moves_")}


def test_an_offered_request_is_suspended_for_the_target_and_given_a_ticket() -> None:
    world = World()
    world.offer()
    [offered] = world.told()
    assert offered.step.outputs[0].move_due
    assert not moves.offer(world.worker, world.live, "again")
    suspend = world.hand_over()
    assert suspend is not None
    assert suspend.hold_s > 10.0
    world.suspended(suspend.move_id)
    [answer] = world.told()
    ticket = answer.tickets[0].ticket
    assert (ticket.decode, ticket.prefill.instance) == (TARGET, "d-1")
    assert world.live.held_until == 110.0
    assert not world.live.is_told
    assert (world.live.progress.block_ids, world.live.progress.state) == ([4, 5], STATE)
    world.worker.tickets.redeem(ticket.secret, KEY, world.worker.domain_id(world.domain), to_domain_id(TARGET))  # type: ignore[arg-type]
    moves.pulled(world.worker, world.live, "done")
    assert world.commands() == [messages.Release(KEY)]
    assert len(world.worker.table) == 0
    assert totals(world) == {"moves_offered": 1, "moves_done": 1}


def test_without_room_the_engine_hears_it_and_nothing_changes() -> None:
    world = World()
    world.offer()
    world.stays()
    assert world.commands() == [messages.MoveRefused(KEY)]
    assert world.live.move is None
    assert totals(world) == {"moves_offered": 1, "moves_no_room": 1}


def test_one_that_the_engine_cannot_suspend_stays_and_the_gateway_is_told_by_an_empty_ticket() -> None:
    world = World()
    world.offer()
    suspend = world.hand_over()
    assert suspend is not None
    world.told()
    moves.refused(world.worker, messages.Stays(KEY, suspend.move_id))
    [answer] = world.told()
    assert not answer.tickets[0].HasField("ticket")
    assert world.live.move is None
    assert totals(world) == {"moves_offered": 1, "moves_not_now": 1}


def test_a_move_that_comes_to_nothing_goes_on_here_and_its_ticket_is_void() -> None:
    world = World()
    world.standing_still()
    world.stays()
    assert world.commands() == [messages.Resume(KEY)]
    assert world.live.held_until is None
    assert len(world.worker.tickets) == 0
    assert totals(world) == {"moves_offered": 1, "moves_failed": 1}


def test_a_pull_that_breaks_leaves_the_kv_until_the_gateway_has_decided() -> None:
    world = World()
    world.standing_still()
    world.live.pulling = True
    moves.pulled(world.worker, world.live, "failed")
    assert world.commands() == []
    assert world.live.held_until is not None
    world.stays()
    assert world.commands() == [messages.Resume(KEY)]


def test_while_it_is_fetched_it_does_not_go_on_here_before_the_fetch_has_ended_incomplete() -> None:
    world = World()
    world.standing_still()
    world.live.pulling = True
    world.live.changed.clear()
    world.stays()
    assert world.live.changed.is_set()
    assert (world.commands(), world.told()) == ([], [])
    moves.pulled(world.worker, world.live, "failed")
    assert world.commands() == [messages.Resume(KEY)]
    assert world.live.held_until is None
    assert totals(world) == {"moves_offered": 1, "moves_failed": 1}


async def test_calling_a_move_off_ends_the_fetch_that_waits_for_its_target() -> None:
    world = World()
    world.domain.ready = [RANK]
    world.worker.transfers = RankTransfers(1e9, lambda *_: None)
    ticket = world.standing_still()
    request = transfer_pb2.PullRequest(
        ticket=ticket, key=from_key(KEY), layout=layout_of([RANK], world.worker.settings.block_size), deadline_s=30.0
    )
    pull = serve_pull(world.worker, request)
    assert (await anext(pull)).HasField("source_layout")
    assert (await anext(pull)).slab.num_blocks == 2
    ending = asyncio.ensure_future(anext(pull))
    while not any(isinstance(command, messages.SendKV) for command in world.domain.sent):
        await asyncio.sleep(0)
    assert world.live.pulling
    world.stays()
    assert messages.Resume(KEY) not in world.domain.sent
    with pytest.raises(MeshError) as caught:
        await ending
    assert caught.value.code == errors_pb2.ERROR_CODE_STALE
    assert world.commands()[-1] == messages.Resume(KEY)
    assert len(world.worker.tickets) == 0
    assert totals(world) == {"moves_offered": 1, "moves_failed": 1}


def test_one_that_was_fetched_whole_when_its_move_was_called_off_ends_here() -> None:
    world = World()
    world.standing_still()
    world.live.pulling = True
    world.stays()
    moves.pulled(world.worker, world.live, "done")
    assert world.commands() == [messages.Abort(KEY)]
    [answer] = world.told()
    assert answer.step.outputs[0].error.code == errors_pb2.ERROR_CODE_WORKER_LOST
    assert len(world.worker.table) == 0


def test_one_that_ended_while_its_fetch_was_called_off_is_not_resumed() -> None:
    world = World()
    world.standing_still()
    world.live.pulling = True
    world.stays()
    world.worker.abort(world.live, "test", tell=True)
    world.commands()
    moves.pulled(world.worker, world.live, "failed")
    assert world.commands() == []


def test_what_nobody_fetches_in_time_goes_on_here() -> None:
    world = World()
    world.standing_still()
    world.now_s += 9.9
    reap(world.worker)
    assert world.commands() == []
    world.now_s += 0.2
    reap(world.worker)
    assert world.commands() == [messages.Resume(KEY)]
    assert totals(world) == {"moves_offered": 1, "moves_expired": 1}
    assert len(world.worker.table) == 1


def test_a_report_of_an_earlier_move_is_not_taken_for_this_one() -> None:
    world = World()
    world.offer()
    first = world.hand_over()
    assert first is not None
    world.stays()
    world.offer()
    assert world.hand_over() is not None
    world.told()
    world.suspended(first.move_id)
    assert world.told() == []
    assert world.live.held_until is None


def test_a_gateway_that_asks_for_a_request_that_is_gone_gets_an_error_to_go_on_from() -> None:
    world = World()
    world.worker.finished(world.live, "length")
    world.stays()
    [answer] = world.told()
    assert answer.step.outputs[0].error.code == errors_pb2.ERROR_CODE_NOT_FOUND


def test_a_hand_over_that_was_not_asked_for_suspends_nothing() -> None:
    world = World()
    assert world.hand_over() is None
    [answer] = world.told()
    assert not answer.tickets[0].HasField("ticket")


def test_an_abort_while_it_stands_still_is_told() -> None:
    world = World()
    world.standing_still()
    world.worker.abort(world.live, "test", tell=True)
    [answer] = world.told()
    assert answer.step.outputs[0].finish == worker_pb2.FINISH_ABORTED
    assert len(world.worker.tickets) == 0


def test_a_draining_instance_offers_a_few_at_a_time_and_asks_again() -> None:
    world = World()
    for index in range(2 * moves.MOST_AT_ONCE - 1):
        key = messages.RequestKey(f"more{index}")
        world.worker.table.add(LiveRequest(key, world.session, 0, "whole", 1000.0, SourceProgress(total_tokens=3)))
    held = LiveRequest(messages.RequestKey("p"), world.session, 0, "prefill", 1000.0, SourceProgress(total_tokens=3))
    world.worker.table.add(held)
    offered: list[set[str]] = []
    for _ in range(3):
        for _ in range(2):
            moves.offer_some(world.worker)
        offered.append({live.key.request_id for live in world.worker.table if live.move is not None})
        world.now_s += moves.RETRY_S + 0.1
    assert [len(names) for names in offered] == [moves.MOST_AT_ONCE] * 3
    assert offered[0] | offered[1] == {live.key.request_id for live in world.worker.table} - {"p"}
    assert totals(world)["moves_offered"] == 3 * moves.MOST_AT_ONCE


class EmulatedEngine:
    """Acts on the commands in their order; its reports wait until somebody takes them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.standing = False
        self.reports: list[messages.Suspended | messages.Stays] = []

    def act(self, can_stand_still: bool) -> None:
        for command in self.world.commands():
            match command:
                case messages.Suspend() if can_stand_still and not self.standing:
                    self.standing = True
                    self.reports.append(messages.Suspended(KEY, command.move_id, [4, 5], [b"h" * 16], -1, STATE))
                case messages.Suspend():
                    self.reports.append(messages.Stays(KEY, command.move_id))
                case messages.Resume() | messages.Release() | messages.Abort():
                    self.standing = False

    def report(self) -> None:
        if self.reports:
            report = self.reports.pop(0)
            taker = moves.suspended if isinstance(report, messages.Suspended) else moves.refused
            taker(self.world.worker, report)  # type: ignore[arg-type]


ACTIONS = ["offer", "hand_over", "engine", "engine_cannot", "report", "stays", "pull", "pulled", "broken", "time"]


@given(st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_whatever_happens_it_never_stands_still_for_good(actions: list[str]) -> None:
    world = World()
    engine, live = EmulatedEngine(world), world.live

    def act(action: str) -> None:
        match action:
            case "offer":
                moves.offer(world.worker, live, "test")
            case "hand_over":
                order = worker_pb2.HandOver(key=from_key(KEY), target=common_pb2.Target(domain=TARGET))
                moves.hand_over(world.worker, live, order)
            case "engine" | "engine_cannot":
                engine.act(can_stand_still=action == "engine")
            case "report":
                engine.report()
            case "stays":
                world.stays()
            case "pull" if live.held_until is not None:
                live.pulling = True
            case "pulled" | "broken" if live.pulling:
                moves.pulled(world.worker, live, "done" if action == "pulled" else "failed")
            case "time":
                world.now_s += 11.0
                reap(world.worker)

    for action in actions:
        if live not in list(world.worker.table):
            break
        act(action)
        assert live.held_until is None or live.move is not None
        assert len(world.worker.tickets) <= 1
    # The peer is gone, what was under way arrives, and the gateway or the clock decides.
    if live in list(world.worker.table):
        if live.pulling:
            act("broken")
        for action in ("engine", "report", "report", "report", "time", "engine", "stays", "engine", "report", "time"):
            if live in list(world.worker.table):
                act(action)
    engine.act(can_stand_still=True)
    assert not engine.standing
    assert len(world.worker.tickets) == 0
